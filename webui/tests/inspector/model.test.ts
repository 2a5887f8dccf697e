import { describe, expect, it } from "vitest";
import { timeLine } from "../../src/inspector/model/history";
import { applyKv, blockAt, countsOf, gridOf, kvOf, type KvDirt } from "../../src/inspector/model/kv";
import { percentiles } from "../../src/inspector/model/percentiles";
import { ageOf, inSight, shown, type Filter, type Order } from "../../src/inspector/model/requests";
import { Ring } from "../../src/inspector/model/ring";
import { barAt, bars, gaps, phaseTimes } from "../../src/inspector/model/steps";
import type { RequestNow, StepNow } from "../../src/inspector/wire";

describe("a ring", () => {
  it("keeps the newest values in their order", () => {
    const ring = new Ring<number>(3);
    [1, 2, 3, 4, 5].forEach((value) => ring.push(value));
    expect(ring.toArray()).toEqual([3, 4, 5]);
    expect([ring.at(0), ring.at(-1), ring.at(3), ring.at(-4)]).toEqual([3, 5, undefined, undefined]);
  });
});

describe("percentiles", () => {
  it("are values that were seen, by nearest rank", () => {
    const values = Array.from({ length: 100 }, (_, at) => 100 - at);
    expect(percentiles(values)).toEqual({ p50: 50, p95: 95, p99: 99 });
    expect(percentiles([3, 1, 2])!.p50).toBe(2);
    expect(percentiles([7])).toEqual({ p50: 7, p95: 7, p99: 7 });
    expect(percentiles([])).toBeNull();
  });
});

describe("the table of requests", () => {
  const request = (id: string, changed: Partial<RequestNow>): RequestNow => ({
    key: `${id}-0`,
    id,
    choice: 0,
    state: "DECODE",
    waits_for: null,
    owner: "",
    arrived: 10,
    since: 12,
    prompt_tokens: 5,
    cached_tokens: 0,
    output_tokens: 1,
    blocks: 1,
    ...changed,
  });
  const all = [
    request("a", { state: "WAITING", waits_for: "queue", prompt_tokens: null, arrived: 14 }),
    request("b", { owner: "Alice", blocks: 9 }),
    request("c", { state: "FINISHED_STOPPED", arrived: 11, since: 15, blocks: 9 }),
  ];
  const none: Filter = { text: "", state: "", waits_for: "" };
  const ids = (filter: Partial<Filter>, order: Order = { column: "id", isDown: false }) =>
    shown(all, { ...none, ...filter }, order, 20).map(({ id }) => id);

  it("filters by state, by reason, and by a part of id or key in any case", () => {
    expect(ids({ state: "live" })).toEqual(["a", "b"]);
    expect(ids({ state: "FINISHED_STOPPED" })).toEqual(["c"]);
    expect(ids({ waits_for: "queue" })).toEqual(["a"]);
    expect(ids({ text: " alI " })).toEqual(["b"]);
  });

  it("sorts by any column, and leaves equal ones in the order of arrival", () => {
    expect(ids({}, { column: "blocks", isDown: true })).toEqual(["b", "c", "a"]);
    expect(ids({}, { column: "age", isDown: true })).toEqual(["b", "a", "c"]);
    expect(ids({}, { column: "prompt_tokens", isDown: false })).toEqual(["a", "b", "c"]);
  });

  it("begins with those that live, the newest first", () => {
    expect(ids({}, { column: null, isDown: false })).toEqual(["a", "b", "c"]);
    const ended = { state: "FINISHED_LENGTH" };
    const mixed = [request("d", { ...ended, arrived: 30 }), request("e", {}), request("f", { arrived: 12 }), all[2]!];
    expect(shown(mixed, none, { column: null, isDown: false }, 40).map(({ id }) => id)).toEqual(["f", "e", "d", "c"]);
  });

  it("counts the age of one that has ended up to its end", () => {
    expect(ageOf(all[2]!, 20)).toBe(4);
    expect(ageOf(all[1]!, 20)).toBe(10);
  });

  it("shows the rows in sight and a few around them", () => {
    expect(inSight(1000, 3200, 320, 32)).toEqual({ from: 92, to: 118 });
    expect(inSight(5, 0, 320, 32)).toEqual({ from: 0, to: 5 });
    expect(inSight(3, 99_999, 320, 32).from).toBeLessThanOrEqual(3);
  });
});

