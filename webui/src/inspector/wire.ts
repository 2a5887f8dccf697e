/**
 * What `GET /v1/inspector` sends: server-sent events, each one JSON object. The first is a `Snapshot`; then come `Frame`s, at most
 * 20 a second, each with what has changed since the one before. A reader that is slow gets fewer frames, which hold the same states and
 * counts with fewer details; `lost` says how many details were dropped.
 */

export interface Snapshot {
  type: "snapshot";
  time: number; // seconds since 1970, as everywhere here
  model: string;
  limits: { max_num_seqs: number; max_num_batched_tokens: number; max_model_len: number };
  can_inject: boolean; // with the key that asked
  machines: MachineNow[];
  actors: ActorNow[];
  requests: RequestNow[];
  kv: KvMap;
  steps: StepNow[]; // the last ones, the newest last
  rates: Rates;
  incidents: IncidentNow[];
}

export interface Frame {
  type: "frame";
  time: number;
  machines: MachineNow[]; // those that have changed
  actors: ActorNow[]; // those that have changed
  requests: RequestNow[]; // those that have changed, come, or ended
  gone: string[]; // keys of those that are not remembered any more
  kv: KvChange | null;
  steps: StepNow[];
  rates: Rates;
  incidents: IncidentNow[];
  lost: number; // details (steps, taken rows) that were dropped because the reader was slow
}

/** Machines of one kind: how many are in each state, and how often each row was taken since the engine began. */
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

export interface ActorNow {
  name: string;
  state: string;
  since: number;
  deadline_s: number | null;
  mailbox_depth: number;
  mailbox_max: number | null;
  handled_total: number;
  restarts: number;
  rung: string | null; // of the ladder: of the worker only
  pid: number;
}

export interface RequestNow {
  key: string; // id and choice
  id: string;
  choice: number;
  state: string;
  waits_for: string | null;
  owner: string; // the name of its API key; "" without keys
  arrived: number;
  since: number; // of its state
  prompt_tokens: number;
  cached_tokens: number;
  output_tokens: number;
  blocks: number;
}

/** Blocks by number. `states[owner[b]]` is the state of who has block b; "FREE" and "CACHED" have no owner. */
export interface KvMap {
  layout: "blocks" | "slots";
  block_size: number;
  states: string[];
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
  began: number;
  phases: { name: "schedule" | "kernel" | "sample" | "detokenise" | "send"; began_ms: number; took_ms: number }[];
  num_seqs: number;
  num_tokens: number;
  budget: number;
  is_failed: boolean;
}

export interface Rates {
  tokens_s: number;
  running: number;
  waiting: number;
  ttft_ms: Percentiles | null;
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
  action: string;
  step_id: number;
  requests: string[];
}
