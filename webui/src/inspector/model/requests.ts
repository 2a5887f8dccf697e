/** The table of requests: which are shown, and in what order. */
import type { RequestNow } from "../wire";

export type Column =
  "id" | "state" | "waits_for" | "owner" | "age" | "prompt_tokens" | "cached_tokens" | "output_tokens" | "blocks";

export interface Filter {
  text: string; // a part of its id or the name of its key
  state: string; // "": any; "live": those that have not ended
  waits_for: string; // "": any
}

/** Of the columns; null: those that live first, and of each kind the newest. */
export interface Order {
  column: Column | null;
  isDown: boolean;
}

export const hasEnded = ({ state }: { state: string }) => state.startsWith("FINISHED");

/** For how long it has been here, in seconds; of one that has ended: for how long it was. */
export const ageOf = (request: RequestNow, now: number) =>
  Math.max(0, (hasEnded(request) ? request.since : now) - request.arrived);

export const isNumber = (column: Column) => /age|tokens|blocks/.test(column);

const ofArrival = (a: RequestNow, b: RequestNow) => a.arrived - b.arrived || (a.key < b.key ? -1 : 1);

export function shown(requests: Iterable<RequestNow>, filter: Filter, order: Order, now: number): RequestNow[] {
  const text = filter.text.trim().toLowerCase();
  const found: RequestNow[] = [];
  for (const one of requests) {
    if (filter.state === "live" ? hasEnded(one) : filter.state && one.state !== filter.state) continue;
    if (filter.waits_for && one.waits_for !== filter.waits_for) continue;
    if (text && !one.id.toLowerCase().includes(text) && !one.owner.toLowerCase().includes(text)) continue;
    found.push(one);
  }
  const sign = order.isDown ? -1 : 1;
  const { column } = order;
  if (column === null) return found.sort((a, b) => Number(hasEnded(a)) - Number(hasEnded(b)) || ofArrival(b, a));
  const valueOf = (one: RequestNow) =>
    column === "age" ? ageOf(one, now) : (one[column] ?? (isNumber(column) ? -1 : ""));
  return found.sort((a, b) => {
    const [x, y] = [valueOf(a), valueOf(b)];
    // What is equal stays in the order of arrival, so that rows do not dance.
    return x === y ? ofArrival(a, b) : (x < y ? -1 : 1) * sign;
  });
}

/** The rows of a long table that are in sight, and some around them. */
export function inSight(total: number, top: number, height: number, rowHeight: number): { from: number; to: number } {
  const AROUND = 8; // so that one turn of the wheel shows no gap
  const from = Math.max(0, Math.min(total, Math.floor(top / rowHeight)) - AROUND);
  return { from, to: Math.min(total, Math.ceil((top + height) / rowHeight) + AROUND) };
}
