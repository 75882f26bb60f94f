// Talks to a Tercet server through the openai package and prints what came back as one JSON object.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "What is a tercet?" }];
const asked = { model, messages, temperature: 0, max_completion_tokens: 200 };
const long = { ...asked, ignore_eos: true };

const models = [];
for await (const each of client.models.list()) models.push(each.id);

const whole = await client.chat.completions.create(long);
const short = await client.chat.completions.create(asked);

const runner = client.chat.completions.stream({ ...long, stream_options: { include_usage: true } });
let pieces = 0;
runner.on("content", () => (pieces += 1));
const streamed = await runner.finalChatCompletion();
const usage = await runner.totalUsage();

const completion = await client.completions.create({ model, prompt: "A tercet is", max_tokens: 8, temperature: 0 });

const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 8 }, wanted: { type: "boolean" } },
  required: ["name", "wanted"],
  additionalProperties: false,
};
const structured = await client.chat.completions.create({
  ...asked,
  response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema } },
});

const tool = { name: "keep", description: "Keeps what is wanted", parameters: schema, strict: true };
const calling = client.chat.completions.stream({
  ...asked,
  tools: [{ type: "function", function: tool }],
  tool_choice: "required",
  parallel_tool_calls: false,
});
const called = (await calling.finalChatCompletion()).choices[0];

const responding = client.responses.stream({ model, input: messages, temperature: 0, max_output_tokens: 200 });
const events = [];
responding.on("event", (event) => events.push(event.sequence_number));
const response = await responding.finalResponse();

let refused;
try {
  await client.chat.completions.create({ ...asked, model: "nobody" });
} catch (error) {
  refused = { known: error instanceof OpenAI.NotFoundError, status: error.status, code: error.code };
}

const aborted = new AbortController();
const left = await client.chat.completions.create(
  { ...long, max_completion_tokens: 400, stream: true },
  { signal: aborted.signal },
);
for await (const chunk of left) {
  if (chunk.choices[0]?.delta.content) aborted.abort();
}

console.log(
  JSON.stringify({
    models,
    text: whole.choices[0].message.content,
    short: short.choices[0].message.content,
    streamed: streamed.choices[0].message.content,
    pieces,
    usage: [whole.usage.total_tokens, usage.total_tokens],
    completion: completion.choices[0].text,
    structured: { text: structured.choices[0].message.content, finish: structured.choices[0].finish_reason },
    called: { calls: called.message.tool_calls.map((call) => call.function), finish: called.finish_reason },
    response: { text: response.output_text, status: response.status, events },
    refused,
  }),
);
