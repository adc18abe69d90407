// The Vercel AI SDK: its provider for servers that speak as OpenAI does, and that for OpenAI itself
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  experimental_getBatchResults as getBatchResults,
  experimental_getBatchStatus as getBatchStatus,
  experimental_startBatch as startBatch,
  generateObject,
  generateText,
  isStepCount,
  stepCountIs,
  streamText,
  tool,
} from "ai";
import { z } from "zod";

const baseURL = process.env.OPENAI_BASE_URL;
const provider = createOpenAICompatible({
  name: "here",
  baseURL,
  apiKey: "any",
  supportsStructuredOutputs: true,
});
const model = provider("default");
const prompt = "What is two and two?";
const maxRetries = 0;
const City = z.object({ name: z.string(), people: z.number().int() });
const add = tool({
  description: "Add two numbers",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => a + b,
});
const stopWhen = (stepCountIs ?? isStepCount)(4);

export async function chat() {
  assert.equal((await generateText({ model, prompt, maxRetries })).text, "four");
}

export async function stream() {
  let text = "";
  for await (const piece of streamText({ model, prompt, maxRetries }).textStream) text += piece;
  assert.equal(text, "four");
}

export async function tools() {
  const answer = await generateText({ model, prompt, tools: { add }, stopWhen, maxRetries });
  assert.equal(answer.text, "four");
  assert.equal(answer.steps.length, 2);
}

export async function structured() {
  const answer = await generateObject({ model, prompt, schema: City, maxRetries });
  assert.equal(answer.object.people, 1);
}

const hosted = createOpenAI({ baseURL, apiKey: "any" });

export async function responses() {
  const responding = { model: hosted.responses("default"), maxRetries };
  const asked = { ...responding, prompt };
  const first = await generateText(asked);
  assert.equal(first.text, "four");
  // It names what was said before by the ids of items.
  const before = [{ role: "user", content: prompt }, ...first.response.messages];
  const messages = [...before, { role: "user", content: "And now?" }];
  assert.equal((await generateText({ ...responding, messages })).text, "four");
  assert.equal((await generateText({ ...asked, tools: { add }, stopWhen })).text, "four");
  assert.equal((await generateObject({ ...asked, schema: City })).object.people, 1);
}

export async function batch() {
  const request = { type: "text", model: "default", prompt };
  const requests = [{ ...request, id: "a" }, { ...request, id: "b" }];
  const made = await startBatch({ provider: hosted, requests });
  for (let tries = 0; tries < 100; tries++) {
    if ((await getBatchStatus({ provider: hosted, batch: made })).status !== "pending") break;
    await new Promise((resolve) => setTimeout(resolve, 200));
  }
  const texts = {};
  for await (const item of getBatchResults({ provider: hosted, batch: made })) {
    texts[item.id] = item.text;
  }
  assert.deepEqual(texts, { a: "four", b: "four" });
}
