/** A feed that is made up: requests that come, run, and end on an engine of the page's own, with everything that the wire tells. */
import type { Frame, KvChange, RequestNow, Snapshot, StepNow } from "../../src/inspector/wire";

const STATES = ["FREE", "CACHED", "WAITING", "PREFILL", "DECODE", "PAUSED", "PREEMPTED", "RECOVERING", "ENDED"];
const FINAL = ["FINISHED_STOPPED", "FINISHED_LENGTH", "FINISHED_ABORTED"];
const EVENT: Record<string, string> = {
  PREFILL: "Admit",
  DECODE: "Prefilled",
  PREEMPTED: "Preempt",
  PAUSED: "PauseRequest",
};

/** Deterministic: a multiplicative generator (Lehmer, 1951), so that a test sees the same feed each time. */
export function chance(seed: number): () => number {
  let x = seed % 2147483647 || 1;
  return () => (x = (x * 48271) % 2147483647) / 2147483647;
}

export class Generated {
  readonly numBlocks: number;
  private readonly owner: Uint8Array;
  private readonly readers: Uint8Array;
  private readonly held = new Map<string, number[]>();
  private readonly live: RequestNow[] = [];
  private readonly ended: string[] = [];
  private readonly counts = new Map<string, number>();
  private readonly random: () => number;
  private number = 0;
  private step = 0;
  private incidents = 0;

  constructor(
    readonly running: number,
    readonly time0: number,
    { seed = 1, numBlocks = 2048 } = {},
  ) {
    this.random = chance(seed);
    this.numBlocks = numBlocks;
    this.owner = new Uint8Array(numBlocks);
    this.readers = new Uint8Array(numBlocks);
  }

  snapshot(time = this.time0): Snapshot {
    const base64 = (bytes: Uint8Array) => btoa(String.fromCharCode(...bytes));
    const { machines, actors, steps, rates, incidents } = this.frame(time);
    return {
      type: "snapshot",
      time,
      machines,
      actors,
      steps,
      rates: rates!,
      incidents,
      model: "nova",
      limits: { max_num_seqs: this.running, max_num_batched_tokens: 2048, max_model_len: 2048 },
      can_inject: true,
      requests: [...this.live],
      kv: {
        layout: "blocks",
        total: this.numBlocks,
        block_size: 16,
        states: STATES,
        owner: base64(this.owner),
        readers: base64(this.readers),
        host_total: 256,
        host_used: 12,
      },
    };
  }

  frame(time: number): Frame {
    const kv: KvChange = { blocks: [], evicted: [], host_used: 12 };
    const rows = new Map<string, [string, string, string]>();
    const changed: RequestNow[] = [];
    const progress: Frame["progress"] = [];
    const gone: string[] = [];
    while (this.live.length < this.running) {
      const one = this.come(time, kv);
      this.live.push(one);
      changed.push(one);
    }
    for (let at = this.live.length - 1; at >= 0; at--) {
      const now = { ...this.live[at]! };
      const before = now.state;
      this.move(now, time, kv);
      if (now.state !== before) rows.set(`${before} ${now.state}`, [before, EVENT[now.state] ?? "Finish", now.state]);
      if (now.state !== before) this.count("Request", before, EVENT[now.state] ?? "Finish", now.state);
      if (now.state !== before) changed.push(now);
      else progress.push([now.key, now.output_tokens, now.blocks]);
      this.live[at] = now;
      if (now.state.startsWith("FINISHED")) {
        this.live.splice(at, 1);
        this.ended.push(now.key);
      }
    }
    while (this.ended.length > 100) gone.push(this.ended.shift()!);
    this.count("Engine", "IDLE", "Asked", "SCHEDULING");
    return {
      type: "frame",
      time,
      machines: [
        { name: "Request", states: this.states(), rows: [...rows.values()].map((row) => this.row("Request", ...row)) },
        { name: "Engine", states: { AHEAD: 1 }, rows: [this.row("Engine", "IDLE", "Asked", "SCHEDULING")] },
        { name: "Scheduler", states: { PARTIAL: 1 }, rows: [] },
        { name: "Stream", states: { OPEN: this.running, STALLED: 2 }, rows: [] },
      ],
      actors: ["gate", "engine", "worker-0", "scheduler", "tokenizer"].map((name) => this.actor(name, time)),
      requests: changed,
      progress,
      gone,
      kv,
      steps: [this.oneStep(time - 0.04), this.oneStep(time - 0.02)],
      rates: {
        tokens_s: 2000 + 400 * this.random(),
        running: this.running,
        waiting: Math.floor(10 * this.random()),
        ttft_ms: { p50: 40, p95: 90 + 20 * this.random(), p99: 140 },
        inter_token_ms: { p50: 12, p95: 20 + 4 * this.random(), p99: 30 },
      },
      incidents: this.random() < 0.02 ? [this.incident(time)] : [],
      lost: 0,
    };
  }

