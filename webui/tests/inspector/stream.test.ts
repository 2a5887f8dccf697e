import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { FeedStream, type Link } from "../../src/inspector/feed/stream";

const reply = (chunks: string[], status = 200, headers: Record<string, string> = {}) =>
  new Response(new Blob(chunks).stream(), { status, headers });

describe("the stream of the feed", () => {
  let links: Link[];
  let messages: string[];
  let replies: (() => Response)[];
  let asked: RequestInit[];
  let stream: FeedStream;
  beforeEach(() => {
    vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout", "Date"] });
    [links, messages, replies, asked] = [[], [], [], []];
    const get = vi.fn((_url: unknown, init: RequestInit) => {
      asked.push(init);
      const next = replies.shift();
      return next ? Promise.resolve(next()) : Promise.reject(new TypeError("no connection"));
    });
    const handlers = { message: (data: string) => messages.push(data), link: (now: Link) => links.push(now) };
    stream = new FeedStream(
      () => "/v1/inspector",
      () => ({ authorization: "Bearer k" }),
      handlers,
      get as typeof fetch,
    );
  });
  afterEach(() => {
    stream.close();
    vi.useRealTimers();
  });
  /** What has begun goes on until it waits for a timer; no time passes. */
  async function settle(): Promise<void> {
    for (let turn = 0; turn < 50; turn++) await new Promise((resolve) => setImmediate(resolve));
  }

  it("gives each event's data, however it was cut, with the key in a header", async () => {
    replies.push(() => reply(['data: {"a"', ":1}\n\nda", 'ta: {"b":2}\n\n', ": alive\n\n"]));
    stream.open();
    await settle();
    expect(messages).toEqual(['{"a":1}', '{"b":2}']);
    expect(asked[0]!.headers).toEqual({ authorization: "Bearer k" });
    expect(links).toEqual(["connecting", "live", "waiting"]);
  });

  it("comes back after half a second, then after twice as long, and soon again once something has come", async () => {
    stream.open();
    await settle();
    await vi.advanceTimersByTimeAsync(499);
    expect(asked).toHaveLength(1);
    await vi.advanceTimersByTimeAsync(1);
    expect(asked).toHaveLength(2);
    await settle();
    await vi.advanceTimersByTimeAsync(999);
    expect(asked).toHaveLength(2);
    replies.push(() => reply(["data: 1\n\n"]));
    await vi.advanceTimersByTimeAsync(1);
    await settle();
    expect(messages).toEqual(["1"]);
    await vi.advanceTimersByTimeAsync(500);
    expect(asked).toHaveLength(4);
  });

  it("waits as long as the server asks", async () => {
    replies.push(() => reply([], 429, { "retry-after": "7" }));
    stream.open();
    await settle();
    await vi.advanceTimersByTimeAsync(6999);
    expect(asked).toHaveLength(1);
    await vi.advanceTimersByTimeAsync(1);
    expect(asked).toHaveLength(2);
  });

  it("does not come back by itself when its key is refused, or there is no feed", async () => {
    replies.push(() => reply([], 401));
    stream.open();
    await settle();
    expect(links.at(-1)).toBe("refused");
    replies.push(() => reply([], 404));
    stream.open();
    await settle();
    expect(links.at(-1)).toBe("absent");
    await vi.advanceTimersByTimeAsync(60_000);
    expect(asked).toHaveLength(2);
  });

  it("is silent once it is closed", async () => {
    stream.open();
    stream.close();
    await vi.advanceTimersByTimeAsync(60_000);
    expect(links).toEqual(["connecting", "closed"]);
    expect(asked).toHaveLength(1);
  });
});
