/** Formulas in Markdown: $…$ and \(…\) in a line, $$…$$ and \[…\] on their own, each marked with its TeX for `finish.ts`. */
import type { MarkdownIt } from "markdown-it";

const PAIRS = [
  { open: "$$", close: "$$", isDisplay: true },
  { open: "\\[", close: "\\]", isDisplay: true },
  { open: "\\(", close: "\\)", isDisplay: false },
  { open: "$", close: "$", isDisplay: false },
];

export function formulas(markdown: MarkdownIt): void {
  markdown.inline.ruler.before("escape", "formula", (state, isSilent) => {
    const pair = PAIRS.find(({ open }) => state.src.startsWith(open, state.pos));
    if (pair === undefined) return false;
    const { open, close, isDisplay } = pair;
    const begin = state.pos + open.length;
    const end = state.src.indexOf(close, begin);
    if (end <= begin || end + close.length > state.posMax) return false;
    const tex = state.src.slice(begin, end);
    // Prices are no formulas: "$5 and $10".
    if (open === "$" && (/^\s|\s$/.test(tex) || /\d/.test(state.src[end + 1] ?? ""))) return false;
    if (!isSilent) {
      const token = state.push("formula", "", 0);
      token.content = tex;
      token.info = isDisplay ? "display" : "line";
    }
    state.pos = end + close.length;
    return true;
  });
  markdown.renderer.rules.formula = (tokens, at) => {
    const { content, info } = tokens[at]!;
    return `<span class="formula" data-formula="${info}">${markdown.utils.escapeHtml(content)}</span>`;
  };
}
