/** What went wrong, told by what can be done about it: by the status and the code of the server's error, and its headers. */
import type { Refusal } from "../../api/client";
import type { ErrorDetail } from "../../api/wire";
import type { Trouble } from "./types";

const RETRY_MS = 2000; // the server's own, where it says nothing better (RETRY_AFTER_S)

type Kind = Trouble["kind"];

const KIND_OF_CODE: Record<string, Kind> = {
  server_is_overloaded: "queue_full",
  too_many_connections: "queue_full",
  model_loading: "loading",
  model_unavailable: "loading",
  draining: "loading",
  engine_closed: "loading",
  context_length_exceeded: "context",
  payload_too_large: "context",
  invalid_api_key: "key",
  permission_denied: "key",
  too_many_requests: "limit",
  rate_limit_exceeded: "limit",
  insufficient_quota: "limit",
  tokens: "limit",
};

const KIND_OF_STATUS: Record<number, Kind> = { 401: "key", 403: "key", 413: "context", 429: "limit", 503: "loading" };

/** Codes of a server that goes down: what it was making goes on when it comes back, if it keeps a journal. */
const LEAVING: ReadonlySet<string> = new Set(["draining", "engine_closed", "engine_dead"]);

/** `now`: ms since 1970. */
export function troubleOf(refusal: Omit<Refusal, "requestId">, now: number): Trouble {
  const { status, detail, retryAfterMs, mayRetry } = refusal;
  const message = detail?.message ?? `HTTP ${status}`;
  const kind = KIND_OF_CODE[detail?.code ?? ""] ?? KIND_OF_STATUS[status] ?? (status < 500 ? "refused" : "server");
  const retryAt = now + (retryAfterMs ?? RETRY_MS);
  switch (kind) {
    case "queue_full":
    case "loading":
      return { kind, message, retryAt };
    case "limit":
      return { kind, message, retryAt: retryAfterMs === null ? null : retryAt, mayRetry };
    case "refused":
      return { kind, message, param: detail?.param ?? null };
    default:
      return { kind, message };
  }
}

/** What an event that ends a stream early means; it has no status and no headers. */
export function troubleInStream(detail: ErrorDetail, now: number): Trouble {
  const status = detail.type === "invalid_request_error" ? 400 : 500;
  return troubleOf({ status, detail, retryAfterMs: null, mayRetry: true }, now);
}

/** Whether the server that ends a stream so is going down. */
export function isLeaving(detail: ErrorDetail): boolean {
  return LEAVING.has(detail.code ?? "");
}

/** When to ask again by itself, in ms since 1970; null where that would be in vain, or takes longer than one waits for. */
export function retryOf(trouble: Trouble, now: number): number | null {
  if (trouble.kind === "limit" && !trouble.mayRetry) return null;
  if (trouble.kind !== "queue_full" && trouble.kind !== "loading" && trouble.kind !== "limit") return null;
  return trouble.retryAt !== null && trouble.retryAt - now <= PATIENCE_MS ? trouble.retryAt : null;
}

const PATIENCE_MS = 120_000; // what OpenAI's own clients wait at most
