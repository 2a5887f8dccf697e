/** Tool definitions and calls as people read them. */
import type { ToolDefinition } from "../model/types";

/** The name that a definition gives; null while it is no JSON, or has none. OpenAI's form, with a `function` around it, counts too. */
export function nameOf(source: string): string | null {
  try {
    const value: unknown = JSON.parse(source);
    const inner = field(value, "function") ?? value;
    const name = field(inner, "name");
    return typeof name === "string" && name !== "" ? name : null;
  } catch {
    return null;
  }
}

export function toolNamed(tools: readonly ToolDefinition[], name: string): ToolDefinition | null {
  return tools.find((tool) => nameOf(tool.source) === name) ?? null;
}

/** JSON with its lines; what is no JSON (or not yet) stays as it is. */
export function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function field(value: unknown, key: string): unknown {
  return typeof value === "object" && value !== null ? (value as Record<string, unknown>)[key] : undefined;
}
