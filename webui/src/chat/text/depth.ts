/** How deep lists and quotes are nested: what is deeper is a paragraph as it was written. markdown-it alone would leave it out. */
import type { MarkdownIt } from "markdown-it";

const LEVEL_MAX = 80; // a list has two levels, a quote one; markdown-it ends at a hundred

export function depth(markdown: MarkdownIt): void {
  markdown.block.ruler.before("table", "depth", (state, begin, last) => {
    if (state.level < LEVEL_MAX) return false;
    let end = begin + 1;
    while (end < last && (state.isEmpty(end) || state.sCount[end]! >= state.blkIndent)) end++;
    state.push("paragraph_open", "p", 1);
    const text = state.push("inline", "", 0);
    text.content = state.getLines(begin, end, state.blkIndent, false).trim();
    text.children = [];
    state.push("paragraph_close", "p", -1);
    state.line = end;
    return true;
  });
}
