/** TeX as MathML, which browsers draw by themselves: it needs no fonts, and no style that the page's policy would refuse. */
import DOMPurify from "dompurify";
import katex from "katex";

/** Null for what is no TeX. */
export function mathOf(tex: string, isDisplay: boolean): string | null {
  try {
    const made = katex.renderToString(tex, {
      output: "mathml",
      displayMode: isDisplay,
      strict: "ignore",
      maxExpand: 100,
    });
    const bare = made.replace(/<annotation[\s\S]*?<\/annotation>/g, "").replace(/ style="[^"]*"/g, "");
    return DOMPurify.sanitize(bare, { USE_PROFILES: { mathMl: true }, ADD_TAGS: ["semantics"], FORBID_ATTR: ["href"] });
  } catch {
    return null;
  }
}
