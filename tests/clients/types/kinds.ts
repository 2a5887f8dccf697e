// What each path answers, in the types that OpenAI and Anthropic publish, and what this server adds to them.
// A field that is in neither is an error, and so is one that is missing, null where it must not be, or of another type.
import type Anthropic from "@anthropic-ai/sdk";
import type { ErrorResponse } from "@anthropic-ai/sdk/resources/shared";
import type OpenAI from "openai";
import type { ErrorObject } from "openai/resources/shared";

type PromptLogprobs = Array<{ [id: string]: { logprob: number; decoded_token: string } } | null>;

interface EveryChoice {
  stop_reason?: number | string | null;
  seed?: number | null;
  degraded?: true;
  token_ids?: number[];
}

declare module "openai/resources/chat/completions/completions" {
  interface ChatCompletion {
    prompt_token_ids?: number[];
    prompt_logprobs?: PromptLogprobs;
  }
  interface ChatCompletionMessage {
    reasoning_content?: string;
    reasoning?: string;
  }
  namespace ChatCompletion {
    interface Choice extends EveryChoice {}
  }
  namespace ChatCompletionChunk {
    interface Choice extends EveryChoice {
      prompt_token_ids?: number[];
    }
    namespace Choice {
      interface Delta {
        reasoning_content?: string;
        reasoning?: string;
      }
    }
  }
}

declare module "openai/resources/completions" {
  interface CompletionChoice extends EveryChoice {
    prompt_token_ids?: number[];
    prompt_logprobs?: PromptLogprobs;
  }
}

declare module "openai/resources/embeddings" {
  interface CreateEmbeddingResponse {
    id: string;
    created: number;
  }
}

declare module "openai/resources/responses/responses" {
  interface Response {
    presence_penalty: number;
    frequency_penalty: number;
    store: boolean;
  }
}

declare module "openai/resources/models" {
  interface Model {
    root: string;
    parent: string | null;
    max_model_len: number | null;
    tool_call_parser: string | null;
    reasoning_parser: string | null;
    status: { value: "unloaded" | "loading" | "loaded" | "unloading"; state?: string; failed: boolean; error?: string };
    permission: [];
    // Anthropic's
    type: "model";
    display_name: string;
    created_at: string;
    lifecycle: "active";
  }
}

// The first token of a prompt that is given back has no log probability: OpenAI sends null, and lm-eval reads it so.
type Echoed<L> = Omit<L, "token_logprobs" | "top_logprobs"> & {
  token_logprobs: Array<number | null>;
  top_logprobs: Array<{ [token: string]: number } | null>;
};
type CompletionChoice = Omit<OpenAI.CompletionChoice, "logprobs"> & {
  logprobs: Echoed<NonNullable<OpenAI.CompletionChoice["logprobs"]>> | null;
};
type Completion = Omit<OpenAI.Completion, "choices"> & { choices: CompletionChoice[] };
// Between two chunks of a stream no reason to finish is told, and usage only in the last: the types are those of the whole.
type CompletionChunk = Omit<Completion, "choices" | "usage"> & {
  choices: Array<Omit<CompletionChoice, "finish_reason"> & { finish_reason: CompletionChoice["finish_reason"] | null }>;
  usage?: OpenAI.CompletionUsage | null;
};

type Failure = { error: ErrorObject };
type Vectors<V> = Omit<OpenAI.CreateEmbeddingResponse, "data"> & {
  data: Array<Omit<OpenAI.Embedding, "embedding"> & { embedding: V }>;
};
// Anthropic's documentation has this one for 413; its types do not.
type TooLarge = { message: string; type: "request_too_large" };
type AnthropicFailure = Omit<ErrorResponse, "error"> & {
  error: (ErrorResponse["error"] | TooLarge) & { details: { error_code: string } };
};

export interface Kinds {
  error: Failure;
  chat: OpenAI.ChatCompletion;
  chat_event: OpenAI.ChatCompletionChunk | Failure;
  completion: Completion;
  completion_event: CompletionChunk | Failure;
  embeddings: Vectors<number[]> | Vectors<string>;
  models: { object: "list"; data: OpenAI.Model[]; has_more: boolean };
  model: OpenAI.Model;
  response: OpenAI.Responses.Response;
  response_event: OpenAI.Responses.ResponseStreamEvent;
  response_items: OpenAI.Responses.ResponseItemList;
  response_deleted: { id: string; object: "response"; deleted: true };
  message: Anthropic.Message;
  message_event: Anthropic.RawMessageStreamEvent | { type: "ping" } | AnthropicFailure;
  message_count: Anthropic.MessageTokensCount;
  message_error: AnthropicFailure;
}
