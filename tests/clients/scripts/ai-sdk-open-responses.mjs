// The AI SDK by @ai-sdk/open-responses: text, streams, objects, failures and its own loop over tools.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.env.CLIENT_HOME}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { APICallError, generateText, streamText, Output, stepCountIs, tool } = await load("ai");
const { createOpenResponses } = await load("@ai-sdk/open-responses");
const { z } = await load("zod");

const [demoURL, toolsURL] = process.argv.slice(2);
const provider = (url) => createOpenResponses({ name: "novainfer", url: `${url}/v1/responses`, apiKey: "none" });
const asked = { model: provider(demoURL)("demo"), prompt: "What is 7 + 5?", temperature: 0, maxRetries: 0 };

const whole = await generateText(asked);
assert.match(whole.text, /12/);
assert.equal(whole.finishReason, "stop");
assert.ok(whole.usage.outputTokens > 3);
assert.deepEqual(whole.warnings, []);
const stream = streamText(asked);
let text = "";
for await (const part of stream.textStream) text += part;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
assert.equal(await stream.finishReason, "stop");
assert.equal((await generateText({ ...asked, maxOutputTokens: 2 })).finishReason, "length");
const turns = [
  { role: "user", content: asked.prompt },
  { role: "assistant", content: whole.text },
  { role: "user", content: "What is 2 + 2?" },
];
const { prompt: _, ...rest } = asked;
assert.match((await generateText({ ...rest, system: "Be short.", messages: turns })).text, /4/);
const schema = z.object({ answer: z.number().int(), is_even: z.boolean() });
const found = await generateText({ ...asked, maxOutputTokens: 60, output: Output.object({ schema }) });
assert.equal(typeof found.output.answer, "number");
await assert.rejects(
  generateText({ ...asked, temperature: -1 }),
  (error) => APICallError.isInstance(error) && error.statusCode === 400 && error.message.includes("temperature"),
);

const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `Rain in ${city}`,
});
const offered = { prompt: "Paris?", tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0 };
const caller = { ...offered, model: provider(toolsURL)("fake") };
const called = await generateText(caller);
assert.equal(called.text, "It rains in Paris.");
assert.deepEqual(
  called.steps[0].toolResults.map((result) => result.output),
  ["Rain in Paris"],
);
const parts = [];
const streamed = streamText(caller);
for await (const part of streamed.fullStream) parts.push(part);
assert.equal(await streamed.text, "It rains in Paris.");
const steps = await streamed.steps;
assert.equal(steps.length, 2);
assert.equal(steps[0].finishReason, "tool-calls");
const thoughts = parts.filter((part) => part.type === "reasoning-delta").map((part) => part.text);
assert.equal(thoughts.join(""), "I see.I see.");
assert.equal(parts.filter((part) => part.type === "finish").length, 1);
assert.ok(!parts.some((part) => part.type === "error"));
console.log("ok");
