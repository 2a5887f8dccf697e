/**
 * An answer's Markdown as HTML that can be shown: what a model writes as HTML is text, images are links, and what comes out is
 * cleaned once more. Code and formulas are only marked here: `finish.ts` colours and sets them.
 */
import DOMPurify from "dompurify";
import MarkdownIt, { type Token } from "markdown-it";
import { depth } from "./depth";
import { formulas } from "./formulas";

// Single line breaks stay: models write poems and lists with them.
const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true }).use(formulas).use(depth);
const { rules } = markdown.renderer;
const escape = markdown.utils.escapeHtml;

rules.fence = rules.code_block = (tokens, at) => {
  const { content, info } = tokens[at]!;
  const language = info.trim().split(/\s/, 1)[0]!;
  return `<div class="code" data-language="${escape(language)}"><pre tabindex="0"><code>${escape(content)}</code></pre></div>`;
};

/** An image would tell whoever serves it that the answer was read, and the page's policy fetches none: it is a link. */
rules.image = (tokens, at) => {
  const { attrs, content } = tokens[at]!;
  const source = String(attrs?.find(([name]) => name === "src")?.[1] ?? "");
  return `<a href="${escape(source)}">${escape(content || source)}</a>`;
};

/** Wide tables scroll by themselves. */
rules.table_open = () => '<div class="table" tabindex="0"><table>';
rules.table_close = () => "</table></div>";

/** The HTML of each block of `text`: while a text grows, only its last blocks change. */
export function blocksOf(text: string): string[] {
  const env = {};
  const blocks: string[] = [];
  let block: Token[] = [];
  let depth = 0;
  for (const token of markdown.parse(text, env)) {
    block.push(token);
    depth += token.nesting;
    if (depth > 0) continue;
    blocks.push(cleaned(markdown.renderer.render(block, markdown.options, env)));
    block = [];
  }
  return blocks;
}

// A hook is the library's own way to look at each element that stays.
DOMPurify.addHook("afterSanitizeAttributes", (element) => {
  if (element.tagName !== "A") return;
  element.setAttribute("target", "_blank");
  element.setAttribute("rel", "noopener noreferrer");
});

function cleaned(html: string): string {
  return DOMPurify.sanitize(html, {
    USE_PROFILES: { html: true },
    FORBID_TAGS: ["form", "img", "input", "button", "style"],
    FORBID_ATTR: ["style", "id", "name"],
  });
}
