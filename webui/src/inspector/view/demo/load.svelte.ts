/**
 * Load from this page: chats and texts of several kinds, so many at once, for a minute at most.
 *
 * A browser opens six connections to a server over HTTP/1.1, and the feed holds one of them. So the load goes over four: two with lists
 * of texts, one with chats of several choices, and one with what seldom happens: a grammar, a reader who leaves, one who is slow.
 */
import { createParser } from "eventsource-parser";
import { address, headers, refusalOf, type Refusal } from "../../feed/server.svelte";
import { byGrammar, chats, longAnswer, texts, type Asked } from "./chats";

export const AT_ONCE = { least: 8, most: 32 };
export const DEMO_S = 60;
const CHOICES = 4;
const LEAVES_MS = 1000;
const SLOW_MS = 4000; // without reading: the server pauses an answer of which too much waits
const WAIT_S = 1; // after a refusal that says nothing of when to come back

interface Chunk {
  choices?: { finish_reason?: string | null }[];
  usage?: { completion_tokens?: number } | null;
}

type Lane = (number: number) => { asked: Asked; leaves_ms?: number; slow_ms?: number };

export class DemoLoad {
  isRunning = $state(false);
  endsAt = $state(0); // ms since 1970
  done = $state(0);
  refused = $state(0);
  tokens = $state(0);
  trouble = $state("");
  private abort = new AbortController();
  private number = 0;

  constructor(
    private readonly model: () => string,
    private readonly get: typeof fetch = (...asked) => fetch(...asked),
    private readonly random: () => number = Math.random,
  ) {}

  start(atOnce: number, seconds = DEMO_S): void {
    this.stop();
    [this.done, this.refused, this.tokens, this.trouble] = [0, 0, 0, ""];
    const { signal } = (this.abort = new AbortController());
    this.isRunning = true;
    this.endsAt = Date.now() + seconds * 1000;
    const timer = setTimeout(() => this.stop(), seconds * 1000);
    signal.addEventListener("abort", () => clearTimeout(timer));
    for (const lane of this.lanes(Math.min(AT_ONCE.most, Math.max(AT_ONCE.least, atOnce)))) void this.run(lane, signal);
  }

  /** What is still written ends with its connection: the server cancels it. */
  stop(): void {
    this.abort.abort();
    this.isRunning = false;
  }

  private lanes(atOnce: number): Lane[] {
    const { random } = this;
    const rest = atOnce - CHOICES - 1;
    const seldom: Lane[] = [
      () => ({ asked: byGrammar(random) }),
      () => ({ asked: longAnswer(random), leaves_ms: LEAVES_MS }),
      () => ({ asked: longAnswer(random), slow_ms: SLOW_MS }),
    ];
    const choices = (number: number) => {
      const { path, body } = chats(number, random);
      return { asked: { path, body: { ...body, n: CHOICES } } };
    };
    return [
      (number) => ({ asked: texts(number, Math.ceil(rest / 2), random) }),
      (number) => ({ asked: texts(number + 1, Math.floor(rest / 2), random) }),
      choices,
      (number) => seldom[number % seldom.length]!(number),
    ];
  }

  /** One answer after the other; each lane counts its own, so that its kinds take turns. */
  private async run(lane: Lane, signal: AbortSignal): Promise<void> {
    for (let number = 0; !signal.aborted; number++) {
      const { asked, leaves_ms, slow_ms = 0 } = lane(number);
      const left = new AbortController();
      const timer = leaves_ms === undefined ? undefined : setTimeout(() => left.abort(), leaves_ms);
      try {
        await this.read(asked, AbortSignal.any([signal, left.signal]), slow_ms);
      } catch (error) {
        if (!signal.aborted && !left.signal.aborted) {
          this.trouble = error instanceof Error ? error.message : String(error);
          this.refused++;
          await pause(1000 * ((error as Refusal).retryAfter_s ?? WAIT_S), signal);
        }
      } finally {
        clearTimeout(timer);
      }
    }
  }

  private async read({ path, body }: Asked, signal: AbortSignal, slow_ms: number): Promise<void> {
    const reply = await this.get(address(path), {
      method: "POST",
      headers: { "content-type": "application/json", "x-request-id": `demo-${++this.number}`, ...headers() },
      body: JSON.stringify({ ...body, model: this.model(), stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    if (!reply.ok || !reply.body) throw await refusalOf(reply);
    const parser = createParser({ onEvent: ({ data }) => data !== "[DONE]" && this.count(JSON.parse(data) as Chunk) });
    const decoder = new TextDecoder();
    const reader = reply.body.getReader();
    if (slow_ms) await pause(slow_ms, signal);
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      parser.feed(decoder.decode(part.value, { stream: true }));
    }
  }

  private count({ choices, usage }: Chunk): void {
    for (const { finish_reason } of choices ?? []) if (finish_reason) this.done++;
    this.tokens += usage?.completion_tokens ?? 0;
  }
}

function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
