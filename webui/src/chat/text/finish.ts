/** What a block of an answer gets when it is in the page: colours for its code and signs for its formulas, loaded when first needed. */
import type { HLJSApi } from "highlight.js";

/** Colour the code in `box` and set its formulas; what is not known, or no TeX, stays as it was written. */
export async function finish(box: HTMLElement): Promise<void> {
  const code = [...box.querySelectorAll<HTMLElement>(".code[data-language]:not([data-language=''])")];
  const formulas = [...box.querySelectorAll<HTMLElement>(".formula")];
  if (code.length > 0) {
    const { default: highlighter } = await import("./languages");
    code.forEach((one) => colour(highlighter, one));
  }
  if (formulas.length > 0) {
    const { mathOf } = await import("./math");
    for (const one of formulas) {
      const math = mathOf(one.textContent, one.dataset.formula === "display");
      if (math !== null) one.innerHTML = math;
    }
  }
}

function colour(highlighter: HLJSApi, block: HTMLElement): void {
  const language = block.dataset.language!.toLowerCase();
  const code = block.querySelector("code");
  if (code === null || highlighter.getLanguage(language) === undefined) return;
  code.innerHTML = highlighter.highlight(code.textContent, { language, ignoreIllegals: true }).value;
}
