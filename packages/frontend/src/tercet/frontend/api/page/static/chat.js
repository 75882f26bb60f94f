// The chat: a conversation in memory, sent whole with each request, whose answer is streamed.

import { ApiError, events, getJson, request } from "./api.js";
import { el, get, number, pretty, say } from "./dom.js";
import { hasImages, startImages, takeImages } from "./images.js";
import { Markdown, copied } from "./markdown.js";

const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Return the weather in a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const RENDER_MS = 60;

/** Messages as the API has them; each has its `node` beside it. */
let turns = [];
let running = null;

export function startChat() {
  const prompt = get("prompt");
  get("composer").onsubmit = (event) => {
    event.preventDefault();
    send(prompt.value);
  };
  prompt.onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send(prompt.value);
    }
  };
  prompt.oninput = () => grow(prompt);
  get("stop").onclick = stop;
  get("chat").onkeydown = (event) => {
    if (event.key === "Escape") (running ? stop : () => toggleSettings(false))();
  };
  get("new-chat").onclick = () => {
    stop();
    turns = [];
    takeImages();
    get("messages").replaceChildren(welcome());
    prompt.focus();
  };
  get("toggle-settings").onclick = () => toggleSettings();
  get("close-settings").onclick = () => toggleSettings(false);
  get("tools-example").onclick = () => {
    get("tools").value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
    readJson("tools");
  };
  for (const id of ["tools", "schema"]) get(id).onchange = () => readJson(id);
  startImages();
  get("messages").replaceChildren(welcome());
  loadModels();
}

async function loadModels() {
  try {
    const { data } = await getJson("v1/models");
    const select = get("model"), chosen = select.value;
    select.replaceChildren(...data.map((model) => el("option", { value: model.id }, model.parent ? `${model.id} (adapter)` : model.id)));
    if (data.some((model) => model.id === chosen)) select.value = chosen;
  } catch (error) {
    get("messages").append(fault(error, () => loadModels()));
  }
}

function welcome() {
  const ideas = ["Explain speculative decoding in three sentences.", "Write a Python function that reverses a linked list.", "Compare TCP and UDP in a table."];
  const buttons = ideas.map((idea) => {
    const button = el("button", { type: "button", class: "idea" }, idea);
    button.onclick = () => send(idea);
    return button;
  });
  return el("div", { class: "welcome" }, el("h1", {}, "What shall the model write?"), el("div", { class: "ideas" }, ...buttons));
}

