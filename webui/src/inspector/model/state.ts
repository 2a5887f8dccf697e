/** All that the inspector knows: a snapshot, and the frames that came after it. */
import type {
  ActorNow,
  Frame,
  IncidentNow,
  MachineNow,
  Percentiles,
  Rates,
  RequestNow,
  Snapshot,
  StepNow,
} from "../wire";
import { applyKv, kvOf, type Kv, type KvDirt } from "./kv";
import { Ring } from "./ring";
import { rowKey } from "./tables";

export const STEPS_MAX = 1024; // as many as the server keeps
export const INCIDENTS_MAX = 200;
const RATES_MAX = 600; // two minutes at five a second
const DEPTHS_MAX = 60; // of a sparkline: fifteen seconds
const SAMPLE_S = 0.2; // of rates and depths: frames come up to 20 a second

/** Replaced when anything of it changes, so that a view can compare by identity. */
export interface MachineLive {
  name: string;
  states: Record<string, number>;
  counts: Map<string, number>; // by `rowKey`; it grows in place
}

export interface RatePoint {
  time: number;
  tokens_s: number;
  running: number;
  waiting: number;
  ttft: Percentiles | null;
  interToken: Percentiles | null;
}

export interface State {
  time: number;
  model: string;
  limits: Snapshot["limits"];
  canInject: boolean;
  machines: Map<string, MachineLive>;
  actors: Map<string, ActorNow>;
  depths: Map<string, Ring<number>>;
  requests: Map<string, RequestNow>;
  kv: Kv | null; // null: the model is being loaded
  kvDirt: KvDirt;
  steps: Ring<StepNow>;
  rates: Rates;
  rateHistory: Ring<RatePoint>;
  incidents: IncidentNow[]; // the newest first
  lost: number;
}

/** Slices of the state. A view depends on its own. */
export const SLICES = ["machines", "actors", "requests", "kv", "steps", "rates", "incidents"] as const;
export type Slice = (typeof SLICES)[number];

/** What is known after `snapshot`; of what was known `before`, that which a snapshot does not hold is kept. */
export function begin(snapshot: Snapshot, before: State | null = null): State {
  const state: State = {
    time: snapshot.time,
    model: snapshot.model,
    limits: snapshot.limits,
    canInject: snapshot.can_inject,
    machines: new Map(),
    actors: new Map(snapshot.actors.map((actor) => [actor.name, actor])),
    depths: before?.depths ?? new Map(),
    requests: new Map(snapshot.requests.map((request) => [request.key, request])),
    kv: snapshot.kv && kvOf(snapshot.kv),
    kvDirt: { blocks: null, evicted: new Set() },
    steps: new Ring(STEPS_MAX),
    rates: snapshot.rates,
    rateHistory: before?.rateHistory ?? new Ring(RATES_MAX),
    incidents: [...snapshot.incidents].reverse(),
    lost: before?.lost ?? 0,
  };
  for (const machine of snapshot.machines) countRows(state, machine);
  for (const step of snapshot.steps) state.steps.push(step);
  sample(state, snapshot.time, true);
  return state;
}

/** Take in what has changed; says which slices have. */
export function apply(state: State, frame: Frame): Set<Slice> {
  const changed = new Set<Slice>();
  state.time = frame.time;
  state.lost += frame.lost;
  if (frame.machines.length) {
    for (const machine of frame.machines) countRows(state, machine);
    changed.add("machines");
  }
  for (const actor of frame.actors) state.actors.set(actor.name, actor);
  for (const request of frame.requests) state.requests.set(request.key, request);
  for (const [key, output_tokens, blocks] of frame.progress) {
    const request = state.requests.get(key);
    if (request) state.requests.set(key, { ...request, output_tokens, blocks });
  }
  for (const key of frame.gone) state.requests.delete(key);
  for (const step of frame.steps) state.steps.push(step);
  for (const incident of frame.incidents) state.incidents.unshift(incident);
  state.incidents.length = Math.min(state.incidents.length, INCIDENTS_MAX);
  if (frame.kv && state.kv) applyKv(state.kv, frame.kv, state.kvDirt);
  if (frame.rates) state.rates = frame.rates;
  if (frame.actors.length) changed.add("actors");
  if (frame.requests.length || frame.progress.length || frame.gone.length) changed.add("requests");
  if (frame.kv) changed.add("kv");
  if (frame.steps.length) changed.add("steps");
  if (frame.incidents.length) changed.add("incidents");
  if (sample(state, frame.time, false)) changed.add("rates").add("actors");
  return changed;
}

function countRows(state: State, now: MachineNow): void {
  const counts = state.machines.get(now.name)?.counts ?? new Map<string, number>();
  for (const row of now.rows) counts.set(rowKey(row.state, row.event, row.to), row.count);
  state.machines.set(now.name, { name: now.name, states: now.states, counts });
}

/** Rates and depths of mailboxes, not more often than a line can show. */
function sample(state: State, time: number, isFirst: boolean): boolean {
  const last = state.rateHistory.at(-1);
  if (!isFirst && last && time - last.time < SAMPLE_S) return false;
  const { tokens_s, running, waiting, ttft_ms: ttft, inter_token_ms: interToken } = state.rates;
  state.rateHistory.push({ time, tokens_s, running, waiting, ttft, interToken });
  for (const actor of state.actors.values()) {
    let depths = state.depths.get(actor.name);
    if (!depths) state.depths.set(actor.name, (depths = new Ring(DEPTHS_MAX)));
    depths.push(actor.mailbox_depth);
  }
  return true;
}
