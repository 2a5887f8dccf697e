/** Conversations as the text of a file, and back: each field is looked at by name, and what has a fault is refused as a whole. */
import { CALCULATOR, NO_SETTINGS } from "../model/fresh";
import type {
  Answer,
  Attachment,
  Conversation,
  Id,
  Message,
  Settings,
  TokenScore,
  ToolCall,
  ToolDefinition,
  Usage,
} from "../model/types";

export const FORMAT = "novainfer.chats";
export const VERSION = 1;

export interface Archived {
  conversation: Conversation;
  messages: Message[];
}

/** What is wrong with a file, and where: `$.conversations[0].messages[3].role`. */
export class Unfit extends Error {
  constructor(
    readonly path: string,
    message: string,
  ) {
    super(message);
  }
}

export function archiveOf(all: readonly Archived[], now: number): string {
  const conversations = all.map(({ conversation, messages }) => ({ ...conversation, messages }));
  return JSON.stringify({ format: FORMAT, version: VERSION, exportedAt: now, conversations }, null, 2);
}

/** What is in `text`, under ids of `newId`; answers that were being made are cut. Throws `Unfit`. */
export function unarchived(text: string, newId: () => Id): Archived[] {
  let parsed: unknown;
  try {
    parsed = JSON.parse(text);
  } catch (error) {
    throw new Unfit("$", `not JSON: ${(error as Error).message}`);
  }
  const file = record(parsed, "$");
  if (file.format !== FORMAT)
    throw new Unfit("$.format", `must be ${JSON.stringify(FORMAT)}: the file is of something else`);
  if (file.version !== VERSION) {
    throw new Unfit("$.version", `must be ${VERSION}: the file was written by another version of this page`);
  }
  return list(file.conversations, "$.conversations", (one, path) => archivedIn(one, path, newId));
}

function archivedIn(value: unknown, path: string, newId: () => Id): Archived {
  const given = record(value, path);
  const id = newId();
  const messages = list(given.messages, `${path}.messages`, messageIn);
  const ids = new Map<Id, Id>();
  messages.forEach((message, at) => {
    if (ids.has(message.id)) throw new Unfit(`${path}.messages[${at}].id`, "is used twice");
    ids.set(message.id, newId());
  });
  const renamed = messages.map((message, at) => {
    const parent = message.parent === null ? null : ids.get(message.parent);
    if (parent === undefined) throw new Unfit(`${path}.messages[${at}].parent`, "is no message of this conversation");
    return { ...message, id: ids.get(message.id)!, conversation: id, parent };
  });
  refuseCircles(renamed, path);
  const oldLeaf = orNull(text)(given.leaf, `${path}.leaf`);
  const leaf = oldLeaf === null ? null : ids.get(oldLeaf);
  if (leaf === undefined) throw new Unfit(`${path}.leaf`, "is no message of this conversation");
  const conversation = {
    id,
    title: text(given.title, `${path}.title`),
    isNamed: flag(given.isNamed, `${path}.isNamed`),
    createdAt: number(given.createdAt, `${path}.createdAt`),
    changedAt: number(given.changedAt, `${path}.changedAt`),
    settings: settingsIn(given.settings, `${path}.settings`),
    leaf,
  };
  return { conversation, messages: renamed };
}

/** A message that is its own ancestor would be on no path, and on every walk for ever. */
function refuseCircles(messages: readonly Message[], path: string): void {
  const parents = new Map(messages.map(({ id, parent }) => [id, parent]));
  const sound = new Set<Id>();
  messages.forEach((message, at) => {
    const walked = new Set<Id>();
    for (let id: Id | null = message.id; id !== null && !sound.has(id); id = parents.get(id) ?? null) {
      if (walked.has(id)) throw new Unfit(`${path}.messages[${at}].parent`, "leads back to the message itself");
      walked.add(id);
    }
    walked.forEach((id) => sound.add(id));
  });
}

function messageIn(value: unknown, path: string): Message {
  const given = record(value, path);
  const role = oneOf("user", "assistant", "tool")(given.role, `${path}.role`);
  const message: Message = {
    id: text(given.id, `${path}.id`),
    conversation: "", // its new one
    parent: orNull(text)(given.parent, `${path}.parent`),
    role,
    createdAt: number(given.createdAt, `${path}.createdAt`),
    content: text(given.content, `${path}.content`),
    attachments: list(given.attachments, `${path}.attachments`, attachmentIn),
  };
  if (role === "assistant") message.answer = answerIn(given.answer, `${path}.answer`);
  if (role === "tool") message.callId = text(given.callId, `${path}.callId`);
  return message;
}

function attachmentIn(value: unknown, path: string): Attachment {
  const given = record(value, path);
  return { name: text(given.name, `${path}.name`), text: text(given.text, `${path}.text`) };
}

