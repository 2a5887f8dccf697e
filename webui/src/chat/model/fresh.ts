/** Conversations, messages and answers as they begin. */
import type { Answer, Attachment, Conversation, Id, Message, Settings, ToolDefinition } from "./types";

export const NO_SETTINGS: Settings = {
  model: null,
  systemPrompt: "",
  temperature: null,
  topP: null,
  topK: null,
  minP: null,
  presencePenalty: null,
  frequencyPenalty: null,
  repetitionPenalty: null,
  maxTokens: null,
  seed: null,
  stop: [],
  thinking: null,
  schema: "",
  tools: [],
  toolChoice: "auto",
  topLogprobs: null,
};

/** The tool that the page answers by itself. */
export const CALCULATOR: ToolDefinition = {
  source: JSON.stringify(
    {
      name: "calculate",
      description: "Evaluate an arithmetic expression: + - * / % ^, parentheses, sqrt, abs, round, pi, e.",
      parameters: {
        type: "object",
        properties: { expression: { type: "string", description: "For example: (3 + 4) * sqrt(2)" } },
        required: ["expression"],
      },
    },
    null,
    2,
  ),
  runs: "calculator",
  isOn: true,
};

export function newConversation(id: Id, now: number, settings: Settings): Conversation {
  return { id, title: "", isNamed: false, createdAt: now, changedAt: now, settings, leaf: null };
}

export function newMessage(
  place: Pick<Message, "id" | "conversation" | "parent" | "role" | "createdAt">,
  content: string,
  attachments: Attachment[] = [],
): Message {
  return { ...place, content, attachments };
}

export function newAnswer(model: string, seed: number | null, now: number): Answer {
  return {
    state: "waiting",
    model,
    reasoning: "",
    calls: [],
    tokens: [],
    finishReason: null,
    trouble: null,
    usage: null,
    seed,
    serverId: null,
    lastEventId: null,
    startedAt: now,
    firstTokenMs: null,
    endedMs: null,
  };
}
