import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { newConversation, NO_SETTINGS } from "../../../src/chat/model/fresh";
import type { Changes } from "../../../src/chat/store/db";
import { Writer } from "../../../src/chat/store/writer";
import { user } from "../build";

const conversation = newConversation("c", 1, NO_SETTINGS);
let tried: Changes[];
let hasRoom: (changes: Changes) => boolean;
let writer: Writer;

beforeEach(() => {
  vi.useFakeTimers();
  tried = [];
  hasRoom = () => true;
  writer = new Writer((changes) => (tried.push(changes), Promise.resolve(hasRoom(changes))));
});
afterEach(() => vi.useRealTimers());

const ids = ({ conversations, messages, removed }: Changes): string[] => [
  ...conversations.map(({ id }) => id),
  ...messages.map(({ id }) => id),
  ...removed,
];

test("changes are gathered, the last of each record is written, and only once", async () => {
  writer.conversation(conversation);
  writer.message(user("q", null, "one"));
  writer.message(user("q", null, "two"));
  await vi.advanceTimersByTimeAsync(10_000);
  expect(tried).toHaveLength(1);
  expect(tried[0]!.messages.map(({ content }) => content)).toEqual(["two"]);
});

test("what there was no room for is written with what comes next, as it is then, and by itself", async () => {
  hasRoom = () => false;
  writer.conversation(conversation);
  writer.message(user("q", null, "a question"));
  writer.message(user("a", "q", "its answer"));
  await writer.flush();
  hasRoom = () => true;
  writer.message(user("a", "q", "its answer, longer"));
  await writer.flush();
  expect(ids(tried[1]!).sort()).toEqual(["a", "c", "q"]);
  expect(tried[1]!.messages.find(({ id }) => id === "a")!.content).toBe("its answer, longer");
  await vi.advanceTimersByTimeAsync(10_000);
  expect(tried).toHaveLength(2);

  hasRoom = () => false;
  writer.message(user("b", "q"));
  await writer.flush();
  hasRoom = () => true;
  await vi.advanceTimersByTimeAsync(10_000);
  expect(tried.slice(3).map(ids)).toEqual([["b"]]);
});

test("what is removed makes room though the rest finds none, and is not written again", async () => {
  hasRoom = ({ removed }) => removed.length > 0;
  writer.conversation(conversation);
  writer.message(user("q", null));
  const written = writer.flush();
  writer.remove("c"); // while that is being tried
  await written;
  await writer.flush();
  hasRoom = () => true;
  await vi.advanceTimersByTimeAsync(10_000);
  expect(tried.map(ids)).toEqual([["c", "q"], ["c"]]);
  writer.conversation({ ...conversation, id: "d" });
  writer.remove("e");
  hasRoom = ({ removed }) => removed.length > 0;
  await writer.flush();
  expect(tried.slice(2).map(ids)).toEqual([["e"], ["d"]]);
});

test("a removal that failed is tried again", async () => {
  hasRoom = () => false;
  writer.remove("c");
  await writer.flush();
  hasRoom = () => true;
  await writer.flush();
  expect(tried.map(ids)).toEqual([["c"], ["c"]]);
});

test("what fails late does not come back over what is newer", async () => {
  let answer = (_: boolean): void => {};
  const written: string[] = [];
  const slow = new Writer(({ messages }) => {
    const { content } = messages[0]!;
    if (content === "old") return new Promise((resolve) => (answer = resolve));
    written.push(content);
    return Promise.resolve(true);
  });
  slow.message(user("q", null, "old"));
  void slow.flush();
  slow.message(user("q", null, "new"));
  void slow.flush();
  answer(false);
  await vi.advanceTimersByTimeAsync(10_000);
  expect(written).toEqual(["new"]);
});
