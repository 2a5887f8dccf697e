import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { Chats } from "../../../src/chat/store/chats.svelte";

/** A server of two models, which wants `key` if it is given, and ends each answer after a word. */
function server(key: string | null = null) {
  const asked: { model?: string }[] = [];
  const fetcher = (url: string | URL | Request, init: RequestInit = {}): Promise<Response> => {
    const given = new Headers(init.headers).get("authorization");
    if (key !== null && given !== `Bearer ${key}`) {
      return Promise.resolve(Response.json({ error: { message: "a key", code: "invalid_api_key" } }, { status: 401 }));
    }
    if (String(url).endsWith("v1/models")) {
      return Promise.resolve(Response.json({ data: [{ id: "first" }, { id: "second" }] }));
    }
    asked.push(JSON.parse(init.body as string) as { model?: string });
    const chunk = {
      id: "1",
      model: "first",
      choices: [{ index: 0, delta: { content: "{" }, finish_reason: "length" }],
    };
    return Promise.resolve(new Response(`data: ${JSON.stringify(chunk)}\n\ndata: [DONE]\n\n`));
  };
  return { asked, fetcher: fetcher as typeof fetch };
}

let chats: Chats;

async function begin(fetcher: typeof fetch): Promise<void> {
  chats = new Chats("http://localhost/", fetcher);
  await chats.start(); // nothing is kept: there is no IndexedDB here
}

const answer = () => chats.path.at(-1)!.message;
const ended = (state: string) => vi.waitFor(() => expect(answer().answer!.state).toBe(state));

beforeEach(() => localStorage.clear());
afterEach(() => chats.close());

test("an answer that was too long goes on, but for one that a schema holds", async () => {
  await begin(server().fetcher);
  chats.send("Well?");
  await ended("done");
  expect(chats.canContinue(answer().id)).toBe(true);
  chats.set({ schema: '{"type": "object"}' });
  expect(chats.canContinue(answer().id)).toBe(false);
});

test("what was asked without a key is asked again with it, of a model", async () => {
  const { asked, fetcher } = server("k");
  await begin(fetcher);
  chats.send("Well?");
  await ended("failed");
  expect(answer().answer!.trouble!.kind).toBe("key");
  chats.giveKey("k", false);
  await ended("done");
  expect(asked.map(({ model }) => model)).toEqual(["first"]);
});
