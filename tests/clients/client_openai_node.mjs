// openai-node
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ maxRetries: 0 });
const model = "default";
const messages = [{ role: "user", content: "What is two and two?" }];
const City = z.object({ name: z.string(), people: z.number().int() });
const parameters = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
};

export async function chat() {
  const answer = await client.chat.completions.create({ model, messages });
  assert.equal(answer.choices[0].message.content, "four");
}

export async function stream() {
  const answer = await client.chat.completions.stream({ model, messages }).finalContent();
  assert.equal(answer, "four");
}

export async function tools() {
  const add = {
    type: "function",
    function: { name: "add", parameters, parse: JSON.parse, function: ({ a, b }) => a + b },
  };
  const runner = client.chat.completions.runTools({ model, messages, tools: [add] });
  assert.equal(await runner.finalContent(), "four");
}

export async function structured() {
  const response_format = zodResponseFormat(City, "city");
  const answer = await client.chat.completions.parse({ model, messages, response_format });
  assert.equal(answer.choices[0].message.parsed.people, 1);
}

export async function responses() {
  const first = await client.responses.create({ model, input: "What is two and two?" });
  assert.equal(first.output_text, "four");
  const events = client.responses.stream({
    model,
    input: "And now?",
    previous_response_id: first.id,
  });
  assert.equal((await events.finalResponse()).output_text, "four");
}

export async function batch() {
  const url = "/v1/chat/completions";
  const line = JSON.stringify({ custom_id: "a", method: "POST", url, body: { model, messages } });
  const file = await client.files.create({
    file: await toFile(Buffer.from(line), "in.jsonl"),
    purpose: "batch",
  });
  let made = await client.batches.create({
    input_file_id: file.id,
    endpoint: url,
    completion_window: "24h",
  });
  for (let tries = 0; tries < 100 && made.status !== "completed"; tries++) {
    await new Promise((resolve) => setTimeout(resolve, 200));
    made = await client.batches.retrieve(made.id);
  }
  const text = await (await client.files.content(made.output_file_id)).text();
  assert.equal(JSON.parse(text).response.body.choices[0].message.content, "four");
}
