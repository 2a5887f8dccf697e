/** What the server's API gives, as far as this page reads it. */

export interface ErrorDetail {
  message: string;
  type: string;
  param: string | null;
  code: string | null;
}

/** The body of every answer that is no success, and the data of an event that ends a stream early. */
export interface ErrorBody {
  error: ErrorDetail;
}

export interface ModelCard {
  id: string;
  max_model_len: number | null; // null while it is not loaded
  tool_call_parser: string | null;
  reasoning_parser: string | null;
  status?: { value: "unloaded" | "loading" | "loaded" | "unloading" };
}

export interface ModelList {
  data: ModelCard[];
}

export interface ChatChunk {
  id: string;
  model: string;
  choices: ChoiceChunk[]; // empty in the one with the usage
  usage?: UsageReport | null;
}

export interface ChoiceChunk {
  index: number;
  delta: ChoiceDelta;
  logprobs?: { content: TokenLogprob[] | null } | null;
  finish_reason: string | null;
  seed?: number | null; // with the finish reason
}

export interface ChoiceDelta {
  role?: string;
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: CallDelta[];
}

/** More of a call: its id and name first, then its arguments in pieces. */
export interface CallDelta {
  index: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}

export interface TokenLogprob {
  token: string;
  logprob: number;
  top_logprobs: { token: string; logprob: number }[];
}

export interface UsageReport {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number } | null;
  completion_tokens_details?: { reasoning_tokens?: number } | null;
}

/** The body of `POST /v1/chat/completions`. */
export interface ChatRequest {
  model?: string;
  messages: ChatMessage[];
  stream: true;
  stream_options: { include_usage: true };
  seed: number;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  repetition_penalty?: number;
  max_completion_tokens?: number;
  stop?: string[];
  logprobs?: true;
  top_logprobs?: number;
  response_format?: { type: "json_schema"; json_schema: { name: string; strict: true; schema: object } };
  tools?: { type: "function"; function: object }[];
  tool_choice?: "auto" | "none" | "required";
  chat_template_kwargs?: { enable_thinking: boolean };
  continue_final_message?: true;
  add_generation_prompt?: false;
}

export type ChatMessage =
  | { role: "system" | "user"; content: string }
  | {
      role: "assistant";
      content: string;
      reasoning_content?: string;
      tool_calls?: { id: string; type: "function"; function: { name: string; arguments: string } }[];
    }
  | { role: "tool"; tool_call_id: string; content: string };