function answerIn(value: unknown, path: string): Answer {
  const given = record(value, path);
  const state = oneOf("waiting", "streaming", "done", "stopped", "cut", "failed")(given.state, `${path}.state`);
  return {
    state: state === "waiting" || state === "streaming" ? "cut" : state,
    model: text(given.model, `${path}.model`),
    reasoning: text(given.reasoning, `${path}.reasoning`),
    calls: list(given.calls, `${path}.calls`, callIn),
    tokens: list(given.tokens, `${path}.tokens`, scoreIn),
    finishReason: orNull(text)(given.finishReason, `${path}.finishReason`),
    trouble: null, // of another time, and perhaps of another server
    usage: orNull(usageIn)(given.usage, `${path}.usage`),
    seed: orNull(number)(given.seed, `${path}.seed`),
    serverId: null,
    lastEventId: null,
    startedAt: number(given.startedAt, `${path}.startedAt`),
    firstTokenMs: orNull(number)(given.firstTokenMs, `${path}.firstTokenMs`),
    endedMs: orNull(number)(given.endedMs, `${path}.endedMs`),
  };
}

function callIn(value: unknown, path: string): ToolCall {
  const given = record(value, path);
  return {
    id: text(given.id, `${path}.id`),
    name: text(given.name, `${path}.name`),
    arguments: text(given.arguments, `${path}.arguments`),
  };
}

function scoreIn(value: unknown, path: string): TokenScore {
  const given = record(value, path);
  const alone = (one: unknown, where: string) => {
    const { token, logprob } = record(one, where);
    return { token: text(token, `${where}.token`), logprob: number(logprob, `${where}.logprob`) };
  };
  return { ...alone(given, path), top: list(given.top, `${path}.top`, alone) };
}

function usageIn(value: unknown, path: string): Usage {
  const given = record(value, path);
  return {
    promptTokens: number(given.promptTokens, `${path}.promptTokens`),
    cachedTokens: number(given.cachedTokens, `${path}.cachedTokens`),
    completionTokens: number(given.completionTokens, `${path}.completionTokens`),
    reasoningTokens: number(given.reasoningTokens, `${path}.reasoningTokens`),
  };
}

function settingsIn(value: unknown, path: string): Settings {
  const given = record(value, path);
  const optional = (name: keyof Settings) => orNull(number)(given[name], `${path}.${name}`);
  return {
    ...NO_SETTINGS,
    model: orNull(text)(given.model, `${path}.model`),
    systemPrompt: text(given.systemPrompt, `${path}.systemPrompt`),
    temperature: optional("temperature"),
    topP: optional("topP"),
    topK: optional("topK"),
    minP: optional("minP"),
    presencePenalty: optional("presencePenalty"),
    frequencyPenalty: optional("frequencyPenalty"),
    repetitionPenalty: optional("repetitionPenalty"),
    maxTokens: optional("maxTokens"),
    seed: optional("seed"),
    stop: list(given.stop, `${path}.stop`, text),
    thinking: orNull(flag)(given.thinking, `${path}.thinking`),
    schema: text(given.schema, `${path}.schema`),
    tools: list(given.tools, `${path}.tools`, toolIn),
    toolChoice: oneOf("auto", "none", "required")(given.toolChoice, `${path}.toolChoice`),
    topLogprobs: optional("topLogprobs"),
  };
}

function toolIn(value: unknown, path: string): ToolDefinition {
  const given = record(value, path);
  return {
    source: text(given.source, `${path}.source`),
    runs: oneOf("by hand", CALCULATOR.runs)(given.runs, `${path}.runs`),
    isOn: flag(given.isOn, `${path}.isOn`),
  };
}

type Check<T> = (value: unknown, path: string) => T;

function record(value: unknown, path: string): Record<string, unknown> {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw wrong(value, path, "an object");
  return value as Record<string, unknown>;
}

function list<T>(value: unknown, path: string, each: Check<T>): T[] {
  if (!Array.isArray(value)) throw wrong(value, path, "a list");
  return value.map((one: unknown, at) => each(one, `${path}[${at}]`));
}

function text(value: unknown, path: string): string {
  if (typeof value !== "string") throw wrong(value, path, "a text");
  return value;
}

function number(value: unknown, path: string): number {
  if (typeof value !== "number" || !Number.isFinite(value)) throw wrong(value, path, "a number");
  return value;
}

function flag(value: unknown, path: string): boolean {
  if (typeof value !== "boolean") throw wrong(value, path, "true or false");
  return value;
}

function orNull<T>(check: Check<T>): Check<T | null> {
  return (value, path) => (value === null ? null : check(value, path));
}

function oneOf<T extends string>(...words: T[]): Check<T> {
  return (value, path) => {
    if (!words.includes(value as T))
      throw wrong(value, path, `one of ${words.map((word) => JSON.stringify(word)).join(", ")}`);
    return value as T;
  };
}

function wrong(value: unknown, path: string, wanted: string): Unfit {
  const shown = value === undefined ? "missing" : `not ${(JSON.stringify(value) ?? typeof value).slice(0, 40)}`;
  return new Unfit(path, `must be ${wanted}, ${value === undefined ? "and is " : ""}${shown}`);
}
