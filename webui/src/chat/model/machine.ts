/**
 * The machine of one answer: what follows when the server answers, refuses, or goes away, and when somebody has read enough.
 *
 * ASKING → STREAMING is the usual way. A server with a journal gives its events ids: then it is KEPT, and where the
 * connection is lost it is asked for again behind the last one (RECONNECTING, RESUMING), so that nothing is missing and
 * nothing comes twice. Without ids what there is stays, as CUT. A server that is full, or loads, says when to come again (RETRYING).
 *
 * The table has a row for every event in every state. Time comes with events; what is to be done is returned, not done.
 */
import type { AnswerState, Status, Trouble } from "./types";

export const STATES = [
  "ASKING", // the question was sent
  "STREAMING", // of a server without a journal
  "KEPT", // of one that has a journal
  "RETRYING", // waits until the server has room
  "RECONNECTING", // waits before it connects again
  "RESUMING", // has asked for the rest
  "DONE",
  "STOPPED",
  "CUT",
  "FAILED",
] as const;
export type State = (typeof STATES)[number];

export type Event =
  | { type: "opened" } // the server answers, with a stream
  | { type: "chunk"; hasId: boolean }
  | { type: "ended" } // as it should
  | { type: "deferred"; trouble: Trouble; retryAt: number } // not now
  | { type: "refused"; trouble: Trouble } // not at all
  | { type: "broken"; trouble: Trouble } // an error event: there will be no more of it
  | { type: "left"; trouble: Trouble; now: number } // an error event of a server that goes down
  | { type: "lost"; trouble: Trouble; now: number } // the connection
  | { type: "time" } // that was waited for is there, or is not waited for any longer
  | { type: "stop" };
export type EventType = Event["type"];
export const EVENTS = [
  ...["opened", "chunk", "ended", "deferred", "refused", "broken", "left", "lost", "time", "stop"],
] as EventType[];

export type Effect =
  | { do: "ask" } // POST the question
  | { do: "resume" } // GET what is behind the last event
  | { do: "wait"; until: number } // ms since 1970; ends with the state
  | { do: "hang up" }
  | { do: "cancel" }; // tell the server that it is not wanted any more: one with a journal would go on

export interface Machine {
  readonly state: State;
  /** How often it was tried again without anything new. */
  readonly tries: number;
  readonly retryAt: number | null;
  readonly trouble: Trouble | null;
}

/** A server with a model of 100 GB takes minutes to start, and its queue may be full for as long. */
export const RETRIES_MAX = 60;
/** 0.5, 1, 2, 4, 8, 8, … seconds: a server of a small model that was killed is back after some 10 s. */
export const RECONNECTS_MAX = 12;
const BACKOFF_MS = 500;
const BACKOFF_MS_MAX = 8000;

type Action = (machine: Machine, event: never) => [Machine, Effect[]];
type Row = { action: keyof typeof ACTIONS; then: readonly State[] } | { ignored: string };

const ACTIONS = {
  open: to("STREAMING"),
  reopen: to("KEPT"),
  grow(_: Machine, event: Of<"chunk">): [Machine, Effect[]] {
    return [{ state: event.hasId ? "KEPT" : "STREAMING", tries: 0, retryAt: null, trouble: null }, []];
  },
  finish: to("DONE"),
  fail(machine: Machine, { trouble }: Of<"refused" | "broken" | "lost" | "left">): [Machine, Effect[]] {
    return [{ ...machine, state: "FAILED", retryAt: null, trouble }, []];
  },
  cut(machine: Machine, { trouble }: Of<"refused" | "broken" | "lost" | "left">): [Machine, Effect[]] {
    return [{ ...machine, state: "CUT", retryAt: null, trouble }, []];
  },
  defer(machine: Machine, { trouble, retryAt }: Of<"deferred">): [Machine, Effect[]] {
    if (machine.tries >= RETRIES_MAX) return [{ ...machine, state: "FAILED", retryAt: null, trouble }, []];
    return [{ state: "RETRYING", tries: machine.tries + 1, retryAt, trouble }, [{ do: "wait", until: retryAt }]];
  },
  askAgain(machine: Machine): [Machine, Effect[]] {
    return [{ ...machine, state: "ASKING", retryAt: null }, [{ do: "ask" }]];
  },
  reconnect(machine: Machine, { trouble, now }: Of<"lost" | "left">): [Machine, Effect[]] {
    const until = now + Math.min(BACKOFF_MS * 2 ** machine.tries, BACKOFF_MS_MAX);
    return waitFor(machine, trouble, until, RECONNECTS_MAX);
  },
  comeLater(machine: Machine, { trouble, retryAt }: Of<"deferred">): [Machine, Effect[]] {
    return waitFor(machine, trouble, retryAt, RETRIES_MAX); // it lives, and says when
  },
  resume(machine: Machine): [Machine, Effect[]] {
    return [{ ...machine, state: "RESUMING", retryAt: null }, [{ do: "resume" }]];
  },
  stop: to("STOPPED", [{ do: "hang up" }]),
  stopThere: to("STOPPED", [{ do: "hang up" }, { do: "cancel" }]),
  giveUp(machine: Machine): [Machine, Effect[]] {
    return [{ ...machine, state: "FAILED", retryAt: null }, []]; // with the trouble that it waited for
  },
};

const OVER = { ignored: "it is over" };
const LATE = { ignored: "of a connection that is given up" };
const NOT_WAITING = { ignored: "nothing is waited for" };

