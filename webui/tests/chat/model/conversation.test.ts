import { expect, test } from "vitest";
import { hasText, leafBelow, pathTo, shownPath, titleOf } from "../../../src/chat/model/conversation";
import { assistant, mapOf, user } from "../build";

const messages = mapOf(
  user("q1", null),
  assistant("a1", "q1"),
  user("q2", "a1"),
  assistant("a2", "q2"),
  assistant("b1", "q1"),
  user("q1'", null),
);

test("a path leads from the first question to its leaf, and leaves other branches out", () => {
  expect(pathTo(messages, "a2").map(({ id }) => id)).toEqual(["q1", "a1", "q2", "a2"]);
  expect(pathTo(messages, "b1").map(({ id }) => id)).toEqual(["q1", "b1"]);
  expect(pathTo(messages, null)).toEqual([]);
  expect(pathTo(messages, "none")).toEqual([]);
});

test("a path ends where a message is its own ancestor", () => {
  const circle = mapOf({ ...user("x", "y") }, { ...user("y", "x") });
  expect(pathTo(circle, "x").map(({ id }) => id)).toEqual(["y", "x"]);
});

test("siblings are counted in the order in which they came, first questions too", () => {
  const [first, second] = shownPath(messages, "c", "a1");
  expect(first!.siblings).toEqual({ index: 0, count: 2, previous: null, next: "q1'" });
  expect(second!.siblings).toEqual({ index: 0, count: 2, previous: null, next: "b1" });
  expect(shownPath(messages, "c", "b1")[1]!.siblings).toEqual({ index: 1, count: 2, previous: "a1", next: null });
});

test("siblings are of the same conversation only", () => {
  const others = new Map(messages).set("z", { ...user("z", null), conversation: "another" });
  expect(shownPath(others, "c", "q1")[0]!.siblings.count).toBe(2);
});

test("a branch is shown as far as it was written last", () => {
  expect(leafBelow(messages, "a1")).toBe("a2");
  expect(leafBelow(messages, "q1")).toBe("b1"); // the younger answer
  expect(leafBelow(messages, "a2")).toBe("a2");
});

test("a title is the first line of a question, and not too long", () => {
  expect(titleOf("  What is it?\nMore of it")).toBe("What is it?");
  expect(titleOf("")).toBe("");
  const long = titleOf("界".repeat(100));
  expect([...long]).toHaveLength(60);
  expect(long.endsWith("…")).toBe(true);
  expect(titleOf("👩".repeat(100))).toBe("👩".repeat(59) + "…"); // no half of a character
});

test("a text is found in a message and in what is attached to it, whatever its case", () => {
  const message = { ...user("q", null, "Look at this"), attachments: [{ name: "notes", text: "the Dragon sleeps" }] };
  expect(["look", "dragon S"].map((text) => hasText(message, text))).toEqual([true, true]);
  expect(["notes", "lookt"].map((text) => hasText(message, text))).toEqual([false, false]);
});
