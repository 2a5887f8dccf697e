/** Questions to the server from the inspector: addresses below wherever the page lies, and the key that goes with them. */

const KEY_NAME = "novainfer.key";

/** The key that this page sends; the chat has the same. It stays in this browser. */
export const key = $state({ value: read() });

function read(): string {
  try {
    return localStorage.getItem(KEY_NAME) ?? "";
  } catch {
    return ""; // a browser that keeps nothing
  }
}

export function setKey(value: string): void {
  key.value = value.trim();
  try {
    if (key.value) localStorage.setItem(KEY_NAME, key.value);
    else localStorage.removeItem(KEY_NAME);
  } catch {
    // it is known until the page is closed
  }
}

/** `path` below the folder that the page is in: `/inspector` and `/below/some/root/inspector` work alike. */
export function address(path: string): string {
  const root = location.pathname.replace(/\/inspector\/?$/, "/");
  return new URL(path, new URL(root, location.origin)).href;
}

export function headers(): Record<string, string> {
  return key.value ? { authorization: `Bearer ${key.value}` } : {};
}

/** What the server said when it said no. */
export class Refusal extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly retryAfter_s: number | null = null,
  ) {
    super(message);
  }
}

export async function refusalOf(reply: Response): Promise<Refusal> {
  const body: unknown = await reply.json().catch(() => null);
  const said = (body as { error?: { message?: string } } | null)?.error?.message ?? reply.statusText;
  const after = Number(reply.headers.get("retry-after"));
  return new Refusal(reply.status, said, after > 0 ? after : null);
}

export async function ask<T>(path: string, init: RequestInit = {}): Promise<T> {
  const reply = await fetch(address(path), { ...init, headers: { ...headers(), ...init.headers } });
  if (!reply.ok) throw await refusalOf(reply);
  return (await reply.json()) as T;
}

export const post = <T>(path: string, body: unknown): Promise<T> =>
  ask<T>(path, { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } });
