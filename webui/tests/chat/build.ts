/** Messages for tests, each with only what the test is about. */
import { newAnswer } from "../../src/chat/model/fresh";
import type { Answer, Message } from "../../src/chat/model/types";

let latest = 1000;

export function user(id: string, parent: string | null, content = id): Message {
  return { id, conversation: "c", parent, role: "user", createdAt: latest++, content, attachments: [] };
}

export function assistant(id: string, parent: string, content = id, answer: Partial<Answer> = {}): Message {
  const whole: Answer = { ...newAnswer("demo", 1, 0), state: "done", ...answer };
  return { ...user(id, parent, content), role: "assistant", answer: whole };
}

export function tool(id: string, parent: string, callId: string, content = id): Message {
  return { ...user(id, parent, content), role: "tool", callId };
}

export function mapOf(...messages: Message[]): Map<string, Message> {
  return new Map(messages.map((message) => [message.id, message]));
}
