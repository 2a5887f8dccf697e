/** A request's transitions on a line from its arrival to its last byte. */

export interface Transition {
  state: string;
  time: number; // seconds since 1970
}

export interface Span {
  state: string;
  began_s: number; // after the arrival
  took_s: number;
  left: number; // shares of the whole line
  width: number;
}

const NARROWEST = 0.002; // of the line: what took no time is still seen

/** `end`: now, for a request that has not ended. An ended state is a mark at the end, not a span. */
export function timeLine(history: readonly Transition[], end: number): Span[] {
  const first = history[0];
  if (!first) return [];
  const last = history.at(-1)!;
  const until = last.state.startsWith("FINISHED") ? last.time : Math.max(end, last.time);
  const whole = Math.max(until - first.time, 1e-6);
  return history.map(({ state, time }, at) => {
    const next = history[at + 1]?.time ?? until;
    const left = (time - first.time) / whole;
    return {
      state,
      began_s: time - first.time,
      took_s: Math.max(0, next - time),
      left: Math.min(left, 1 - NARROWEST),
      width: Math.max((next - time) / whole, NARROWEST),
    };
  });
}
