/** Questions to the server from the inspector: addresses below wherever the page lies, and the key that goes with them. */
import { Keys } from "../../chat/store/keys";

const keys = new Keys();

/** The key that this page sends: the chat's, as it keeps it. */
export const key = $state({ value: keys.value ?? "" });

export function setKey(value: string): void {
  key.value = value.trim();
  if (key.value) keys.give(key.value, keys.state.isRemembered);
  else keys.forget();
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
