// The AI SDK with its two providers of OpenAI's APIs: text, streams, objects, tools and errors.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, jsonSchema, Output, streamText, tool } from "ai";

const baseURL = `${process.env.TERCET_URL}/v1`;
const apiKey = process.env.TERCET_KEY;
const name = process.env.TERCET_MODEL;
const openai = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({
  name: "tercet",
  baseURL,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const models = {
  "openai-compatible": compatible(name),
  "openai chat": openai.chat(name),
  "openai responses": openai.responses(name),
};
const prompt = "What is a scheduler?";
const schema = jsonSchema({
  type: "object",
  properties: { wanted: { type: "boolean" }, size: { enum: ["small", "large"] } },
  required: ["wanted", "size"],
  additionalProperties: false,
});
const options = { temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const weather = tool({
  description: "Weather of a city",
  inputSchema: jsonSchema({
    type: "object",
    properties: { city: { enum: ["Oslo", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  }),
  execute: ({ city }) => ({ city, weather: "rain" }),
});

for (const [title, model] of Object.entries(models)) {
  describe(title, () => {
    test("generateText", async () => {
      const { text, usage, finishReason, response } = await generateText({ model, prompt, ...options });
      assert.ok(text.length > 0);
      assert.ok(["stop", "length"].includes(finishReason));
      assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
      assert.ok(response.id.length > 0);
    });

    test("streamText", async () => {
      const whole = await generateText({ model, prompt, ...options });
      const result = streamText({ model, prompt, ...options });
      let text = "";
      for await (const part of result.textStream) text += part;
      assert.equal(text, whole.text);
      assert.equal(await result.finishReason, whole.finishReason);
      assert.ok((await result.usage).outputTokens > 0);
    });

    test("a conversation with instructions", async () => {
      const messages = [
        { role: "user", content: prompt },
        { role: "assistant", content: "It plans steps." },
        { role: "user", content: [{ type: "text", text: "And a frontend?" }] },
      ];
      const { text } = await generateText({ model, system: "Be kind.", messages, ...options });
      assert.ok(text.length > 0);
    });

    test("an object", async () => {
      const output = Output.object({ schema });
      const { output: found } = await generateText({ model, prompt, output, ...options });
      assert.equal(typeof found.wanted, "boolean");
      assert.ok(["small", "large"].includes(found.size));
    });

    test("a streamed object", async () => {
      const result = streamText({ model, prompt, output: Output.object({ schema }), ...options });
      let last;
      for await (const part of result.partialOutputStream) last = part;
      assert.deepEqual(Object.keys(last).sort(), ["size", "wanted"]);
    });

    test("a required tool, and its result", async () => {
      const { steps } = await generateText({
        model,
        prompt: "Weather in Oslo?",
        tools: { weather },
        toolChoice: "required",
        stopWhen: stepCountIs(2),
        ...options,
      });
      assert.equal(steps.length, 2);
      assert.equal(steps[0].finishReason, "tool-calls");
      const [{ output }] = steps[0].toolResults;
      assert.equal(output.weather, "rain");
    });

    test("a streamed tool call", async () => {
      const result = streamText({
        model,
        prompt: "Weather in Oslo?",
        tools: { weather },
        toolChoice: { type: "tool", toolName: "weather" },
        ...options,
      });
      const calls = await result.toolCalls;
      assert.equal(calls.length, 1);
      assert.ok(["Oslo", "Rome"].includes(calls[0].input.city));
    });

    test("an error has the server's message", async () => {
      const refused = generateText({ model, prompt, ...options, maxOutputTokens: 10_000_000 });
      await assert.rejects(refused, (error) => error.statusCode === 400 && error.message.length > 10);
    });
  });
}
