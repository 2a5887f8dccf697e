/** Steps as a flame that scrolls: which bars are in sight, in what row, and how full each batch was. */
import type { StepNow } from "../wire";

export const PHASES = ["schedule", "kernel", "sample", "detokenise", "send"] as const;
export type Phase = (typeof PHASES)[number];

export interface Bar {
  phase: Phase;
  row: number;
  left: number; // seconds after the left edge
  took: number;
  step: StepNow;
}

/** Bars of `steps` (the newest last) that reach into the `window_s` seconds before `until`. */
export function bars(steps: readonly StepNow[], until: number, window_s: number): Bar[] {
  const from = until - window_s;
  const found: Bar[] = [];
  for (let at = steps.length - 1; at >= 0; at--) {
    const step = steps[at]!;
    let last = step.began;
    for (const { name, began_ms, took_ms } of step.phases) {
      const left = step.began + began_ms / 1000 - from;
      const took = took_ms / 1000;
      last = Math.max(last, step.began + (began_ms + took_ms) / 1000);
      if (left + took >= 0 && left <= window_s)
        found.push({ phase: name, row: PHASES.indexOf(name), left, took, step });
    }
    if (last < from - 1) break; // those before it ended earlier still: two steps may overlap, by less than a second
  }
  return found;
}

/** When a step ended. */
export const endOf = ({ began, phases }: StepNow): number =>
  phases.reduce((last, { began_ms, took_ms }) => Math.max(last, began + (began_ms + took_ms) / 1000), began);

/** Where steps in sight were not told: their numbers are missing. */
export function gaps(steps: readonly StepNow[], until: number, window_s: number): { began: number; ended: number }[] {
  const found = [];
  for (let at = steps.length - 1; at > 0; at--) {
    const [before, after] = [steps[at - 1]!, steps[at]!];
    const [began, ended] = [endOf(before), after.began];
    if (ended < until - window_s) break;
    if (after.id > before.id + 1 && ended > began && began <= until) found.push({ began, ended });
  }
  return found;
}

/** How long each phase took in the steps that are shown, in ms. */
export function phaseTimes(steps: readonly StepNow[]): Record<Phase, number[]> {
  const times: Record<Phase, number[]> = { schedule: [], kernel: [], sample: [], detokenise: [], send: [] };
  for (const { phases } of steps) for (const { name, took_ms } of phases) times[name].push(took_ms);
  return times;
}

/** The bar under `seconds` after the left edge in `row`. */
export const barAt = (all: readonly Bar[], seconds: number, row: number, slack: number): Bar | undefined =>
  all.find((bar) => bar.row === row && seconds >= bar.left - slack && seconds <= bar.left + bar.took + slack);
