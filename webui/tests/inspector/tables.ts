/** Tables to draw: one that is written out, and ones of any size that are made up. */
import type { MachineTable, TableRow } from "../../src/inspector/model/tables";
import { chance } from "./generated";

export function table(
  name: string,
  states: string[],
  rows: [state: string, event: string, ...follows: string[]][],
): MachineTable {
  return {
    name,
    states: states.map((state) => ({ name: state, deadline_s: null, why: "" })),
    events: [...new Set(rows.map(([, event]) => event))],
    rows: rows.map(([state, event, ...follows]): TableRow => ({
      state,
      event,
      only: null,
      action: "act",
      follows,
      never: false,
      why: "",
    })),
  };
}

const LIVE = ["WAITING", "PREFILL", "DECODE", "PREEMPTED"];
const ENDS = ["FINISHED_STOPPED", "FINISHED_LENGTH", "FINISHED_ABORTED"];

export const REQUEST = table(
  "Request",
  [...LIVE, ...ENDS],
  [
    ["WAITING", "Admit", "PREFILL"],
    ["PREFILL", "Unadmit", "WAITING"],
    ["PREFILL", "Prefilled", "DECODE"],
    ["PREFILL", "Preempt", "PREEMPTED"],
    ["DECODE", "Preempt", "PREEMPTED"],
    ["DECODE", "Vacate", "PREEMPTED"],
    ["DECODE", "Note", "DECODE"],
    ["PREEMPTED", "Admit", "PREFILL"],
    ...LIVE.map((state): [string, string, ...string[]] => [state, "Finish", ...ENDS]),
  ],
);

/** A machine of `size` states in which each can be reached; about two arrows leave each. */
export function madeUp(size: number, seed: number): MachineTable {
  const random = chance(seed * 7919 + size);
  const states = Array.from({ length: size }, (_, at) => `STATE_${String.fromCharCode(65 + at)}`);
  const any = (limit: number) => Math.min(limit - 1, Math.floor(limit * random()));
  const rows: [string, string, ...string[]][] = states.slice(1).map((state, at) => [states[any(at + 1)]!, "Go", state]);
  for (let more = 0; more < 2 * size; more++) rows.push([states[any(size)]!, `Event${more}`, states[any(size)]!]);
  return table("MadeUp", states, rows);
}
