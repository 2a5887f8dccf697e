import { expect, test } from "vitest";
import { retryOf, troubleOf } from "../../../src/chat/model/trouble";

const refusal = { status: 503, detail: null, retryAfterMs: null as number | null, mayRetry: true };
const detail = (code: string) => ({ message: "m", type: "t", param: null, code });

test("what passes by itself is asked for again when the server says, if that is within two minutes", () => {
  for (const [retryAfterMs, at] of [
    [null, 3_000],
    [100_000, 101_000],
    [120_000, 121_000],
    [120_001, null],
  ] as const) {
    expect(retryOf(troubleOf({ ...refusal, retryAfterMs }, 1_000), 1_000)).toBe(at);
  }
});

test("a limit is waited for only where the server names a time, and does not call it vain", () => {
  const limit = { ...refusal, status: 429, detail: detail("rate_limit_exceeded") };
  expect(retryOf(troubleOf(limit, 0), 0)).toBeNull();
  expect(retryOf(troubleOf({ ...limit, retryAfterMs: 5_000 }, 0), 0)).toBe(5_000);
  expect(retryOf(troubleOf({ ...limit, retryAfterMs: 5_000, mayRetry: false }, 0), 0)).toBeNull();
});

test("a code says more than a status, and a proxy's page has none", () => {
  const kindOf = (status: number, code?: string) =>
    troubleOf({ ...refusal, status, detail: code === undefined ? null : detail(code) }, 0).kind;
  expect(kindOf(400, "context_length_exceeded")).toBe("context");
  expect(kindOf(400, "invalid_value")).toBe("refused");
  expect(kindOf(503, "server_is_overloaded")).toBe("queue_full");
  expect([401, 403, 413, 429, 500, 502, 503].map((status) => kindOf(status))).toEqual([
    ...["key", "key", "context", "limit", "server", "server", "loading"],
  ]);
});