function toggleSettings(open = get("settings").dataset.open !== "true") {
  get("settings").dataset.open = String(open);
  get("toggle-settings").setAttribute("aria-expanded", String(open));
  if (open) get("system").focus();
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 240)}px`;
}

// Requests.

/** Return a JSON field's value, null if it is empty. Shows a fault beside the field, and throws. */
function readJson(id) {
  const field = get(id), text = field.value.trim();
  let message = "", value = null;
  try {
    value = text ? JSON.parse(text) : null;
    if (id === "tools" && value !== null && !Array.isArray(value)) message = "This must be a JSON list of tools.";
  } catch (error) {
    message = `This is not JSON: ${error.message}`;
  }
  say(get(`${id}-fault`), message);
  field.setAttribute("aria-invalid", String(Boolean(message)));
  if (!message) return value;
  toggleSettings(true);
  field.focus();
  throw new ApiError(message, 0);
}

/** Return the body of a request for the next turn. Throws ApiError for a field that is not JSON. */
function body() {
  const fields = { model: get("model").value, stream: true, stream_options: { include_usage: true } };
  const system = get("system").value;
  fields.messages = [...(system.trim() ? [{ role: "system", content: system }] : []), ...turns.map((turn) => turn.message)];
  for (const input of document.querySelectorAll("[data-number]")) {
    if (input.value !== "" && Number.isFinite(input.valueAsNumber)) fields[input.dataset.number] = input.valueAsNumber;
  }
  const stops = get("stop-texts").value.split("\n").filter(Boolean);
  if (stops.length) fields.stop = stops;
  const tools = readJson("tools"), schema = readJson("schema");
  if (tools?.length) fields.tools = tools;
  if (schema) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return fields;
}

function send(text) {
  if (running || !(text.trim() || hasImages())) return;
  const images = takeImages();
  const parts = images.map((image) => ({ type: "image_url", image_url: { url: image.url } }));
  const content = parts.length ? [...parts, { type: "text", text }] : text;
  add({ role: "user", content }, [...images.map((image) => `[${image.name}]`), text].join("\n").trim());
  get("prompt").value = "";
  grow(get("prompt"));
  answer();
}

function stop() {
  running?.abort();
}

/** Request the next turn, and show it as it arrives. */
async function answer() {
  const controller = new AbortController();
  let view = null;
  setRunning(controller);
  for (const each of document.querySelectorAll(".regenerate")) each.remove();
  try {
    const fields = body();
    view = new Answer();
    const began = performance.now();
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(fields),
      signal: controller.signal,
    });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new ApiError(chunk.error.message, 0);
      view.take(chunk, performance.now() - began);
    }
    view.end(performance.now() - began);
  } catch (error) {
    if (view && error.name === "AbortError") view.end(0, "stopped");
    else {
      view?.fail();
      get("messages").append(fault(error, answer));
    }
  } finally {
    setRunning(null);
    scroll();
  }
}

function setRunning(controller) {
  running = controller;
  get("send").hidden = Boolean(controller);
  get("stop").hidden = !controller;
  get("messages").setAttribute("aria-busy", String(Boolean(controller)));
}

/** An answer that grows. */
class Answer {
  constructor() {
    this.message = { role: "assistant", content: "" };
    this.reasoning = "";
    this.calls = [];
    this.firstAt = 0;
    this.usage = null;
    this.finish = "";
    this.timer = 0;
    this.text = el("div", { class: "md" });
    this.markdown = new Markdown(this.text);
    this.thoughts = el("div", { class: "md" });
    this.thinking = new Markdown(this.thoughts);
    this.summary = el("summary", {}, "Reasoning");
    this.fold = el("details", { class: "reasoning", hidden: true }, this.summary, this.thoughts);
    this.fold.ontoggle = () => this.thinking.render(this.reasoning);
    this.tools = el("div", { class: "calls" });
    this.foot = el("footer", {}, el("span", { class: "pulse", "aria-hidden": "true" }));
    this.node = el("article", { class: "turn assistant", "aria-label": "Model" }, this.fold, this.text, this.tools, this.foot);
    get("messages").append(this.node);
    scroll(true);
  }

  take(chunk, ms) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { delta } = choice;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    this.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    this.message.content += delta.content ?? delta.refusal ?? "";
    for (const call of delta.tool_calls ?? []) {
      const known = (this.calls[call.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      known.id ||= call.id ?? "";
      known.function.name += call.function?.name ?? "";
      known.function.arguments += call.function?.arguments ?? "";
    }
    if (!this.firstAt && (this.reasoning || this.message.content || this.calls.length)) this.firstAt = ms;
    this.timer ||= setTimeout(() => this.render(), RENDER_MS);
  }

  render() {
    this.timer = 0;
    const follow = isAtEnd();
    if (this.reasoning) {
      this.fold.hidden = false;
      say(this.summary, this.message.content || this.calls.length ? "Reasoning" : "Reasoning …");
      if (this.fold.open) this.thinking.render(this.reasoning);
    }
    this.markdown.render(this.message.content);
    this.tools.replaceChildren(...this.calls.filter(Boolean).map((call) => callNode(call)));
    if (follow) scroll(true);
  }

  end(ms, how = "") {
    clearTimeout(this.timer);
    this.render();
    const calls = this.calls.filter(Boolean);
    if (calls.length && !how) this.message.tool_calls = calls;
    turns.push({ message: this.message, node: this.node });
    this.foot.replaceChildren(...this.facts(ms, how), ...this.actions());
    if (this.message.tool_calls) this.tools.replaceChildren(resultsForm(calls));
    say(get("announce"), how ? "The answer was stopped." : "The answer is complete.");
  }

  fail() {
    clearTimeout(this.timer);
    this.node.remove();
  }

  facts(ms, how) {
    const facts = how ? [how] : [];
    if (this.usage && ms) {
      const { completion_tokens: output, prompt_tokens: input } = this.usage, cached = this.usage.prompt_tokens_details?.cached_tokens;
      facts.push(`${number(input)} prompt tokens${cached ? `, ${number(cached)} cached` : ""}`, `${number(output)} output tokens`);
      facts.push(`first after ${number(this.firstAt)} ms`);
      if (output > 1) facts.push(`${number((1000 * (output - 1)) / Math.max(ms - this.firstAt, 1), 1)} tokens/s`);
    }
    if (this.finish === "length") facts.push("maximum of tokens");
    return facts.map((fact) => el("span", {}, fact));
  }

  actions() {
    const copy = el("button", { type: "button", class: "quiet" }, "Copy");
    copy.onclick = () => copied(copy, this.message.content);
    const again = el("button", { type: "button", class: "quiet regenerate" }, "Regenerate");
    again.onclick = () => {
      if (running || turns.at(-1)?.node !== this.node) return;
      turns.pop();
      this.node.remove();
      answer();
    };
    return [el("span", { class: "actions" }, copy, again)];
  }
}

// Nodes.

function add(message, shown = message.content) {
  document.querySelector(".welcome")?.remove();
  const label = message.role === "tool" ? "Tool result" : "You";
  const node = el("article", { class: `turn ${message.role}`, "aria-label": label }, el("div", { class: "plain" }, shown));
  turns.push({ message, node });
  get("messages").append(node);
  scroll(true);
}

function callNode(call, ...more) {
  const code = el("code", {}, pretty(call.function.arguments));
  return el("div", { class: "call" }, el("strong", {}, call.function.name), el("pre", { tabIndex: 0 }, code), ...more);
}

/** Return calls with fields for their results, which are the next turn. */
function resultsForm(calls) {
  const fields = calls.map((call) => el("textarea", { rows: 2, class: "code", "aria-label": `Result of ${call.function.name}`, placeholder: "Result" }));
  const submit = el("button", { type: "submit" }, calls.length > 1 ? "Send results" : "Send result");
  const form = el("form", {}, ...calls.map((call, place) => callNode(call, fields[place])), submit);
  form.onsubmit = (event) => {
    event.preventDefault();
    if (running) return;
    for (const [place, call] of calls.entries()) add({ role: "tool", tool_call_id: call.id, content: fields[place].value });
    form.replaceWith(...calls.map((call) => callNode(call)));
    answer();
  };
  return form;
}

function fault(error, retry) {
  const again = el("button", { type: "button", class: "quiet" }, "Try again");
  const node = el("div", { class: "error", role: "alert" }, el("span", {}, error.message), again);
  again.onclick = () => {
    node.remove();
    if (!running) retry();
  };
  return node;
}

function isAtEnd() {
  const box = get("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

function scroll(force = false) {
  const box = get("messages");
  if (force || isAtEnd()) box.scrollTop = box.scrollHeight;
}