export const TABLE: Record<State, Record<EventType, Row>> = {
  ASKING: {
    opened: { action: "open", then: ["STREAMING"] },
    chunk: LATE,
    ended: LATE,
    deferred: { action: "defer", then: ["RETRYING", "FAILED"] },
    refused: { action: "fail", then: ["FAILED"] },
    broken: LATE,
    left: LATE,
    lost: { action: "fail", then: ["FAILED"] },
    time: NOT_WAITING,
    stop: { action: "stop", then: ["STOPPED"] },
  },
  STREAMING: {
    opened: LATE,
    chunk: { action: "grow", then: ["STREAMING", "KEPT"] },
    ended: { action: "finish", then: ["DONE"] },
    deferred: LATE,
    refused: LATE,
    broken: { action: "fail", then: ["FAILED"] },
    left: { action: "cut", then: ["CUT"] },
    lost: { action: "cut", then: ["CUT"] },
    time: NOT_WAITING,
    stop: { action: "stop", then: ["STOPPED"] },
  },
  KEPT: {
    opened: LATE,
    chunk: { action: "grow", then: ["KEPT", "STREAMING"] },
    ended: { action: "finish", then: ["DONE"] },
    deferred: LATE,
    refused: LATE,
    broken: { action: "fail", then: ["FAILED"] },
    left: { action: "reconnect", then: ["RECONNECTING", "CUT"] },
    lost: { action: "reconnect", then: ["RECONNECTING", "CUT"] },
    time: NOT_WAITING,
    stop: { action: "stopThere", then: ["STOPPED"] },
  },
  RETRYING: {
    opened: LATE,
    chunk: LATE,
    ended: LATE,
    deferred: LATE,
    refused: LATE,
    broken: LATE,
    left: LATE,
    lost: LATE,
    time: { action: "askAgain", then: ["ASKING"] },
    stop: { action: "giveUp", then: ["FAILED"] },
  },
  RECONNECTING: {
    opened: LATE,
    chunk: LATE,
    ended: LATE,
    deferred: LATE,
    refused: LATE,
    broken: LATE,
    left: LATE,
    lost: LATE,
    time: { action: "resume", then: ["RESUMING"] },
    stop: { action: "stopThere", then: ["STOPPED"] },
  },
  RESUMING: {
    opened: { action: "reopen", then: ["KEPT"] },
    chunk: LATE,
    ended: LATE,
    deferred: { action: "comeLater", then: ["RECONNECTING", "CUT"] },
    refused: { action: "cut", then: ["CUT"] },
    broken: LATE,
    left: LATE,
    lost: { action: "reconnect", then: ["RECONNECTING", "CUT"] },
    time: NOT_WAITING,
    stop: { action: "stopThere", then: ["STOPPED"] },
  },
  DONE: over(),
  STOPPED: over(),
  CUT: over(),
  FAILED: over(),
};

/** How an answer begins: by asking. */
export function begun(): [Machine, Effect[]] {
  return [{ state: "ASKING", tries: 0, retryAt: null, trouble: null }, [{ do: "ask" }]];
}

/** How an answer that another page had begun goes on: by asking for its rest. */
export function takenUp(): [Machine, Effect[]] {
  return [{ state: "RESUMING", tries: 0, retryAt: null, trouble: null }, [{ do: "resume" }]];
}

/** What follows `event`, and what is to be done then; the same machine where it is ignored. */
export function step(machine: Machine, event: Event): [Machine, Effect[]] {
  const row = TABLE[machine.state][event.type];
  if ("ignored" in row) return [machine, []];
  const [next, effects] = (ACTIONS[row.action] as Action)(machine, event as never);
  if (!row.then.includes(next.state)) throw new Error(`${machine.state} × ${event.type} leads to ${next.state}`);
  return [next, effects];
}

const KEPT_AS: Record<State, AnswerState> = {
  ASKING: "waiting",
  RETRYING: "waiting",
  STREAMING: "streaming",
  KEPT: "streaming",
  RECONNECTING: "streaming",
  RESUMING: "streaming",
  DONE: "done",
  STOPPED: "stopped",
  CUT: "cut",
  FAILED: "failed",
};

const SHOWN_AS: Partial<Record<State, Status["phase"]>> = {
  ASKING: "waiting",
  RETRYING: "retrying",
  STREAMING: "streaming",
  KEPT: "streaming",
  RECONNECTING: "reconnecting",
  RESUMING: "reconnecting",
};

/** The state that is kept with the answer. */
export function stateOf(machine: Machine): AnswerState {
  return KEPT_AS[machine.state];
}

/** What is shown of an answer that is being made; null when it is over. */
export function statusOf({ state, retryAt, tries }: Machine): Status | null {
  const phase = SHOWN_AS[state];
  return phase === undefined ? null : { phase, retryAt, tries, isOurs: true };
}

type Of<T extends EventType> = Extract<Event, { type: T }>;

function to(state: State, effects: Effect[] = []): (machine: Machine) => [Machine, Effect[]] {
  return (machine) => [{ ...machine, state, retryAt: null, trouble: null }, effects];
}

function waitFor(machine: Machine, trouble: Trouble, until: number, triesMax: number): [Machine, Effect[]] {
  if (machine.tries >= triesMax) return [{ ...machine, state: "CUT", retryAt: null, trouble }, []];
  return [{ state: "RECONNECTING", tries: machine.tries + 1, retryAt: until, trouble }, [{ do: "wait", until }]];
}

function over(): Record<EventType, Row> {
  return Object.fromEntries(EVENTS.map((type) => [type, OVER])) as Record<EventType, Row>;
}
