/** What a conversation is made of. Everything here is plain data: it goes into IndexedDB and into exported files as it is. */

export type Id = string;
export type Role = "user" | "assistant" | "tool";

/** A conversation: a tree of messages of which one path is shown. */
export interface Conversation {
  id: Id;
  title: string;
  /** False until somebody has named it: then it follows its first question. */
  isNamed: boolean;
  createdAt: number; // ms since 1970
  changedAt: number;
  settings: Settings;
  /** The last message of the path that is shown; null while it is empty. */
  leaf: Id | null;
}

/** A message and where it stands in the tree: those with the same parent are siblings, in the order of `createdAt`. */
export interface Message {
  id: Id;
  conversation: Id;
  parent: Id | null;
  role: Role;
  createdAt: number;
  content: string;
  /** Long pastes and files, sent behind the text. */
  attachments: Attachment[];
  /** Of an assistant's message only. */
  answer?: Answer;
  /** Of a tool's message: the call that it answers. */
  callId?: string;
}

export interface Attachment {
  name: string;
  text: string;
}

/** How far an answer is. `cut`: the page was closed or reloaded, or the connection lost, before its end. */
export type AnswerState = "waiting" | "streaming" | "done" | "stopped" | "cut" | "failed";

/** An assistant's answer. Times and usage are those of the last time it was asked for, where it was continued. */
export interface Answer {
  state: AnswerState;
  model: string;
  reasoning: string;
  calls: ToolCall[];
  /** With `logprobs` asked for: each token with its alternatives. */
  tokens: TokenScore[];
  finishReason: string | null;
  trouble: Trouble | null;
  usage: Usage | null;
  seed: number | null;
  /** Name of the answer at the server, by which its stream can be asked for again. */
  serverId: string | null;
  lastEventId: string | null;
  startedAt: number; // ms since 1970
  firstTokenMs: number | null;
  endedMs: number | null; // both since `startedAt`
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string; // JSON as the model has written it
}

export interface TokenScore {
  token: string;
  logprob: number;
  top: { token: string; logprob: number }[];
}

export interface Usage {
  promptTokens: number;
  cachedTokens: number;
  completionTokens: number;
  reasoningTokens: number;
}

/** What a page knows of an answer that is being made; it is kept nowhere. */
export interface Status {
  phase: "waiting" | "streaming" | "retrying" | "reconnecting";
  /** When it is asked for again, in ms since 1970; null where it is not waited for. */
  retryAt: number | null;
  /** How often it was asked for, or reconnected, without anything new. */
  tries: number;
  /** False where another tab makes it, and this one sees it grow. */
  isOurs: boolean;
}

/** What is wrong with a conversation's settings, so that nothing can be asked with them. */
export interface Fault {
  field: "schema" | "tools";
  /** Which tool; null for a schema. */
  index: number | null;
  message: string;
}

/** A model of the server, as `GET /v1/models` tells. */
export interface Model {
  id: string;
  contextLength: number | null; // in tokens; null while it is not loaded
  hasTools: boolean;
  /** Whether its thoughts are told from its answer, so that they can be switched off. */
  hasReasoning: boolean;
  isLoaded: boolean;
}

/** What went wrong, by what can be done about it; `message` is the server's own sentence. */
export type Trouble =
  | { kind: "queue_full"; message: string; retryAt: number } // ms since 1970
  | { kind: "key"; message: string }
  | { kind: "context"; message: string }
  | { kind: "limit"; message: string; retryAt: number | null; mayRetry: boolean }
  | { kind: "loading"; message: string; retryAt: number }
  | { kind: "connection"; message: string }
  | { kind: "refused"; message: string; param: string | null }
  | { kind: "server"; message: string };

/** What is sent with each question of a conversation; null and empty: the server's default. */
export interface Settings {
  model: string | null;
  systemPrompt: string;
  temperature: number | null;
  topP: number | null;
  topK: number | null;
  minP: number | null;
  presencePenalty: number | null;
  frequencyPenalty: number | null;
  repetitionPenalty: number | null;
  maxTokens: number | null;
  seed: number | null;
  stop: string[];
  thinking: boolean | null;
  /** A JSON schema that answers must fit, as text. */
  schema: string;
  tools: ToolDefinition[];
  toolChoice: "auto" | "none" | "required";
  /** How many alternatives of each token are asked for; null: no log probabilities at all. */
  topLogprobs: number | null;
}

export interface ToolDefinition {
  /** The definition as its author wrote it: JSON with `name`, `description`, `parameters`. */
  source: string;
  /** Answered by the page itself where that is "calculator". */
  runs: "by hand" | "calculator";
  isOn: boolean;
}
