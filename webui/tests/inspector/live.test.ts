import { afterEach, beforeEach, expect, it, vi } from "vitest";
import { Live } from "../../src/inspector/feed/live.svelte";

let feeds: AbortSignal[];
let stop: () => void;

beforeEach(() => {
  vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout", "setInterval", "clearInterval"] });
  feeds = [];
  vi.stubGlobal("fetch", (url: string, init: RequestInit) => {
    if (!url.includes("v1/inspector")) return Promise.resolve(Response.json({ data: [{ id: "demo" }] }));
    feeds.push(init.signal!);
    return Promise.resolve(new Response(new ReadableStream())); // it is open, and says nothing
  });
});
afterEach(() => {
  stop();
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

async function see(isHidden: boolean): Promise<void> {
  Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
  await vi.advanceTimersByTimeAsync(0);
}

it("lets go of the feed when it was not seen for a minute, and begins anew when it is", async () => {
  const live = new Live();
  stop = live.start();
  await vi.advanceTimersByTimeAsync(10);
  expect([live.link, feeds.length]).toEqual(["live", 1]);
  await see(true);
  await vi.advanceTimersByTimeAsync(30_000);
  await see(false); // not for long
  await vi.advanceTimersByTimeAsync(40_000);
  expect(feeds.at(-1)!.aborted).toBe(false);
  await see(true);
  await vi.advanceTimersByTimeAsync(60_000);
  expect([live.link, feeds.at(-1)!.aborted]).toEqual(["closed", true]);
  const before = feeds.length;
  await see(false);
  await vi.advanceTimersByTimeAsync(10);
  expect([live.link, feeds.length, feeds.at(-1)!.aborted]).toEqual(["live", before + 1, false]);
});
