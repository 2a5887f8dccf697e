/**
 * Load from this page: chats of several kinds, so many at once, for a minute at most.
 *
 * A browser opens six connections to a server over HTTP/1.1, and the feed and the page need some of them. So there are at most
 * `LANES_HTTP1` streams there, each with as many choices as make up the number; over HTTP/2 each chat has a stream of its own.
 */
import { createParser } from "eventsource-parser";
import { address, headers, refusalOf, type Refusal } from "../../feed/server.svelte";
import { demoChat } from "./chats";

export const AT_ONCE = { least: 8, most: 32 };
export const DEMO_S = 60;
const LANES_HTTP1 = 4;
const WAIT_MS = 1000; // after a refusal that says nothing of when to come back

interface Chunk {
  choices?: { delta?: { content?: string | null }; finish_reason?: string | null }[];
  usage?: { completion_tokens?: number } | null;
}

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
    private readonly isHttp2: () => boolean = spokeHttp2,
    private readonly get: typeof fetch = (...asked) => fetch(...asked),
  ) {}

  start(atOnce: number, seconds = DEMO_S): void {
    this.stop();
    [this.done, this.refused, this.tokens, this.trouble] = [0, 0, 0, ""];
    const abort = (this.abort = new AbortController());
    this.isRunning = true;
    this.endsAt = Date.now() + seconds * 1000;
    const timer = setTimeout(() => this.stop(), seconds * 1000);
    abort.signal.addEventListener("abort", () => clearTimeout(timer));
    const lanes = this.isHttp2() ? atOnce : LANES_HTTP1;
    for (let lane = 0; lane < lanes; lane++) {
      const choices = Math.floor(atOnce / lanes) + (lane < atOnce % lanes ? 1 : 0);
      if (choices > 0) void this.run(choices, abort.signal);
    }
  }

  /** What is still written ends with its connection: the server cancels it. */
  stop(): void {
    this.abort.abort();
    this.isRunning = false;
  }

  private async run(choices: number, signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      try {
        await this.chat(choices, signal);
      } catch (error) {
        if (signal.aborted) return;
        this.trouble = error instanceof Error ? error.message : String(error);
        this.refused++;
        await pause(1000 * ((error as Refusal).retryAfter_s ?? WAIT_MS / 1000), signal);
      }
    }
  }

  private async chat(choices: number, signal: AbortSignal): Promise<void> {
    const body = {
      ...demoChat(this.number++),
      model: this.model(),
      stream: true,
      stream_options: { include_usage: true },
      ...(choices > 1 ? { n: choices, temperature: 0.8 } : {}),
    };
    const reply = await this.get(address("v1/chat/completions"), {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify(body),
      signal,
    });
    if (!reply.ok || !reply.body) throw await refusalOf(reply);
    const parser = createParser({ onEvent: ({ data }) => data !== "[DONE]" && this.count(JSON.parse(data) as Chunk) });
    const decoder = new TextDecoder();
    const reader = reply.body.getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      parser.feed(decoder.decode(part.value, { stream: true }));
    }
  }

  private count({ choices, usage }: Chunk): void {
    for (const { finish_reason } of choices ?? []) if (finish_reason) this.done++;
    this.tokens += usage?.completion_tokens ?? 0;
  }
}

function spokeHttp2(): boolean {
  const page = performance.getEntriesByType("navigation")[0] as PerformanceNavigationTiming | undefined;
  return page?.nextHopProtocol === "h2";
}

function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
