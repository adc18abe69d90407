// The Vercel AI SDK: its provider for servers that speak as OpenAI does, and that for OpenAI itself
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, isStepCount, stepCountIs, streamText, tool } from "ai";
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

export async function responses() {
  const hosted = createOpenAI({ baseURL, apiKey: "any" }).responses("default");
  const asked = { model: hosted, prompt, maxRetries };
  assert.equal((await generateText(asked)).text, "four");
  assert.equal((await generateText({ ...asked, tools: { add }, stopWhen })).text, "four");
  assert.equal((await generateObject({ ...asked, schema: City })).object.people, 1);
}
