// openai-node: answers, streams, structured output, tools and responses.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const require = createRequire(`${process.env.CLIENT_HOME}/`);
const OpenAI = require("openai").default;
const { zodResponseFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const [demo, tools] = process.argv.slice(2);
const client = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const sum = [{ role: "user", content: "What is 7 + 5?" }];

const plain = client(demo);
const ids = [];
for await (const model of plain.models.list()) ids.push(model.id);
assert.deepEqual(ids, ["demo"]);
const whole = await plain.chat.completions.create({ model: "demo", messages: sum, temperature: 0 });
const text = whole.choices[0].message.content;
assert.match(text, /12/);
const stream = plain.chat.completions.stream({
  model: "demo",
  messages: sum,
  temperature: 0,
  stream_options: { include_usage: true },
});
assert.equal(await stream.finalContent(), text);
assert.equal((await stream.totalUsage()).completion_tokens, whole.usage.completion_tokens);
const Found = z.object({ answer: z.number().int(), is_even: z.boolean() });
const parsed = await plain.chat.completions.parse({
  model: "demo",
  messages: sum,
  temperature: 0,
  max_completion_tokens: 60,
  response_format: zodResponseFormat(Found, "found"),
});
assert.equal(typeof parsed.choices[0].message.parsed.answer, "number");
await assert.rejects(
  plain.chat.completions.create({ model: "demo", messages: sum, temperature: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature" && error.requestID !== null,
);

const asked = [];
const runner = client(tools).chat.completions.runTools({
  model: "fake",
  stream: true,
  messages: [{ role: "user", content: "Paris?" }],
  tools: [
    {
      type: "function",
      function: {
        name: "weather",
        parameters: { type: "object", properties: { city: { type: "string" } } },
        parse: JSON.parse,
        function: ({ city }) => {
          asked.push(city);
          return "Rain";
        },
      },
    },
  ],
});
assert.equal(await runner.finalContent(), "It rains in Paris.");
assert.deepEqual(asked, ["Paris"]);

// Responses: whole, streamed, kept, gone on with, and made in the background.
const question = { model: "demo", temperature: 0, input: sum[0].content };
const kept = await plain.responses.create(question);
assert.equal(kept.status, "completed");
assert.equal(kept.output_text, text);
const types = [];
let said = "";
for await (const event of await plain.responses.create({ ...question, stream: true })) {
  types.push(event.type);
  if (event.type === "response.output_text.delta") said += event.delta;
}
assert.equal(said, text);
assert.equal(types.filter((type) => /completed$|failed$|incomplete$/.test(type) && !type.includes("output")).length, 1);
assert.equal(types.at(-1), "response.completed");
assert.equal((await plain.responses.stream(question).finalResponse()).output_text, text);
assert.equal((await plain.responses.retrieve(kept.id)).output_text, text);
const next = await plain.responses.create({ ...question, input: "And 1 + 1?", previous_response_id: kept.id });
assert.equal(next.previous_response_id, kept.id);
const behind = await plain.responses.create({ ...question, background: true });
let heard = "";
for await (const event of await plain.responses.retrieve(behind.id, { stream: true, starting_after: 0 }))
  if (event.type === "response.output_text.delta") heard += event.delta;
assert.equal(heard, text);
const items = [];
for await (const item of plain.responses.inputItems.list(kept.id)) items.push(item);
assert.equal(items.length, 1);
await plain.responses.delete(kept.id);
await assert.rejects(plain.responses.retrieve(kept.id), (error) => error.status === 404);

console.log("ok");
