/** Server-sent events from the body of a fetch: `EventSource` can only GET, and has no way to send a key. */
import { createParser } from "eventsource-parser";

export interface ServerEvent {
  /** What to come back with, where the server can go on behind it. */
  id: string | null;
  data: string;
}

/** The events of `body`, as many at a time as one read brings; comments are left out. Throws what reading it throws. */
export async function* eventsOf(body: ReadableStream<Uint8Array>): AsyncGenerator<ServerEvent[], void> {
  let read: ServerEvent[] = [];
  const parser = createParser({ onEvent: ({ id, data }) => read.push({ id: id ?? null, data }) });
  const decoder = new TextDecoder();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      parser.feed(decoder.decode(value, { stream: true }));
      if (read.length > 0) {
        yield read;
        read = [];
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it has ended, or its connection is gone: either way there is nothing to tell
  }
}
