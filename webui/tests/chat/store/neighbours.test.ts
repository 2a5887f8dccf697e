import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { Neighbours } from "../../../src/chat/store/neighbours";

/** Tabs of one browser, without its locks: what one tells, the others hear. */
class Channel {
  static all = new Set<Channel>();
  onmessage: ((event: { data: unknown }) => void) | null = null;
  constructor() {
    Channel.all.add(this);
  }
  postMessage(data: unknown): void {
    for (const one of Channel.all) if (one !== this) one.onmessage?.({ data });
  }
  close(): void {
    Channel.all.delete(this);
  }
}

beforeEach(() => {
  vi.useFakeTimers();
  Channel.all.clear();
  vi.stubGlobal("BroadcastChannel", Channel);
  vi.stubGlobal("navigator", {}); // no locks, as by plain HTTP
});
afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

test("without locks an answer is inherited when the tab that makes it says nothing any more", async () => {
  const [maker, heir] = [new Neighbours("n", () => {}), new Neighbours("n", () => {})];
  const release = maker.own("a");
  const inherited = vi.fn();
  void heir.inherit("a").then(inherited);
  await vi.advanceTimersByTimeAsync(30_000);
  expect(inherited).not.toHaveBeenCalled();
  release();
  await vi.advanceTimersByTimeAsync(7_000);
  expect(inherited).toHaveBeenCalledWith(expect.any(Function));
});

test("a tab that is closed inherits nothing", async () => {
  const heir = new Neighbours("n", () => {});
  const inherited = vi.fn();
  void heir.inherit("a").then(inherited);
  heir.close();
  await vi.advanceTimersByTimeAsync(7_000);
  expect(inherited).toHaveBeenCalledWith(null);
});
