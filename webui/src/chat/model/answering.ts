/** Makes one answer: performs what its machine wants, and tells of each change. */
import { Refused, type Client, type Events } from "../../api/client";
import type { ChatRequest } from "../../api/wire";
import { grown, readEvent } from "./chunk";
import { begun, statusOf, stateOf, step, takenUp, type Effect, type Event, type Machine } from "./machine";
import { isLeaving, retryOf, troubleInStream, troubleOf } from "./trouble";
import type { Message, Status } from "./types";

/** Is told of the message as it is now, some times a second, and of each change of its status; `null`: it is over. */
export type Tell = (message: Message, status: Status | null) => void;

// What is drawn more often than this is drawn in vain: tokens come up to 300 times a second.
const TELL_MS = 40;
const TELL_MS_MAX = 1000;
// Of the time, what drawing may take: a table of a thousand rows takes longer each time, and its reader wants to scroll and to stop.
const DRAWING_SHARE = 1 / 4;
// The longest that timers can wait for, some 24 days.
const TIMER_MS_MAX = 2 ** 31 - 1;

export class Answering {
  #message: Message;
  #machine: Machine;
  #connection = new AbortController(); // of the last request; what comes from others is not listened to
  #waiting: ReturnType<typeof setTimeout> | undefined;
  #telling: ReturnType<typeof setTimeout> | undefined;
  #pause_ms = TELL_MS;
  readonly #client: Client;
  readonly #body: ChatRequest | null;
  readonly #tell: Tell;

  /** Asks for the answer in `message` with `body`; with null, for the rest of one that a journal keeps. */
  constructor(client: Client, message: Message, body: ChatRequest | null, tell: Tell) {
    const [machine, effects] = body === null ? takenUp() : begun();
    this.#client = client;
    this.#message = message;
    this.#body = body;
    this.#tell = tell;
    this.#machine = machine;
    this.#tellNow();
    effects.forEach((effect) => this.#perform(effect));
  }

  stop(): void {
    this.#take({ type: "stop" });
  }

  /** Ask now for what is waited for. */
  hurry(): void {
    this.#take({ type: "time" });
  }

  /** Let go of it without a word: the page goes away, and what is kept says how far it came. */
  abandon(): void {
    clearTimeout(this.#waiting);
    clearTimeout(this.#telling);
    this.#connection.abort();
  }

  #take(event: Event): void {
    const before = this.#machine;
    const [after, effects] = step(before, event);
    this.#machine = after;
    if (after === before) return;
    if (after.state !== before.state) clearTimeout(this.#waiting);
    this.#note(after);
    effects.forEach((effect) => this.#perform(effect));
    if (event.type === "chunk") this.#tellSoon();
    else this.#tellNow();
  }

  /** What the machine's state means for what is kept. */
  #note(machine: Machine): void {
    const answer = this.#message.answer!;
    const isOver = statusOf(machine) === null;
    const endedMs = isOver ? Date.now() - answer.startedAt : null;
    const changed = { ...answer, state: stateOf(machine), trouble: machine.trouble, endedMs };
    this.#message = { ...this.#message, answer: changed };
  }

  #perform(effect: Effect): void {
    switch (effect.do) {
      case "ask":
        return void this.#listen((signal) => {
          this.#message = { ...this.#message, answer: { ...this.#message.answer!, startedAt: Date.now() } };
          return this.#client.chat(this.#body!, signal);
        });
      case "resume":
        return void this.#listen((signal) => {
          const { serverId, lastEventId } = this.#message.answer!;
          return this.#client.resume(serverId!, lastEventId!, signal);
        });
      case "wait":
        this.#waiting = setTimeout(
          () => this.#take({ type: "time" }),
          Math.min(Math.max(effect.until - Date.now(), 0), TIMER_MS_MAX),
        );
        return;
      case "hang up":
        return this.#connection.abort();
      case "cancel":
        if (this.#message.answer!.serverId !== null) {
          // Where it cannot be told, the server finds out by itself that nobody reads this any more.
          this.#client.cancel(this.#message.answer!.serverId).catch(() => {});
        }
    }
  }

  /** Read a stream to its end, however that comes; one at a time. */
  async #listen(open: (signal: AbortSignal) => Promise<Events>): Promise<void> {
    const { signal } = (this.#connection = new AbortController());
    try {
      const events = await open(signal);
      if (signal.aborted) return;
      this.#take({ type: "opened" });
      for await (const some of events) {
        for (const event of some) {
          if (signal.aborted || this.#read(event.id, event.data)) return;
        }
      }
      if (!signal.aborted) this.#lose("the connection was closed before the end");
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused) this.#refuse(error);
      else this.#lose(error instanceof Error ? error.message : String(error));
    } finally {
      if (this.#connection.signal === signal) this.#connection.abort(); // behind an end nothing is read
    }
  }

  /** Take one event of a stream; true where it was the last. */
  #read(id: string | null, data: string): boolean {
    const read = readEvent(data);
    const now = Date.now();
    switch (read.kind) {
      case "chunk":
        this.#message = grown(this.#message, read.chunk, id, now - this.#message.answer!.startedAt);
        this.#take({ type: "chunk", hasId: id !== null });
        return false;
      case "error": {
        const trouble = troubleInStream(read.detail, now);
        this.#take(isLeaving(read.detail) ? { type: "left", trouble, now } : { type: "broken", trouble });
        return true;
      }
      case "end":
        this.#take({ type: "ended" });
        return true;
      case "unknown":
        return false;
    }
  }

  #refuse({ refusal }: Refused): void {
    const now = Date.now();
    const trouble = troubleOf(refusal, now);
    const retryAt = retryOf(trouble, now);
    this.#take(retryAt === null ? { type: "refused", trouble } : { type: "deferred", trouble, retryAt });
  }

  #lose(message: string): void {
    const isWhole = this.#message.answer!.finishReason !== null && this.#machine.state === "STREAMING";
    if (isWhole)
      this.#take({ type: "ended" }); // only figures are missing
    else this.#take({ type: "lost", trouble: { kind: "connection", message }, now: Date.now() });
  }

  #tellSoon(): void {
    this.#telling ??= setTimeout(() => this.#tellNow(), this.#pause_ms);
  }

  #tellNow(): void {
    clearTimeout(this.#telling);
    this.#telling = undefined;
    const began = performance.now();
    this.#tell(this.#message, statusOf(this.#machine));
    // What is drawn of it is drawn before the next task.
    setTimeout(() => {
      const pause_ms = (performance.now() - began) / DRAWING_SHARE;
      this.#pause_ms = Math.min(Math.max(TELL_MS, pause_ms), TELL_MS_MAX);
    });
  }
}
