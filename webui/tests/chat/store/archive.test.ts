import { expect, test } from "vitest";
import { newConversation, NO_SETTINGS } from "../../../src/chat/model/fresh";
import { archiveOf, Unfit, unarchived } from "../../../src/chat/store/archive";
import { assistant, user } from "../build";

const conversation = { ...newConversation("c", 1, { ...NO_SETTINGS, stop: ["."], seed: 3 }), leaf: "a" };
const messages = [
  { ...user("q", null, "<b>שלום</b>"), attachments: [{ name: "n", text: "t" }] },
  assistant("a", "q", "answer", { state: "streaming", serverId: "s", lastEventId: "s:1" }),
];
const file = () => JSON.parse(archiveOf([{ conversation, messages }], 5)) as { conversations: [Record<string, any>] };

function read(text: string) {
  let next = 0;
  return unarchived(text, () => `new${next++}`);
}

function faultOf(change: (one: Record<string, any>) => void): string {
  const changed = file();
  change(changed.conversations[0]);
  try {
    read(JSON.stringify(changed));
  } catch (error) {
    if (error instanceof Unfit) return `${error.path}: ${error.message}`;
    throw error;
  }
  return "";
}

test("what was exported comes back under ids of its own; what was being made is cut", () => {
  const [archived] = read(JSON.stringify(file()));
  expect(archived!.conversation).toEqual({ ...conversation, id: "new0", leaf: "new2" });
  expect(archived!.messages).toEqual([
    { ...messages[0], id: "new1", conversation: "new0" },
    {
      ...messages[1],
      id: "new2",
      conversation: "new0",
      parent: "new1",
      answer: { ...messages[1]!.answer, state: "cut", serverId: null, lastEventId: null },
    },
  ]);
});

test("a file with a fault is refused, and says where it is", () => {
  expect(() => read("{")).toThrow(/not JSON/);
  expect(() => read("[]")).toThrow(/must be an object/);
  expect(() => read('{"format": "other"}')).toThrow(/something else/);
  expect(faultOf((one) => (one.messages[0].parent = "a"))).toMatch(/messages\[0\].parent: leads back/);
  expect(faultOf((one) => (one.messages[0].parent = "q"))).toMatch(/messages\[0\].parent: leads back/);
  expect(faultOf((one) => (one.messages[1].parent = "z"))).toMatch(/messages\[1\].parent: is no message/);
  expect(faultOf((one) => (one.messages[1].id = "q"))).toMatch(/messages\[1\].id: is used twice/);
  expect(faultOf((one) => (one.leaf = "z"))).toMatch(/leaf: is no message/);
  expect(faultOf((one) => (one.messages[1].role = "system"))).toMatch(/messages\[1\].role: must be one of/);
  expect(faultOf((one) => delete one.messages[1].answer)).toMatch(/messages\[1\].answer: must be an object.*missing/);
  expect(faultOf((one) => (one.settings.seed = "3"))).toMatch(/settings.seed: must be a number/);
});