  private count(machine: string, ...row: string[]): void {
    const key = [machine, ...row].join(" ");
    this.counts.set(key, (this.counts.get(key) ?? 0) + 1);
  }

  private row(machine: string, state: string, event: string, to: string) {
    return { state, event, to, count: this.counts.get([machine, state, event, to].join(" ")) ?? 0 };
  }

  private states(): Record<string, number> {
    const found: Record<string, number> = {};
    for (const { state } of this.live) found[state] = (found[state] ?? 0) + 1;
    return found;
  }

  private come(time: number, kv: KvChange): RequestNow {
    const id = `chatcmpl-${(this.number++).toString(16).padStart(8, "0")}`;
    this.held.set(`${id}-0`, []);
    const [shared, prompt_tokens] = [this.random() < 0.5, 20 + Math.floor(200 * this.random())];
    if (shared) for (let block = 0; block < 12; block++) this.own(block, 1, this.readers[block]! + 1, kv);
    return {
      key: `${id}-0`,
      id,
      choice: 0,
      state: "WAITING",
      waits_for: "queue",
      owner: ["alice", "bob", ""][this.number % 3]!,
      arrived: time,
      since: time,
      prompt_tokens,
      cached_tokens: shared ? 192 : 0,
      output_tokens: 0,
      blocks: 0,
    };
  }

  private move(now: RequestNow, time: number, kv: KvChange): void {
    const dice = this.random();
    let to = now.state;
    if (now.state === "WAITING" || now.state === "PREEMPTED") to = dice < 0.3 ? "PREFILL" : now.state;
    else if (now.state === "PREFILL") to = dice < 0.5 ? "DECODE" : "PREFILL";
    else if (dice < 0.01) to = "PREEMPTED";
    else if (dice < 0.02) to = FINAL[Math.floor(150 * dice) % 3]!;
    if (to === "DECODE") now.output_tokens++;
    if (to !== now.state) [now.state, now.since, now.waits_for] = [to, time, to === "PREEMPTED" ? "blocks" : null];
    this.hold(now, kv);
  }

  private hold(now: RequestNow, kv: KvChange): void {
    const held = this.held.get(now.key)!;
    const isHolding = now.state === "PREFILL" || now.state === "DECODE";
    const wanted = isHolding ? Math.ceil((now.prompt_tokens! + now.output_tokens) / 16) : 0;
    while (held.length > wanted) this.own(held.pop()!, this.random() < 0.4 ? 1 : 0, 0, kv);
    for (let tries = 0; held.length < wanted && tries < 50; tries++) {
      const block = 12 + Math.floor((this.numBlocks - 12) * this.random());
      if (this.owner[block]! > 1) continue;
      if (this.owner[block] === 1) kv.evicted.push(block);
      held.push(block);
    }
    for (const block of held) {
      const state = STATES.indexOf(now.state);
      if (this.owner[block] !== state) this.own(block, state, 1, kv);
    }
    now.blocks = held.length;
  }

  private own(block: number, state: number, readers: number, kv: KvChange): void {
    this.owner[block] = state;
    this.readers[block] = Math.min(255, readers);
    kv.blocks.push([block, state, this.readers[block]!]);
  }

  private actor(name: string, time: number) {
    const state = { gate: "OPEN", engine: "AHEAD", "worker-0": "RUNNING", scheduler: "FULL", tokenizer: "IDLE" }[name]!;
    return {
      name,
      state,
      since: time - this.random(),
      deadline_s: name === "worker-0" ? 2 : name === "engine" ? 30 : null,
      mailbox_depth: Math.floor(6 * this.random()),
      mailbox_max: name === "gate" ? 256 : null,
      handled_total: this.step * 3,
      restarts: name === "worker-0" ? 1 : 0,
      rung: name === "scheduler" ? "FULL" : null,
      pid: name === "worker-0" ? 4312 : 4300,
    };
  }

  private oneStep(began: number): StepNow {
    const kernel = 8 + 6 * this.random();
    const names = ["schedule", "kernel", "sample", "detokenise", "send"] as const;
    const took = [0.8, kernel, 0.9, 0.6, 0.5];
    let at = 0;
    const phases = names.map((name, index) => {
      const phase = { name, began_ms: at, took_ms: took[index]! };
      at += took[index]!;
      return phase;
    });
    const num_tokens = Math.floor(this.running + 600 * this.random() ** 3);
    return {
      id: this.step++,
      began,
      phases,
      num_seqs: this.running,
      num_tokens,
      budget: 2048,
      is_failed: this.random() < 0.01,
      outcome: "done",
    };
  }

  private incident(time: number) {
    return {
      number: this.incidents++,
      time,
      kind: "oom",
      message: `Step ${this.step} did not fit into the device's memory`,
      action: "The step was rolled back, the batch is smaller from now on, and its requests run on",
      step_id: this.step,
      requests: this.live.slice(0, 3).map(({ id }) => id),
    };
  }
}
