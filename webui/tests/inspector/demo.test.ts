import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { DemoLoad } from "../../src/inspector/view/demo/load.svelte";
import { chance } from "./generated";

interface Sent {
  path: string;
  body: { prompt?: string[]; n?: number; model: string; stream: boolean };
  signal: AbortSignal;
}

describe("the demo's load", () => {
  let sent: Sent[];
  let answer: (sent: Sent) => Promise<Response>;
  let load: DemoLoad;
  const open = ({ signal }: Sent) =>
    new Promise<Response>((_, reject) => signal.addEventListener("abort", () => reject(new Error("aborted"))));
  beforeEach(() => {
    vi.useFakeTimers();
    sent = [];
    answer = open;
    const get = (url: string, init: RequestInit) => {
      const one = { path: new URL(url).pathname, body: JSON.parse(init.body as string), signal: init.signal! } as Sent;
      sent.push(one);
      return answer(one);
    };
    load = new DemoLoad(() => "nova", get as typeof fetch, chance(1));
  });
  afterEach(() => {
    load.stop();
    vi.useRealTimers();
  });
  const width = ({ body }: Sent) => body.prompt?.length ?? body.n ?? 1;

  it.each([8, 16, 31, 32])("has %i at once over four connections, and leaves two for the page", (atOnce) => {
    load.start(atOnce);
    expect(sent).toHaveLength(4);
    expect(sent.reduce((sum, one) => sum + width(one), 0)).toBe(atOnce);
    expect(sent.every(({ body }) => body.stream && body.model === "nova")).toBe(true);
  });

  it("sends no more than 32 at once, whatever it is told", () => {
    load.start(1000);
    expect(sent.reduce((sum, one) => sum + width(one), 0)).toBe(32);
  });

  it("leaves every answer when it is stopped, and asks for no other", async () => {
    load.start(8);
    load.stop();
    await vi.advanceTimersByTimeAsync(10_000);
    expect(sent).toHaveLength(4);
    expect(sent.every(({ signal }) => signal.aborted)).toBe(true);
    expect([load.isRunning, load.refused]).toEqual([false, 0]);
  });

  it("stops by itself when its time is over", async () => {
    load.start(8, 60);
    await vi.advanceTimersByTimeAsync(59_999);
    expect(load.isRunning).toBe(true);
    await vi.advanceTimersByTimeAsync(1);
    expect(load.isRunning).toBe(false);
    expect(sent.every(({ signal }) => signal.aborted)).toBe(true);
  });

  it("counts what ended and its tokens, and goes on with the next chat", async () => {
    const events =
      'data: {"choices":[{"finish_reason":"stop"}]}\n\ndata: {"choices":[],"usage":{"completion_tokens":7}}\n\n';
    answer = (one) => (sent.length > 4 ? open(one) : Promise.resolve(new Response(`${events}data: [DONE]\n\n`)));
    load.start(8);
    await vi.advanceTimersByTimeAsync(0);
    await vi.waitFor(() => expect(sent).toHaveLength(8));
    expect([load.done, load.tokens]).toEqual([4, 28]);
  });

  it("comes back after a refusal when the server says, and shows why", async () => {
    const body = JSON.stringify({ error: { message: "The queue is full" } });
    answer = () => Promise.resolve(new Response(body, { status: 429, headers: { "retry-after": "3" } }));
    load.start(8);
    await vi.waitFor(() => expect(load.refused).toBe(4));
    expect(load.trouble).toBe("The queue is full");
    const before = sent.length;
    await vi.advanceTimersByTimeAsync(2000);
    expect(sent).toHaveLength(before);
    await vi.advanceTimersByTimeAsync(1000);
    expect(sent).toHaveLength(2 * before);
  });
});
