import { describe, expect, test } from "vitest";
import {
  begun,
  EVENTS,
  RECONNECTS_MAX,
  RETRIES_MAX,
  STATES,
  stateOf,
  statusOf,
  step,
  TABLE,
  takenUp,
  type Event,
  type Machine,
  type State,
} from "../../../src/chat/model/machine";
import type { Trouble } from "../../../src/chat/model/types";

const trouble: Trouble = { kind: "connection", message: "gone" };
const full: Trouble = { kind: "queue_full", message: "full", retryAt: 5000 };

const EXAMPLES: Event[] = [
  { type: "opened" },
  { type: "chunk", hasId: true },
  { type: "chunk", hasId: false },
  { type: "ended" },
  { type: "deferred", trouble: full, retryAt: 5000 },
  { type: "refused", trouble },
  { type: "broken", trouble },
  { type: "left", trouble, now: 1000 },
  { type: "lost", trouble, now: 1000 },
  { type: "time" },
  { type: "stop" },
];

function at(state: State, tries = 0): Machine {
  return { state, tries, retryAt: null, trouble: null };
}

function after(machine: Machine, ...events: Event[]): Machine {
  return events.reduce((one, event) => step(one, event)[0], machine);
}

describe("the table", () => {
  test("has a row for every event in every state, and no others", () => {
    expect(Object.keys(TABLE).sort()).toEqual([...STATES].sort());
    for (const state of STATES) expect(Object.keys(TABLE[state]).sort(), state).toEqual([...EVENTS].sort());
    expect(new Set(EXAMPLES.map(({ type }) => type))).toEqual(new Set(EVENTS));
  });

  test("says where each row leads: nothing leads elsewhere, and what is ignored changes nothing", () => {
    for (const state of STATES) {
      for (const tries of [0, RECONNECTS_MAX, RETRIES_MAX]) {
        for (const event of EXAMPLES) {
          const before = at(state, tries);
          const row = TABLE[state][event.type];
          const [machine, effects] = step(before, event);
          if ("ignored" in row) {
            expect(machine).toBe(before);
            expect(effects).toEqual([]);
          } else expect(row.then).toContain(machine.state);
        }
      }
    }
  });

  test("has no state that cannot be reached, and no promised one that is not", () => {
    const reached = new Set<State>([begun()[0].state, takenUp()[0].state]);
    for (const state of reached) {
      for (const row of Object.values(TABLE[state])) if ("then" in row) row.then.forEach((next) => reached.add(next));
    }
    expect([...reached].sort()).toEqual([...STATES].sort());
    for (const state of STATES) {
      for (const type of EVENTS) {
        const row = TABLE[state][type];
        if ("ignored" in row) continue;
        const met = EXAMPLES.filter((event) => event.type === type).flatMap((event) =>
          [0, RETRIES_MAX].map((tries) => step(at(state, tries), event)[0].state),
        );
        expect(new Set(met), `${state} × ${type}`).toEqual(new Set(row.then));
      }
    }
  });

  test("can always be stopped, and is then over for good", () => {
    for (const state of STATES) {
      const machine = after(at(state), { type: "stop" });
      expect(statusOf(machine)).toBeNull();
      for (const event of EXAMPLES) expect(after(machine, event)).toBe(machine);
    }
  });
});

test("a stream without ids that is lost is cut, with what there is", () => {
  const machine = after(
    begun()[0],
    { type: "opened" },
    { type: "chunk", hasId: false },
    { type: "lost", trouble, now: 0 },
  );
  expect(machine).toMatchObject({ state: "CUT", trouble });
  expect(stateOf(machine)).toBe("cut");
});

test("a stream with ids is asked for again, after longer and longer waits, and new text makes them short again", () => {
  let machine = after(begun()[0], { type: "opened" }, { type: "chunk", hasId: true });
  const waits: number[] = [];
  for (let tries = 0; tries < RECONNECTS_MAX; tries++) {
    machine = after(machine, { type: "lost", trouble, now: 1000 });
    expect(statusOf(machine)).toMatchObject({ phase: "reconnecting", tries: tries + 1 });
    waits.push(machine.retryAt! - 1000);
    const [asked, effects] = step(machine, { type: "time" });
    expect(effects).toEqual([{ do: "resume" }]);
    machine = asked;
  }
  expect(waits).toEqual([500, 1000, 2000, 4000, ...Array<number>(RECONNECTS_MAX - 4).fill(8000)]);
  expect(after(machine, { type: "opened" }, { type: "chunk", hasId: true })).toMatchObject({ state: "KEPT", tries: 0 });
  expect(after(machine, { type: "lost", trouble, now: 1000 }).state).toBe("CUT");
});

test("a connection that opens and brings nothing counts as a try", () => {
  const machine = after(at("RESUMING", 3), { type: "opened" }, { type: "lost", trouble, now: 0 });
  expect(machine).toMatchObject({ state: "RECONNECTING", tries: 4 });
});

test("a server that goes down ends a stream of its own, and not one that it keeps", () => {
  expect(after(at("STREAMING"), { type: "left", trouble, now: 0 }).state).toBe("CUT");
  expect(after(at("KEPT"), { type: "left", trouble, now: 0 }).state).toBe("RECONNECTING");
});

test("a full server is asked again when it says, and not for ever", () => {
  const [waiting, effects] = step(begun()[0], { type: "deferred", trouble: full, retryAt: 5000 });
  expect(effects).toEqual([{ do: "wait", until: 5000 }]);
  expect(statusOf(waiting)).toEqual({ phase: "retrying", retryAt: 5000, tries: 1, isOurs: true });
  expect(step(waiting, { type: "time" })[1]).toEqual([{ do: "ask" }]);
  expect(after(at("ASKING", RETRIES_MAX), { type: "deferred", trouble: full, retryAt: 5000 }).state).toBe("FAILED");
});

test("a countdown that is ended leaves the reason behind", () => {
  const machine = after(begun()[0], { type: "deferred", trouble: full, retryAt: 5000 }, { type: "stop" });
  expect(machine).toMatchObject({ state: "FAILED", trouble: full, retryAt: null });
});

test("a server that would go on by itself is told when its answer is not wanted", () => {
  expect(step(at("STREAMING"), { type: "stop" })[1]).toEqual([{ do: "hang up" }]);
  for (const state of ["KEPT", "RECONNECTING", "RESUMING"] as const) {
    expect(step(at(state), { type: "stop" })[1]).toEqual([{ do: "hang up" }, { do: "cancel" }]);
  }
});
