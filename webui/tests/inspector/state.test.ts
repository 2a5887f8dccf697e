import { beforeEach, describe, expect, it } from "vitest";
import { countsOf } from "../../src/inspector/model/kv";
import { apply, begin, INCIDENTS_MAX, type State } from "../../src/inspector/model/state";
import { rowKey } from "../../src/inspector/model/tables";
import type { Frame } from "../../src/inspector/wire";
import { Generated } from "./generated";

const T0 = 1000;
const EMPTY: Frame = {
  type: "frame",
  time: T0,
  machines: [],
  actors: [],
  requests: [],
  progress: [],
  gone: [],
  kv: null,
  steps: [],
  rates: null,
  incidents: [],
  lost: 0,
};

describe("the state", () => {
  let feed: Generated;
  let state: State;
  beforeEach(() => {
    feed = new Generated(8, T0);
    state = begin(feed.snapshot());
  });
  const frame = (changed: Partial<Frame>, time = T0 + 0.01) => apply(state, { ...EMPTY, time, ...changed });

  it("keeps rows that a frame does not name, and counts those that it does", () => {
    const row = { state: "IDLE", event: "Asked", to: "SCHEDULING" };
    frame({ machines: [{ name: "Engine", states: { IDLE: 1 }, rows: [{ ...row, count: 7 }] }] });
    frame({ machines: [{ name: "Engine", states: { AHEAD: 1 }, rows: [{ ...row, to: "AHEAD", count: 2 }] }] });
    const engine = state.machines.get("Engine")!;
    expect(engine.states).toEqual({ AHEAD: 1 });
    expect(engine.counts.get(rowKey("IDLE", "Asked", "SCHEDULING"))).toBe(7);
    expect(engine.counts.get(rowKey("IDLE", "Asked", "AHEAD"))).toBe(2);
  });

  it("gives a machine that has changed another identity, so that views see it", () => {
    const before = state.machines.get("Engine");
    frame({ machines: [{ name: "Engine", states: { AHEAD: 1 }, rows: [] }] });
    expect(state.machines.get("Engine")).not.toBe(before);
  });

  it("takes the progress of requests, and no progress of one that it does not know", () => {
    const [key] = [...state.requests.keys()];
    frame({
      progress: [
        [key!, 42, 7],
        ["unknown", 1, 1],
      ],
    });
    expect(state.requests.get(key!)).toMatchObject({ output_tokens: 42, blocks: 7 });
    expect(state.requests.has("unknown")).toBe(false);
  });

  it("forgets requests that are gone", () => {
    const [key] = [...state.requests.keys()];
    expect(frame({ gone: [key!] })).toContain("requests");
    expect(state.requests.has(key!)).toBe(false);
  });

  it("says which slices have changed, and no others", () => {
    expect(frame({})).toEqual(new Set());
    expect(frame({ kv: { blocks: [[3, 4, 1]], evicted: [], host_used: 1 } })).toEqual(new Set(["kv"]));
    expect(frame({ incidents: [], steps: feed.frame(T0).steps })).toEqual(new Set(["steps"]));
  });

  it("samples rates and mailboxes five times a second at most", () => {
    const { length } = state.rateHistory;
    for (let at = 1; at <= 20; at++) frame({}, T0 + at * 0.05);
    expect(state.rateHistory.length - length).toBeLessThanOrEqual(5);
    expect(state.rateHistory.length - length).toBeGreaterThanOrEqual(4);
    expect(state.depths.get("gate")!.length).toBe(state.rateHistory.length);
  });

  it("keeps the newest incidents first, and no more than its limit", () => {
    const incident = { number: 0, time: T0, kind: "oom", message: "", action: "", step_id: 1, requests: [] };
    for (let number = 0; number < INCIDENTS_MAX + 5; number++) frame({ incidents: [{ ...incident, number }] });
    expect(state.incidents).toHaveLength(INCIDENTS_MAX);
    expect(state.incidents[0]!.number).toBe(INCIDENTS_MAX + 4);
  });

  it("keeps its rates until a frame brings others", () => {
    const rates = { ...state.rates, tokens_s: 12 };
    frame({ rates });
    frame({ rates: null });
    expect(state.rates).toEqual(rates);
  });

  it("adds up what was lost", () => {
    frame({ lost: 3 });
    frame({ lost: 4 });
    expect(state.lost).toBe(7);
  });

  it("is replaced by a second snapshot, but for lines that go on", () => {
    const gone = [...state.requests.keys()][0]!;
    frame({}, T0 + 1);
    const again = begin({ ...feed.snapshot(T0 + 2), requests: [], kv: null }, state);
    expect(again.requests.has(gone)).toBe(false);
    expect(again.kv).toBeNull();
    expect(again.rateHistory.length).toBe(3);
  });

  it("follows a feed of a thousand frames to the same requests and blocks as a snapshot at its end", () => {
    for (let at = 1; at <= 1000; at++) apply(state, feed.frame(T0 + at * 0.05));
    const fresh = begin(feed.snapshot(T0 + 51));
    // The snapshot's own frame moves the made-up feed once more: what it holds is told by the frame behind it, too.
    const live = (of: State) =>
      [...of.requests.values()].filter(({ state: now }) => !now.startsWith("FINISHED")).length;
    expect(live(fresh)).toBe(live(state));
    expect(countsOf(state.kv!).states.reduce((sum, one) => sum + one, 0)).toBe(feed.numBlocks);
  });
});

describe("the map of blocks", () => {
  it("is told block by block to what a snapshot says at once", () => {
    const [told, asked] = [new Generated(8, T0), new Generated(8, T0)];
    const state = begin(told.snapshot());
    asked.snapshot();
    for (let at = 1; at <= 50; at++) {
      apply(state, told.frame(T0 + at));
      if (at < 50) asked.frame(T0 + at);
    }
    const fresh = begin(asked.snapshot(T0 + 50));
    expect(state.kv!.owner).toEqual(fresh.kv!.owner);
    expect(state.kv!.readers).toEqual(fresh.kv!.readers);
  });
});
