/** One event of a stream into the message that it makes grow. Nothing here changes its arguments. */
import { detailOf } from "../../api/client";
import type { CallDelta, ChatChunk, ErrorDetail, UsageReport } from "../../api/wire";
import type { Answer, Message, ToolCall, Usage } from "./types";

export type Read =
  { kind: "chunk"; chunk: ChatChunk } | { kind: "error"; detail: ErrorDetail } | { kind: "end" } | { kind: "unknown" };

/** What an event's data is. What this page does not know is left out: a newer server may send more. */
export function readEvent(data: string): Read {
  if (data.startsWith("[DONE]")) return { kind: "end" };
  const detail = detailOf(data);
  if (detail !== null) return { kind: "error", detail };
  try {
    const chunk = JSON.parse(data) as Partial<ChatChunk> | null;
    return Array.isArray(chunk?.choices) ? { kind: "chunk", chunk: chunk as ChatChunk } : { kind: "unknown" };
  } catch {
    return { kind: "unknown" };
  }
}

/** `message` with what `chunk` brings, which came `sinceMs` after its answer was asked for; `eventId` is the event's. */
export function grown(message: Message, chunk: ChatChunk, eventId: string | null, sinceMs: number): Message {
  const before = message.answer;
  if (before === undefined) throw new Error("only an answer grows");
  const answer: Answer = { ...before, serverId: chunk.id, model: chunk.model };
  if (eventId !== null) answer.lastEventId = eventId;
  if (chunk.usage != null) answer.usage = usageOf(chunk.usage);
  let content = message.content;
  const choice = chunk.choices.find(({ index }) => index === 0);
  if (choice !== undefined) {
    const { delta, logprobs } = choice;
    content += delta.content ?? "";
    answer.reasoning += delta.reasoning_content ?? "";
    if (delta.tool_calls !== undefined) answer.calls = delta.tool_calls.reduce(withCall, answer.calls);
    if (logprobs?.content != null && logprobs.content.length > 0) {
      const scores = logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({
        token,
        logprob,
        top: top.map((other) => ({ token: other.token, logprob: other.logprob })),
      }));
      answer.tokens = [...answer.tokens, ...scores];
    }
    if (choice.finish_reason !== null) answer.finishReason = choice.finish_reason;
    if (choice.seed != null) answer.seed = choice.seed;
    const isToken = Boolean(delta.content || delta.reasoning_content || delta.tool_calls?.length);
    if (isToken && answer.firstTokenMs === null) answer.firstTokenMs = sinceMs;
  }
  return { ...message, content, answer };
}

/** `calls` with more of the one at `delta.index`; calls come one after the other, so an index is at most the next one. */
function withCall(calls: ToolCall[], delta: CallDelta): ToolCall[] {
  const known = calls[delta.index] ?? { id: "", name: "", arguments: "" };
  const call = {
    id: delta.id ?? known.id,
    name: known.name + (delta.function?.name ?? ""),
    arguments: known.arguments + (delta.function?.arguments ?? ""),
  };
  return calls.toSpliced(delta.index, 1, call);
}

function usageOf(report: UsageReport): Usage {
  return {
    promptTokens: report.prompt_tokens,
    cachedTokens: report.prompt_tokens_details?.cached_tokens ?? 0,
    completionTokens: report.completion_tokens,
    reasoningTokens: report.completion_tokens_details?.reasoning_tokens ?? 0,
  };
}
