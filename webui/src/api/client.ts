/** The server's API, by addresses relative to the page: below any `--root-path`, on any port. */
import { eventsOf, type ServerEvent } from "./sse";
import type { ChatRequest, ErrorBody, ErrorDetail, ModelCard, ModelList } from "./wire";

/** What an answer to a request says when it is no success. */
export interface Refusal {
  status: number;
  detail: ErrorDetail | null; // null: it is not from this server, but from something in front of it
  retryAfterMs: number | null;
  /** False where the server says that trying again is in vain. */
  mayRetry: boolean;
  /** The request's name in the server's log. */
  requestId: string | null;
}

export class Refused extends Error {
  constructor(readonly refusal: Refusal) {
    super(refusal.detail?.message ?? `HTTP ${refusal.status}`);
  }
}

export type Events = AsyncGenerator<ServerEvent[], void>;

/** Where the server is, for a page at `href`: the folder of the page, or of `inspector` in it. Ends with a slash. */
export function baseOf(href: string): string {
  const url = new URL(href);
  const path = url.pathname.replace(/\/inspector\/?$/, "/");
  return url.origin + path.slice(0, path.lastIndexOf("/") + 1);
}

export class Client {
  readonly #base: string;
  readonly #key: () => string | null;
  readonly #fetch: typeof fetch;

  /** `key` is asked at each request; all throw `Refused`, or a `TypeError` where there is no connection. */
  constructor(base: string, key: () => string | null, fetcher: typeof fetch = (...request) => fetch(...request)) {
    this.#base = base;
    this.#key = key;
    this.#fetch = fetcher;
  }

  async models(): Promise<ModelCard[]> {
    const response = await this.#send("v1/models", {});
    return ((await response.json()) as ModelList).data;
  }

  /** The events of an answer; to abort is to cancel it, where the server keeps no journal. */
  async chat(body: ChatRequest, signal: AbortSignal): Promise<Events> {
    const headers = { "content-type": "application/json" };
    return this.#stream("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  /** The events of an answer behind `lastEventId`, from a server that keeps a journal. */
  async resume(serverId: string, lastEventId: string, signal: AbortSignal): Promise<Events> {
    const headers = { "last-event-id": lastEventId };
    return this.#stream(`v1/chat/completions/${encodeURIComponent(serverId)}`, { headers, signal });
  }

  /** End an answer that would go on without its client. */
  async cancel(serverId: string): Promise<void> {
    await this.#send(`v1/requests/${encodeURIComponent(serverId)}/cancel`, { method: "POST", keepalive: true });
  }

  async #stream(path: string, request: RequestInit): Promise<Events> {
    const response = await this.#send(path, request);
    if (response.body === null) throw new TypeError("an answer without a body");
    return eventsOf(response.body);
  }

  async #send(path: string, request: RequestInit): Promise<Response> {
    const headers = new Headers(request.headers);
    const key = this.#key();
    if (key !== null) headers.set("authorization", `Bearer ${key}`);
    const response = await this.#fetch(this.#base + path, { ...request, headers });
    if (response.ok) return response;
    throw new Refused({
      status: response.status,
      detail: detailOf(await response.text()),
      retryAfterMs: retryAfterOf(response.headers),
      mayRetry: response.headers.get("x-should-retry") !== "false",
      requestId: response.headers.get("x-request-id"),
    });
  }
}

/** The server's own error in `text`; null where it is something else, such as the page of a proxy. */
export function detailOf(text: string): ErrorDetail | null {
  try {
    const { error } = JSON.parse(text) as Partial<ErrorBody>;
    return typeof error?.message === "string" ? error : null;
  } catch {
    return null;
  }
}

/** How long to wait, in ms: `retry-after-ms`, or `retry-after` in seconds. */
function retryAfterOf(headers: Headers): number | null {
  for (const [name, unit] of [
    ["retry-after-ms", 1],
    ["retry-after", 1000],
  ] as const) {
    const value = headers.get(name);
    if (value !== null && value.trim() !== "" && Number.isFinite(Number(value))) return Number(value) * unit;
  }
  return null;
}
