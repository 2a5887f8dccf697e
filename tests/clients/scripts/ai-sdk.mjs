// The AI SDK by @ai-sdk/openai-compatible: text, streams, objects and its own loop over tools.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.env.CLIENT_HOME}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, Output, stepCountIs, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const [demoURL, toolsURL] = process.argv.slice(2);
const provider = (url) =>
  createOpenAICompatible({
    name: "novainfer",
    baseURL: `${url}/v1`,
    apiKey: "none",
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
const demo = provider(demoURL)("demo");
const prompt = "What is 7 + 5?";

const whole = await generateText({ model: demo, prompt, temperature: 0, maxRetries: 0 });
assert.match(whole.text, /12/);
assert.ok(whole.usage.outputTokens > 3);
const stream = streamText({ model: demo, prompt, temperature: 0, maxRetries: 0 });
let text = "";
for await (const part of stream.textStream) text += part;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
assert.equal(await stream.finishReason, "stop");
const found = await generateText({
  model: demo,
  prompt,
  temperature: 0,
  maxOutputTokens: 60,
  maxRetries: 0,
  output: Output.object({ schema: z.object({ answer: z.number().int(), is_even: z.boolean() }) }),
});
assert.equal(typeof found.output.answer, "number");

const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `Rain in ${city}`,
});
const asked = { model: provider(toolsURL)("fake"), prompt: "Paris?", tools: { weather }, stopWhen: stepCountIs(3) };
const called = await generateText({ ...asked, maxRetries: 0 });
assert.equal(called.text, "It rains in Paris.");
assert.equal(called.reasoningText, "I see.");
assert.deepEqual(
  called.steps[0].toolResults.map((result) => result.output),
  ["Rain in Paris"],
);
const streamed = streamText({ ...asked, maxRetries: 0 });
await streamed.consumeStream();
assert.equal(await streamed.text, "It rains in Paris.");
assert.equal((await streamed.steps).length, 2);
console.log("ok");
