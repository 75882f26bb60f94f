// What openai-node's tests need of jest; and ids that they make up become ids of objects that exist.
import { describe, test } from "node:test";
import { expect } from "expect";

Object.assign(globalThis, { describe, test, expect });

const api = process.env.TEST_API_BASE_URL;
const model = process.env.TERCET_MODEL;
const realFetch = globalThis.fetch;

async function made(path, body) {
  const answer = await realFetch(api + path, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: "Bearer My API Key" },
    body: JSON.stringify(body),
  });
  return (await answer.json()).id;
}

const question = "What is a scheduler?";
const chat = () =>
  made("/chat/completions", {
    model,
    messages: [{ role: "user", content: question }],
    store: true,
    max_completion_tokens: 4,
  });
const response = () => made("/responses", { model, input: question, background: true, max_output_tokens: 16 });
const conversation = () =>
  made("/conversations", { items: [{ type: "message", id: "msg_abc", role: "user", content: question }] });
const objects = {
  completion_id: chat,
  response_id: response,
  resp_123: response,
  resp_677efb5139a88190b512bc3fef8e535d: response,
  conv_123: conversation,
};

globalThis.fetch = async (url, options) => {
  const steps = String(url).split("/");
  for (const [place, step] of steps.entries()) {
    const [name, query] = step.split("?");
    if (objects[name]) steps[place] = [await objects[name](), ...(query === undefined ? [] : [query])].join("?");
  }
  return realFetch(steps.join("/"), options);
};