describe("a time line", () => {
  const history = [
    { state: "WAITING", time: 10 },
    { state: "DECODE", time: 11 },
  ];

  it("lasts until now for a request that has not ended", () => {
    expect(timeLine(history, 14).map(({ took_s, left, width }) => [took_s, left, width])).toEqual([
      [1, 0, 0.25],
      [3, 0.25, 0.75],
    ]);
  });

  it("lasts until the end of one that has", () => {
    const spans = timeLine([...history, { state: "FINISHED_STOPPED", time: 12 }], 99);
    expect(spans.map(({ took_s }) => took_s)).toEqual([1, 1, 0]);
    expect(spans[2]!.width).toBeGreaterThan(0);
    expect(spans[2]!.left).toBeLessThan(1);
  });

  it("has nothing for a request of which nothing is known", () => {
    expect(timeLine([], 1)).toEqual([]);
  });
});

describe("the map of blocks", () => {
  const map = () =>
    kvOf({
      layout: "blocks",
      block_size: 16,
      total: 4,
      states: ["FREE", "CACHED", "DECODE"],
      owner: btoa("\x00\x02\x02\x01"),
      readers: btoa("\x00\x01\x03\x00"),
      host_total: 0,
      host_used: 0,
    });

  it("is counted by state, and by what has several readers", () => {
    expect(countsOf(map())).toEqual({ states: [1, 1, 2], shared: 1 });
  });

  it("notes which cells are stale and which flash while it is shown", () => {
    const dirt: KvDirt = { blocks: new Set(), evicted: new Set() };
    const kv = map();
    applyKv(kv, { blocks: [[0, 2, 1]], evicted: [3], host_used: 5 }, dirt);
    expect([kv.owner[0], kv.readers[0], kv.hostUsed]).toEqual([2, 1, 5]);
    expect([[...dirt.blocks!], [...dirt.evicted]]).toEqual([[0], [3]]);
  });

  it("notes nothing while it is not shown, for all is drawn when it comes back", () => {
    const dirt: KvDirt = { blocks: null, evicted: new Set() };
    applyKv(map(), { blocks: [[0, 2, 1]], evicted: [3], host_used: 5 }, dirt);
    expect([dirt.blocks, dirt.evicted.size]).toEqual([null, 0]);
  });

  it("has the largest cells that fit, and finds the block under a point", () => {
    expect(gridOf(2048, 880, 560)).toEqual({ columns: 58, rows: 36, cell: 15 });
    const small = gridOf(32768, 320, 560);
    expect(small.cell).toBe(3);
    expect(small.columns * small.rows).toBeGreaterThanOrEqual(32768);
    const grid = { columns: 10, rows: 2, cell: 5 };
    expect(blockAt(grid, 7, 6, 15)).toBe(11);
    expect(blockAt(grid, 49, 6, 15)).toBeNull();
    expect(blockAt(grid, 51, 1, 15)).toBeNull();
  });
});

describe("the flame", () => {
  const step = (id: number, began: number): StepNow => ({
    id,
    began,
    phases: [
      { name: "schedule", began_ms: 0, took_ms: 10 },
      { name: "kernel", began_ms: 10, took_ms: 40 },
    ],
    num_seqs: 1,
    num_tokens: 1,
    budget: 8,
    is_failed: false,
    outcome: "done",
  });
  const steps = [step(1, 10), step(2, 11), step(3, 11.98)];

  it("has the phases that reach into the window, behind its left edge", () => {
    const seen = bars(steps, 12, 1);
    expect(seen.map(({ step: { id }, phase }) => `${id} ${phase}`)).toEqual([
      "3 schedule",
      "3 kernel",
      "2 schedule",
      "2 kernel",
    ]);
    expect(seen[1]!.left).toBeCloseTo(0.99);
    expect(seen[1]!.took).toBeCloseTo(0.04);
  });

  it("finds the bar under a point of its row", () => {
    const seen = bars(steps, 12, 1);
    expect(barAt(seen, 0.02, 1, 0)!.step.id).toBe(2);
    expect(barAt(seen, 0.02, 0, 0)).toBeUndefined();
    expect(barAt(seen, 0.012, 0, 0.005)!.step.id).toBe(2);
  });

  it("tells a gap of what was not told from a pause of the engine", () => {
    expect(gaps(steps, 12, 2)).toEqual([]);
    const [gap, ...more] = gaps([step(1, 10), step(4, 11), step(5, 11.98)], 12, 2);
    expect(more).toEqual([]);
    expect([gap!.began, gap!.ended]).toEqual([10.05, 11]);
    expect(gaps([step(1, 10), step(4, 10.04)], 12, 2)).toEqual([]); // two in flight overlap
    expect(gaps([step(1, 10), step(4, 11), step(5, 11.98)], 12, 0.5)).toEqual([]);
  });

  it("gives the times of each phase", () => {
    expect(phaseTimes(steps).kernel).toEqual([40, 40, 40]);
    expect(phaseTimes(steps).send).toEqual([]);
  });
});
