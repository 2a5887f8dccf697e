/** A conversation as the body of `POST /v1/chat/completions`, and what of its settings could not be sent. */
import type { ChatMessage, ChatRequest } from "../../api/wire";
import type { Attachment, Fault, Message, Settings, ToolDefinition } from "./types";

/** The request for the answer behind `path`; `continued`: for more of the answer that `path` ends with. */
export function requestOf(settings: Settings, path: readonly Message[], seed: number, continued = false): ChatRequest {
  const body: ChatRequest = {
    messages: messagesOf(settings.systemPrompt, path, continued),
    stream: true,
    stream_options: { include_usage: true },
    seed,
  };
  if (settings.model !== null) body.model = settings.model;
  if (settings.temperature !== null) body.temperature = settings.temperature;
  if (settings.topP !== null) body.top_p = settings.topP;
  if (settings.topK !== null) body.top_k = settings.topK;
  if (settings.minP !== null) body.min_p = settings.minP;
  if (settings.presencePenalty !== null) body.presence_penalty = settings.presencePenalty;
  if (settings.frequencyPenalty !== null) body.frequency_penalty = settings.frequencyPenalty;
  if (settings.repetitionPenalty !== null) body.repetition_penalty = settings.repetitionPenalty;
  if (settings.maxTokens !== null) body.max_completion_tokens = settings.maxTokens;
  if (settings.stop.length > 0) body.stop = settings.stop;
  if (settings.thinking !== null) body.chat_template_kwargs = { enable_thinking: settings.thinking };
  if (settings.topLogprobs !== null) {
    body.logprobs = true;
    body.top_logprobs = settings.topLogprobs;
  }
  if (settings.schema.trim() !== "") {
    const schema = JSON.parse(settings.schema) as object;
    body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  }
  const tools = settings.tools.filter(({ isOn }) => isOn);
  if (tools.length > 0) {
    body.tools = tools.map((tool) => ({ type: "function", function: functionOf(tool) }));
    body.tool_choice = settings.toolChoice;
  }
  if (continued) {
    body.continue_final_message = true;
    body.add_generation_prompt = false;
  }
  return body;
}

/** What a path of messages is for the server. Thoughts are left out: models are trained on answers without them. */
export function messagesOf(systemPrompt: string, path: readonly Message[], continued = false): ChatMessage[] {
  const sent: ChatMessage[] = systemPrompt.trim() === "" ? [] : [{ role: "system", content: systemPrompt }];
  const answered = new Set(path.map(({ callId }) => callId));
  path.forEach((message, at) => {
    switch (message.role) {
      case "user":
        sent.push({ role: "user", content: withAttachments(message.content, message.attachments) });
        return;
      case "tool":
        sent.push({ role: "tool", tool_call_id: message.callId ?? "", content: message.content });
        return;
      case "assistant": {
        // A call that has no result is left out: templates and other servers take each call to have one.
        const calls = message.answer?.calls.filter(({ id }) => answered.has(id)) ?? [];
        if (message.content === "" && calls.length === 0) return; // it failed, or said nothing
        const isContinued = continued && at === path.length - 1;
        sent.push({
          role: "assistant",
          content: message.content,
          // Of the answer that goes on, what it thought is a part: without it the model would think again.
          ...(isContinued && message.answer?.reasoning ? { reasoning_content: message.answer.reasoning } : {}),
          ...(calls.length > 0
            ? {
                tool_calls: calls.map(({ id, name, arguments: given }) => ({
                  id,
                  type: "function" as const,
                  function: { name, arguments: given },
                })),
              }
            : {}),
        });
      }
    }
  });
  return sent;
}

/** A text with its attachments behind it, each in a fence that is longer than any in it. */
export function withAttachments(text: string, attachments: readonly Attachment[]): string {
  const fenced = attachments.map((attachment) => {
    const longest = Math.max(2, ...[...attachment.text.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    const end = attachment.text.endsWith("\n") ? "" : "\n";
    return `${attachment.name}:\n${fence}\n${attachment.text}${end}${fence}`;
  });
  return [text, ...fenced].filter((part) => part !== "").join("\n\n");
}

/** What is wrong with the schema and the tools that are switched on; nothing can be asked until it is mended. */
export function faultsOf(settings: Settings): Fault[] {
  const faults: Fault[] = [];
  if (settings.schema.trim() !== "") {
    const message = objectFault(settings.schema);
    if (message !== null) faults.push({ field: "schema", index: null, message });
  }
  const names = new Set<string>();
  settings.tools.forEach((tool, index) => {
    if (!tool.isOn) return;
    const message = toolFault(tool, names);
    if (message !== null) faults.push({ field: "tools", index, message });
  });
  return faults;
}

/** The name of a tool; null where its definition has none. */
export function nameOf(tool: ToolDefinition): string | null {
  try {
    const { name } = functionOf(tool) as { name?: unknown };
    return typeof name === "string" ? name : null;
  } catch {
    return null;
  }
}

/** The function that a definition tells of: bare, or as it stands in a request, behind `function`. */
function functionOf(tool: ToolDefinition): object {
  const parsed = JSON.parse(tool.source) as { function?: object };
  return typeof parsed.function === "object" && parsed.function !== null ? parsed.function : parsed;
}

function objectFault(source: string): string | null {
  try {
    const value: unknown = JSON.parse(source);
    return typeof value === "object" && value !== null && !Array.isArray(value) ? null : "It must be a JSON object";
  } catch (error) {
    return `It is not JSON: ${(error as Error).message}`;
  }
}

function toolFault(tool: ToolDefinition, names: Set<string>): string | null {
  const fault = objectFault(tool.source);
  if (fault !== null) return fault;
  const given = functionOf(tool) as { name?: unknown; description?: unknown; parameters?: unknown };
  if (typeof given.name !== "string" || !/^[A-Za-z0-9_-]{1,64}$/.test(given.name)) {
    return "name must be 1 to 64 letters, digits, _ or -";
  }
  if (names.has(given.name)) return `name ${JSON.stringify(given.name)} is used twice`;
  names.add(given.name);
  if (given.description !== undefined && typeof given.description !== "string") return "description must be a string";
  const { parameters } = given;
  const isObject = typeof parameters === "object" && parameters !== null && !Array.isArray(parameters);
  return parameters === undefined || isObject ? null : "parameters must be a JSON schema, which is an object";
}
