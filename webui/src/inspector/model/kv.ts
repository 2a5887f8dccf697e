/** The map of KV blocks: who has each, how many read it, and how the cells lie. */
import type { KvChange, KvMap } from "../wire";

export interface Kv {
  layout: "blocks" | "slots";
  blockSize: number;
  states: string[];
  owner: Uint8Array; // of each block: an index of `states`
  readers: Uint8Array;
  hostTotal: number;
  hostUsed: number;
}

/** Cells whose picture is stale, and those that have just been evicted; null: draw all. */
export interface KvDirt {
  blocks: Set<number> | null;
  evicted: Set<number>;
}

export function kvOf(map: KvMap): Kv {
  return {
    layout: map.layout,
    blockSize: map.block_size,
    states: [...map.states],
    owner: bytes(map.owner),
    readers: bytes(map.readers),
    hostTotal: map.host_total,
    hostUsed: map.host_used,
  };
}

export function applyKv(kv: Kv, change: KvChange, dirt: KvDirt): void {
  for (const [block, state, readers] of change.blocks) {
    kv.owner[block] = state;
    kv.readers[block] = readers;
    dirt.blocks?.add(block);
  }
  if (dirt.blocks) for (const block of change.evicted) dirt.evicted.add(block); // a map that is not shown flashes nothing
  kv.hostUsed = change.host_used;
}

/** How many blocks each state has, by `states`, and how many have several readers. */
export function countsOf(kv: Kv): { states: number[]; shared: number } {
  const states = new Array<number>(kv.states.length).fill(0);
  let shared = 0;
  for (let block = 0; block < kv.owner.length; block++) {
    states[kv.owner[block]!]!++;
    if (kv.readers[block]! > 1) shared++;
  }
  return { states, shared };
}

export interface Grid {
  columns: number;
  rows: number;
  cell: number; // pixels, its gap included
}

const CELL_MAX = 24;
const CELL_MIN = 3;

/** The largest cells with which `total` of them fit into `width` and, if it can be, `height` pixels. */
export function gridOf(total: number, width: number, height: number): Grid {
  for (let cell = CELL_MAX; cell >= CELL_MIN; cell--) {
    const columns = Math.max(1, Math.floor(width / cell));
    const rows = Math.ceil(total / columns);
    if (rows * cell <= height || cell === CELL_MIN) return { columns, rows, cell };
  }
  throw new Error("unreachable");
}

export function blockAt(grid: Grid, x: number, y: number, total: number): number | null {
  const [column, row] = [Math.floor(x / grid.cell), Math.floor(y / grid.cell)];
  const block = row * grid.columns + column;
  return column >= 0 && column < grid.columns && row >= 0 && block < total ? block : null;
}

export const bytes = (base64: string) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
