// Vercel's AI SDK: for each line of the input, print the calls of three turns, whole and then streamed.
// node ai_sdk_loop.mjs URL PROMPT, in a folder where `npm install ai @ai-sdk/openai-compatible` ran
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [url, prompt] = process.argv.slice(2);
const { resolve } = createRequire(`${process.cwd()}/`);
const load = name => import(pathToFileURL(resolve(name)));
const { generateText, jsonSchema, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const inputSchema = jsonSchema({ type: "object", properties: { a: { type: "array", items: { type: "integer" } } } });
const look = tool({ description: "Look.", inputSchema, execute: async () => prompt });
const options = {
  model: createOpenAICompatible({ name: "paged", baseURL: `${url}/v1`, includeUsage: true })("recall"),
  tools: { look }, stopWhen: stepCountIs(3), temperature: 0, maxRetries: 0, prompt,
};
for await (const _ of createInterface({ input: process.stdin })) {
  const whole = await generateText(options), streamed = streamText(options);
  await streamed.consumeStream({ onError: error => { throw error; } });
  const steps = [...whole.steps, ...await streamed.steps];
  console.log(JSON.stringify(steps.flatMap(step => step.toolCalls.map(call => [call.toolName, call.input]))));
}
