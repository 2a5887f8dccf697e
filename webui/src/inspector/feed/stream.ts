/**
 * One stream of server-sent events over fetch, because a key goes in a header and an EventSource sends none.
 *
 * It comes back by itself after a connection is lost: after half a second, then twice as long each time up to fifteen, and
 * never earlier than Retry-After says. A key that is refused ends it: only a person can help there.
 */
import { createParser } from "eventsource-parser";

export type Link = "connecting" | "live" | "waiting" | "refused" | "absent" | "closed";

export interface Handlers {
  message(data: string): void;
  link(now: Link, retryAt: number | null): void;
}

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15_000;
const SILENCE_MS = 45_000; // three keep-alives of the server: the connection is dead though nothing has said so

export class FeedStream {
  private abort: AbortController | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private wait_ms = FIRST_WAIT_MS;

  constructor(
    private readonly url: () => string,
    private readonly headers: () => Record<string, string>,
    private readonly handlers: Handlers,
    private readonly get: typeof fetch = (...asked) => fetch(...asked),
  ) {}

  open(): void {
    this.stop();
    const abort = (this.abort = new AbortController());
    this.handlers.link("connecting", null);
    void this.read(abort);
  }

  close(): void {
    this.stop();
    this.handlers.link("closed", null);
  }

  private stop(): void {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  private async read(abort: AbortController): Promise<void> {
    let least_ms = 0;
    try {
      const reply = await this.get(this.url(), { headers: this.headers(), signal: abort.signal, cache: "no-store" });
      if (reply.status === 401 || reply.status === 403) return this.end(abort, "refused");
      if (reply.status === 404) return this.end(abort, "absent");
      least_ms = 1000 * Number(reply.headers.get("retry-after") ?? 0) || 0;
      if (reply.ok && reply.body) await this.consume(reply.body, abort);
    } catch {
      // Whatever it was, the connection is gone: what follows is the same.
    }
    if (this.abort !== abort) return;
    const wait_ms = Math.max(this.wait_ms, least_ms);
    this.wait_ms = Math.min(2 * this.wait_ms, LONGEST_WAIT_MS);
    this.handlers.link("waiting", Date.now() + wait_ms);
    this.timer = setTimeout(() => this.open(), wait_ms);
  }

  private end(abort: AbortController, link: Link): void {
    if (this.abort === abort) this.handlers.link(link, null);
  }

  private async consume(body: ReadableStream<Uint8Array>, abort: AbortController): Promise<void> {
    const parser = createParser({
      onEvent: ({ data }) => {
        this.wait_ms = FIRST_WAIT_MS;
        this.handlers.message(data);
      },
    });
    const decoder = new TextDecoder();
    const reader = body.getReader();
    this.handlers.link("live", null);
    let silence: ReturnType<typeof setTimeout> | undefined;
    try {
      for (;;) {
        silence = setTimeout(() => void reader.cancel().catch(() => undefined), SILENCE_MS);
        const { done, value } = await reader.read();
        clearTimeout(silence);
        if (done || abort.signal.aborted) return;
        parser.feed(decoder.decode(value, { stream: true }));
      }
    } finally {
      clearTimeout(silence);
    }
  }
}
