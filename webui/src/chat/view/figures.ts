/** Figures that follow from what is written down of an answer. */
import type { Answer } from "../model/types";

// No model writes faster than this for one reader.
const RATE_MAX = 5_000;

/**
 * Tokens after the first, by the time they took: what a reader sees as speed. Of an answer that came in one piece (of a page that
 * was busy, or a proxy that gathers) all of its time counts. Null where it cannot be told.
 */
export function tokensPerSecond(answer: Answer): number | null {
  const { usage, firstTokenMs, endedMs } = answer;
  if (usage === null || usage.completionTokens < 2 || firstTokenMs === null || endedMs === null) return null;
  const seconds = (endedMs - firstTokenMs) / 1000;
  const rate = (usage.completionTokens - 1) / seconds;
  if (seconds > 0 && rate <= RATE_MAX) return rate;
  return endedMs > 0 ? (1000 * usage.completionTokens) / endedMs : null;
}

/** Probability of a token, from 0 to 1. */
export function probability(logprob: number): number {
  return Math.exp(logprob);
}

/** How sure a model was of a token, in five steps from 0 (guessed) to 4 (sure); colours go by it. */
export function sureness(logprob: number): 0 | 1 | 2 | 3 | 4 {
  const p = probability(logprob);
  if (p >= 0.95) return 4;
  if (p >= 0.75) return 3;
  if (p >= 0.5) return 2;
  return p >= 0.2 ? 1 : 0;
}

/** "97.3 %", and "<0.1 %" for what would round to nothing. */
export function percent(share: number, language: string): string {
  const format = new Intl.NumberFormat(language, { style: "percent", maximumFractionDigits: 1 });
  return share > 0 && share < 0.001 ? `<${format.format(0.001)}` : format.format(share);
}

/** A token with its white space made visible where it is all there is. */
export function visible(token: string): string {
  return token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·");
}
