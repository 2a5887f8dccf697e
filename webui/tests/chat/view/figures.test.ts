import { expect, test } from "vitest";
import { newAnswer } from "../../../src/chat/model/fresh";
import { percent, tokensPerSecond } from "../../../src/chat/view/figures";

const answer = (completionTokens: number, firstTokenMs: number | null, endedMs: number | null) => ({
  ...newAnswer("m", 1, 0),
  firstTokenMs,
  endedMs,
  usage: { promptTokens: 1, cachedTokens: 0, completionTokens, reasoningTokens: 0 },
});

test("speed is that of the tokens behind the first, and of an answer in one piece that of all", () => {
  expect(tokensPerSecond(answer(11, 1_000, 2_000))).toBe(10);
  expect(tokensPerSecond(answer(10, 2_000, 2_000))).toBe(5);
  expect(tokensPerSecond(answer(1, 1_000, 2_000))).toBeNull();
  expect(tokensPerSecond(answer(5, null, 2_000))).toBeNull();
  expect(tokensPerSecond({ ...answer(5, 1, 2), usage: null })).toBeNull();
});

test("what would round to nothing is said to be something", () => {
  expect(percent(0.9734, "en")).toBe("97.3%");
  expect(percent(0.0004, "en")).toBe("<0.1%");
  expect(percent(0, "en")).toBe("0%");
});
