/** The machines' tables as `GET /v1/machines` gives them, and the arrows of their diagrams. */

export interface MachineTable {
  name: string;
  states: { name: string; deadline_s: number | null; why: string }[];
  events: string[];
  rows: TableRow[];
}

export interface TableRow {
  state: string;
  event: string;
  only: string | null;
  action: string | null;
  follows: string[];
  never: boolean;
  why: string;
}

/** All rows that lead from one box to another: one line in the picture. */
export interface Arrow {
  key: string;
  from: number; // indexes of boxes
  to: number;
  rows: { state: string; event: string; to: string }[];
  events: string[];
}

/** One state, or several that end a machine and are reached from the same states: they are drawn as one box. */
export interface StateBox {
  title: string;
  states: string[];
}

export interface Graph {
  boxes: StateBox[];
  arrows: Arrow[];
}

/** What is counted separately: how often `event` in `state` led to `to`. */
export const rowKey = (state: string, event: string, to: string) => `${state} ${event} ${to}`;

interface Step {
  state: string;
  event: string;
  to: string;
}

/** Each row that has an action, once for every state that may follow. */
export function stepsOf(table: MachineTable): Step[] {
  const seen = new Map<string, Step>();
  for (const { state, event, action, follows } of table.rows) {
    if (action === null) continue;
    for (const to of follows) seen.set(rowKey(state, event, to), { state, event, to });
  }
  return [...seen.values()];
}

/** Boxes and arrows of a table. Deterministic: all is in the order of the table. */
export function graphOf(table: MachineTable): Graph {
  const steps = stepsOf(table);
  const boxes = boxesOf(table, steps);
  const boxOf = new Map(boxes.flatMap((box, index) => box.states.map((state) => [state, index] as const)));
  const arrows = new Map<string, Arrow>();
  for (const row of steps) {
    const [from, to] = [boxOf.get(row.state)!, boxOf.get(row.to)!];
    const key = `${from}>${to}`;
    const arrow = arrows.get(key) ?? { key, from, to, rows: [], events: [] };
    arrow.rows.push(row);
    if (!arrow.events.includes(row.event)) arrow.events.push(row.event);
    arrows.set(key, arrow);
  }
  return { boxes, arrows: [...arrows.values()].sort((a, b) => a.from - b.from || a.to - b.to) };
}

function boxesOf(table: MachineTable, steps: Step[]): StateBox[] {
  const leaves = new Set(steps.filter(({ state, to }) => state !== to).map(({ state }) => state));
  const groups = new Map<string, string[]>();
  for (const { name } of table.states) {
    const sources = [...new Set(steps.filter(({ state, to }) => to === name && state !== name).map((s) => s.state))];
    const key = leaves.has(name) || !sources.length ? name : `ends ${sources.sort().join()}`;
    groups.set(key, [...(groups.get(key) ?? []), name]);
  }
  return [...groups.values()].map((states) => ({ title: titleOf(states), states }));
}

/** What names have in common, as far as a whole word: FINISHED_STOPPED, FINISHED_LENGTH: FINISHED. */
function titleOf(states: string[]): string {
  const [first, ...others] = states.map((state) => state.split("_"));
  let common = 0;
  while (others.length && first![common] && others.every((other) => other[common] === first![common])) common++;
  return common ? first!.slice(0, common).join("_") : states.join(" / ");
}
