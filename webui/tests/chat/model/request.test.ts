import { expect, test } from "vitest";
import { NO_SETTINGS } from "../../../src/chat/model/fresh";
import { messagesOf, requestOf, withAttachments } from "../../../src/chat/model/request";
import { assistant, tool, user } from "../build";

test("an attachment's fence is longer than any in it", () => {
  const text = "a\n```py\nb\n```\nand ````four````";
  expect(withAttachments("Look", [{ name: "notes", text }])).toBe(`Look\n\nnotes:\n\`\`\`\`\`\n${text}\n\`\`\`\`\``);
  expect(withAttachments("", [{ name: "plain", text: "x\n" }])).toBe("plain:\n```\nx\n```");
});

test("what failed, and calls without a result, are not sent", () => {
  const call = (id: string) => ({ id, name: "f", arguments: "{}" });
  const path = [
    user("q", null),
    assistant("failed", "q", "", { state: "failed" }),
    assistant("a", "failed", "", { calls: [call("one"), call("two")] }),
    tool("t", "a", "one", "1"),
  ];
  expect(messagesOf(" ", path)).toEqual([
    { role: "user", content: "q" },
    {
      role: "assistant",
      content: "",
      tool_calls: [{ id: "one", type: "function", function: { name: "f", arguments: "{}" } }],
    },
    { role: "tool", tool_call_id: "one", content: "1" },
  ]);
});

test("of an answer that goes on its thoughts are sent, of others none", () => {
  const path = [user("q", null), assistant("a", "q", "Well", { reasoning: "hm" })];
  const continued = requestOf(NO_SETTINGS, path, 7, true);
  expect(continued.messages.at(-1)).toEqual({ role: "assistant", content: "Well", reasoning_content: "hm" });
  expect(continued).toMatchObject({ continue_final_message: true, add_generation_prompt: false, seed: 7 });
  expect(requestOf(NO_SETTINGS, path, 7).messages.at(-1)).toEqual({ role: "assistant", content: "Well" });
});
