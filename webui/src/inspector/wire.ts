/**
 * What `GET /v1/inspector` sends: server-sent events, each one `data:` line with a JSON object. The first is a `Snapshot`; then come
 * `Frame`s, at most 20 a second, each with what has changed since the one before. A snapshot may come again at any time (the KV cache has
 * another size, or the reader was away for too long): it replaces all that was known. The end of the stream is the engine's end.
 *
 * A reader that is slow gets fewer frames, which hold the same states and counts with fewer details; `lost` says how many details were
 * dropped. With keys, a key is told of its own requests only; all else is told to every key, as by the endpoints that answer once.
 */

export interface Snapshot {
  type: "snapshot";
  time: number; // seconds since 1970, as everywhere here
  model: string;
  limits: { max_num_seqs: number; max_num_batched_tokens: number; max_model_len: number };
  can_inject: boolean; // with the key that asked: POST /v1/faults and POST /v1/recorder/dump
  machines: MachineNow[]; // those of which some live in the engine's process
  actors: ActorNow[];
  requests: RequestNow[]; // those that live, and the newest that have ended
  kv: KvMap | null; // null: the model is being loaded
  steps: StepNow[]; // the last ones, the newest last
  rates: Rates;
  incidents: IncidentNow[]; // the last ones, the newest last
}

export interface Frame {
  type: "frame";
  time: number;
  machines: MachineNow[]; // those that have changed
  actors: ActorNow[]; // those that have changed
  requests: RequestNow[]; // those that have come, or changed in more than the next line
  progress: [key: string, output_tokens: number, blocks: number][]; // what others have now
  gone: string[]; // keys of those that are not told of any more
  kv: KvChange | null;
  steps: StepNow[]; // that have ended
  rates: Rates | null; // where they have changed: some times a second
  incidents: IncidentNow[];
  lost: number; // steps and evictions of which nothing is told, because there were too many, or the reader was slow
}

/**
 * Machines of one kind: how many are in each state (a state that is not named has none), and how often each row was taken since the engine
 * began. Rows that were never taken are left out, as are those by which nothing is done, and those of a `Stream` that stays as it is: they
 * are taken for each token.
 */
export interface MachineNow {
  name: string; // as in GET /v1/machines
  states: Record<string, number>;
  rows: RowCount[]; // in a frame: those that have changed
}

export interface RowCount {
  state: string;
  event: string;
  to: string;
  count: number;
}

/** The answer of `GET /v1/machines/{name}/taken?state=&event=&to=`: at most a hundred of each row, from when somebody first looked. */
export interface TakenList {
  object: "list";
  data: Taken[]; // the newest last
}

export interface Taken {
  time: number;
  state: string;
  event: string;
  to: string;
  of: string; // which one: the id of a request, or the name of an actor; "" where there is only one, or it has no name
}

export interface ActorNow {
  name: string;
  state: string;
  since: number;
  deadline_s: number | null; // how long it may be in its state; null: any time
  mailbox_depth: number;
  mailbox_max: number | null; // null: no mailbox, but a thread's queue
  handled_total: number;
  restarts: number;
  rung: string | null; // of the ladder: of the scheduler only, which decides it
  pid: number;
}

export interface RequestNow {
  key: string; // of one choice of one request, in this engine
  id: string; // as in GET /v1/requests/{id}, which has its whole history
  choice: number;
  state: string; // as in GET /v1/requests: those of the machine Request, or "OVERFLOW"
  waits_for: string | null; // as `reason` there
  owner: string; // the name of its API key; "" without keys
  arrived: number;
  since: number; // of its state
  prompt_tokens: number | null; // null: it is not tokenised yet
  cached_tokens: number;
  output_tokens: number;
  blocks: number;
}

/** Blocks by number. `states[owner[b]]` is the state of who has block b; "FREE" and "CACHED" have no owner. */
export interface KvMap {
  layout: "blocks" | "slots";
  block_size: number;
  total: number;
  states: string[]; // "FREE", "CACHED", "STEP" (a step reads or writes it for no request), then those of requests; "ENDED": with its step
  owner: string; // base64 of one byte a block: an index of `states`
  readers: string; // base64 of one byte a block: how many requests have it, at most 255
  host_total: number;
  host_used: number;
}

export interface KvChange {
  blocks: [block: number, state: number, readers: number][];
  evicted: number[]; // blocks whose prefix was forgotten, to be used for something else
  host_used: number;
}

export interface StepNow {
  id: number;
  began: number; // its plan
  phases: Phase[]; // in order; one of which nothing is known is left out
  num_seqs: number;
  num_tokens: number;
  budget: number; // tokens that a step may have
  is_failed: boolean;
  outcome: string; // as in GET /v1/steps
}

/**
 * "schedule" is the plan, up to the launch; "kernel" is all that the device does, from the launch to its answer, where it does not tell
 * "sample" apart (a GPU does not); "detokenise" is the commit, in which tokens become text, and "send" is handing that to its readers:
 * both mostly while the device computes the next step. With two steps in flight, phases of neighbours overlap.
 */
export interface Phase {
  name: "schedule" | "kernel" | "sample" | "detokenise" | "send";
  began_ms: number; // behind `began`
  took_ms: number;
}

export interface Rates {
  tokens_s: number; // over the last second
  running: number;
  waiting: number;
  ttft_ms: Percentiles | null; // of the last 10 seconds, as clients see them; null: there was none
  inter_token_ms: Percentiles | null;
}

export interface Percentiles {
  p50: number;
  p95: number;
  p99: number;
}

export interface IncidentNow {
  number: number;
  time: number;
  kind: string;
  message: string;
  action: string; // what was done about it, and taken back
  step_id: number; // -1: no step was at fault
  requests: string[]; // whom it touched, as far as this key may know
}
