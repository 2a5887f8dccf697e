/** TeX as MathML, which browsers draw by themselves: it needs no fonts, and no style that the page's policy would refuse. */
import DOMPurify from "dompurify";
import katex from "katex";

// While a table grows, all of its formulas are set again with each row.
const KEPT_MAX = 1_000;
const made = new Map<string, string | null>();

/** Null for what is no TeX. */
export function mathOf(tex: string, isDisplay: boolean): string | null {
  const key = `${isDisplay} ${tex}`;
  const known = made.get(key);
  if (known !== undefined) return known;
  if (made.size >= KEPT_MAX) made.clear();
  const math = set(tex, isDisplay);
  made.set(key, math);
  return math;
}

function set(tex: string, isDisplay: boolean): string | null {
  try {
    const html = katex.renderToString(tex, {
      output: "mathml",
      displayMode: isDisplay,
      strict: "ignore",
      maxExpand: 100,
    });
    const bare = html.replace(/<annotation[\s\S]*?<\/annotation>/g, "").replace(/ style="[^"]*"/g, "");
    return DOMPurify.sanitize(bare, { USE_PROFILES: { mathMl: true }, ADD_TAGS: ["semantics"], FORBID_ATTR: ["href"] });
  } catch {
    return null;
  }
}
