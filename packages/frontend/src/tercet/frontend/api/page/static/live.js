// The live view: frames of /status/stream as tiles, charts, a table of the batch, and the prefix cache's tree.

import { events, request } from "./api.js";
import { el, get, number, percent, say, seconds, svg } from "./dom.js";
import { showTree } from "./tree.js";

const HISTORY = 240; // frames: two minutes
const STATES = ["loading", "ready", "stuck", "draining"];
const MAX_EVENTS = 200;

let controller = null;
/** Rates of each scheduler at the last frame and the samples that they come from, by peer and incarnation. */
let rates = new Map();
let history = [];
let rows = new Map();
let shownEvents = new Set();

/** Begin or end watching. */
export function showLive(shown) {
  if (!shown) {
    controller?.abort();
    controller = null;
  } else if (!controller) {
    controller = new AbortController();
    watch(controller.signal);
  }
}

async function watch(signal) {
  for (let pause = 500; !signal.aborted; pause = Math.min(2 * pause, 10_000)) {
    try {
      const answer = await request("status/stream", { signal });
      say(get("live-note"), "");
      for await (const frame of events(answer)) {
        if (signal.aborted) return;
        show(frame);
        pause = 500;
      }
      say(get("live-note"), "The frontend is leaving. Connecting again.");
    } catch (error) {
      if (signal.aborted) return;
      say(get("live-note"), `${error.message} Connecting again.`);
      if (error.status === 401) {
        say(get("live-note"), "The live view needs a key. Open it again to enter one.");
        controller = null;
        return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

function show(frame) {
  const totals = sum(frame);
  if (!document.hidden) {
    showTiles(frame, totals);
    showParts(frame);
    showBatch(frame);
    showTrees(frame);
  }
  history = [...history.slice(1 - HISTORY), { rate: totals.rate, running: totals.running, waiting: totals.waiting }];
  if (!document.hidden) showCharts(totals);
  showEvents(frame.events);
}

// Numbers.

/** Return totals of all schedulers, and update the rates of each. */
function sum(frame) {
  const totals = { running: 0, waiting: frame.frontend.waiting, rate: 0, prefill: 0, pages: 0, free: 0, cached: 0, prompt: 0, hit: 0 };
  const next = new Map();
  for (const scheduler of frame.schedulers) {
    const { load } = scheduler, name = `${scheduler.peer} ${scheduler.incarnation}`, before = rates.get(name);
    const rate = measured(frame, scheduler, before);
    next.set(name, rate);
    scheduler.rate = rate;
    totals.running += load.running;
    totals.waiting += load.queued;
    totals.rate += rate.output;
    totals.prefill += rate.prompt;
    totals.pages += load.pages_total;
    totals.free += load.pages_free;
    totals.cached += load.pages_cached;
    totals.prompt += load.prompt_tokens;
    totals.hit += load.cached_prompt_tokens;
  }
  rates = next;
  return totals;
}

/** Return the rates of a scheduler over about two seconds. */
function measured(frame, { load, steps, step_seconds: time }, before) {
  const sample = { at: frame.at, output: load.output_tokens, prompt: load.prompt_tokens - load.cached_prompt_tokens, steps, time };
  const samples = [...(before?.samples ?? []), sample].filter((each) => frame.at - each.at < 2.6);
  const [first] = samples, span = sample.at - first.at;
  const each = (name) => (span > 0 ? Math.max(0, sample[name] - first[name]) / span : 0);
  const count = sample.steps - first.steps;
  return { samples, output: each("output"), prompt: each("prompt"), steps: each("steps"), stepMs: count > 0 ? (1000 * (sample.time - first.time)) / count : 0 };
}

function total(counts) {
  return Object.values(counts).reduce((all, each) => all + each, 0);
}

// Tiles and charts.

function showTiles(frame, totals) {
  const { frontend } = frame, used = totals.pages - totals.free;
  const tiles = [
    ["Output", `${number(totals.rate)}`, "tokens/s"],
    ["Prefill", `${number(totals.prefill)}`, "tokens/s"],
    ["Running", number(totals.running), "choices"],
    ["Waiting", number(totals.waiting), frontend.waiting ? `${number(frontend.waiting)} without a scheduler` : "choices"],
    ["KV cache", percent(used, totals.pages), `of ${number(totals.pages)} pages`],
    ["Prefix hits", percent(totals.hit, totals.prompt), "of prompt tokens"],
    ["Finished", number(frontend.ended.finished ?? 0), "requests here"],
    ["Deaths", number(total(frame.deaths)), `${number(total(frame.redispatches))} re-dispatches`, total(frame.deaths) ? "bad" : ""],
    ["Recovered", number(frontend.recovered), "requests", frontend.recovered ? "good" : ""],
  ];
  const box = get("tiles");
  if (box.children.length !== tiles.length) {
    box.replaceChildren(...tiles.map(() => el("div", {}, el("dt"), el("dd"), el("dd", { class: "unit" }))));
  }
  for (const [place, [name, value, unit, mood]] of tiles.entries()) {
    const tile = box.children[place];
    for (const [part, text] of [name, value, unit].entries()) say(tile.children[part], text);
    tile.className = mood ?? "";
  }
}

function showCharts(totals) {
  say(get("rate-now"), number(totals.rate));
  say(get("running-now"), number(totals.running));
  say(get("waiting-now"), number(totals.waiting));
  draw(get("rate-chart"), [["one", history.map((each) => each.rate)]]);
  draw(get("load-chart"), [["one", history.map((each) => each.running)], ["two", history.map((each) => each.waiting)]]);
}

function draw(chart, series) {
  const width = 600, height = 120, top = Math.max(1, ...series.flatMap(([, values]) => values)) * 1.1;
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.setAttribute("preserveAspectRatio", "none");
  const lines = series.flatMap(([name, values]) => {
    const points = values.map((value, place) => {
      const x = width - ((values.length - 1 - place) * width) / (HISTORY - 1);
      return `${x.toFixed(1)},${(height - 2 - (value / top) * (height - 4)).toFixed(1)}`;
    });
    const first = (width - ((values.length - 1) * width) / (HISTORY - 1)).toFixed(1);
    return [
      svg("polygon", { class: `area ${name}`, points: `${first},${height} ${points.join(" ")} ${width},${height}` }),
      svg("polyline", { class: `line ${name}`, points: points.join(" ") }),
    ];
  });
  chart.replaceChildren(...lines);
}

// Parts.

function showParts(frame) {
  showCards(get("models"), modelCards(frame));
  showCards(get("parts"), [...frame.schedulers.map(schedulerCard), ...frame.detokenizers.map(detokenizerCard), frontendCard(frame.frontend)]);
}

/** Show cards in a box. A card keeps its node by the name in `peer`. */
function showCards(box, parts) {
  const known = new Map([...box.children].map((card) => [card.dataset.peer, card]));
  for (const [place, part] of parts.entries()) {
    let card = known.get(part.peer);
    if (!card) card = el("section", { class: "part", "data-peer": part.peer }, el("header", {}, el("h3"), el("span", { class: "state" })), el("div", { class: "meter" }), el("dl"));
    known.delete(part.peer);
    if (box.children[place] !== card) box.insertBefore(card, box.children[place] ?? null);
    const [header, meter, facts] = card.children;
    say(header.children[0], part.peer);
    say(header.children[1], part.state);
    card.dataset.state = part.mood ?? part.state;
    showMeter(meter, part.pages);
    if (facts.children.length !== part.facts.length) facts.replaceChildren(...part.facts.map(() => el("div", {}, el("dt"), el("dd"))));
    for (const [index, [name, value]] of part.facts.entries()) {
      say(facts.children[index].children[0], name);
      say(facts.children[index].children[1], value);
    }
  }
  for (const card of known.values()) card.remove();
}

/** Return a card for each model: its schedulers together. */
function modelCards({ models, schedulers }) {
  return models.map(({ name, context_length: context }) => {
    const own = schedulers.filter((each) => each.model === name && !each.encoder), ready = own.filter((each) => each.state === "ready").length;
    const all = (count) => own.reduce((sum, each) => sum + count(each), 0);
    const pages = ["pages_total", "pages_free"].map((field) => all(({ load }) => load[field]));
    return {
      peer: name, pages: [], mood: ready ? "ready" : "loading",
      state: `${number(ready)} of ${number(own.length)} ${own.length === 1 ? "scheduler" : "schedulers"} ready`,
      facts: [
        ["output", `${number(all(({ rate }) => rate.output))} tokens/s`],
        ["prefill", `${number(all(({ rate }) => rate.prompt))} tokens/s`],
        ["running", number(all(({ load }) => load.running))],
        ["waiting", number(all(({ load }) => load.queued))],
        ["KV cache", percent(pages[0] - pages[1], pages[0])],
        ["context", `${number(context)} tokens`],
      ],
    };
  });
}

function schedulerCard({ peer, state, model, encoder, phase, step_age: age, load, rate }) {
  const busy = phase === "step" && age > 1 ? `, step of ${seconds(age)}` : "";
  return {
    peer, state: state === "ready" ? phase : state,
    pages: load.pages_total ? [["used", load.pages_total - load.pages_free - load.pages_cached, "of requests"], ["cached", load.pages_cached, "in the prefix cache"], ["free", load.pages_free, "free"]] : [],
    facts: [
      [encoder ? "encodes for" : "model", model || "–"],
      ["output", `${number(rate.output)} tokens/s`],
      ["running", load.slots_total ? `${number(load.running)} of ${number(load.slots_total)}` : number(load.running)],
      ["waiting", number(load.queued)],
      ["steps", rate.steps ? `${number(rate.steps, 1)}/s, ${number(rate.stepMs, 1)} ms` : `none${busy}`],
      ["retractions", number(load.retractions)],
      ...(load.drafted_tokens ? [["drafts accepted", percent(load.accepted_tokens, load.drafted_tokens)]] : []),
    ],
  };
}

function detokenizerCard({ peer, state, choices }) {
  return { peer, state, pages: [], facts: [["choices", number(choices)]] };
}

function frontendCard({ peer, running, waiting, ended }) {
  return {
    peer, state: "this page", pages: [],
    facts: [["requests", number(running)], ["without a scheduler", number(waiting)], ["failed", number(ended.failed ?? 0)]],
  };
}

function showMeter(meter, parts) {
  meter.hidden = !parts.length;
  if (!parts.length) return;
  meter.setAttribute("role", "img");
  meter.setAttribute("aria-label", `KV pages: ${parts.map(([, pages, text]) => `${number(pages)} ${text}`).join(", ")}`);
  meter.title = meter.getAttribute("aria-label");
  if (!meter.children.length) meter.append(...parts.map(([name]) => el("i", { class: name })));
  for (const [place, [, pages]] of parts.entries()) meter.children[place].style.flexGrow = pages;
}

// The batch.

function showBatch(frame) {
  const choices = frame.schedulers.flatMap((scheduler) => (scheduler.choices ?? []).map((choice) => ({ ...choice, scheduler: scheduler.peer })));
  const held = frame.schedulers.reduce((all, { load }) => all + load.running + load.queued, 0);
  const known = frame.schedulers.some((scheduler) => scheduler.choices);
  let note = "nothing runs";
  if (frame.schedulers.length && !known) note = "waiting for the schedulers";
  else if (choices.length < held) note = frame.everything ? `${choices.length} of ${held}` : `${choices.length} of this key, of ${held} in all`;
  else if (choices.length) note = `${choices.length}`;
  say(get("batch-note"), note);
  const table = get("batch"), body = table.tBodies[0], next = new Map();
  table.dataset.tenants = String(choices.some((choice) => choice.tenant));
  for (const [place, choice] of choices.entries()) {
    const key = `${choice.scheduler} ${choice.id}`, row = rows.get(key) ?? newRow();
    next.set(key, row);
    updateRow(row, choice, frame.at);
    if (body.rows[place] !== row.node) body.insertBefore(row.node, body.rows[place] ?? null);
  }
  for (const [key, row] of rows) if (!next.has(key)) row.node.remove();
  rows = next;
}

function newRow() {
  const state = el("span", { class: "chip" }), bar = () => el("span", { class: "gauge", "aria-hidden": "true" }, el("i"), el("i"));
  const [prompt, output] = [bar(), bar()], [promptText, outputText] = [el("span"), el("span")];
  const cells = Array.from({ length: 6 }, () => el("td"));
  const node = el("tr", {}, el("td", {}, state), cells[0], cells[1], el("td", {}, prompt, promptText), el("td", {}, output, outputText), ...cells.slice(2));
  for (const cell of cells.slice(2, 5)) cell.className = "n";
  cells[0].className = "mono";
  cells[5].className = "tenant mono";
  return { node, state, cells, prompt, output, promptText, outputText, samples: [] };
}

function updateRow(row, choice, at) {
  const resumed = choice.attempt > 0;
  row.samples = [...row.samples, { at, tokens: choice.output_tokens }].filter((each) => at - each.at < 3.1);
  const [first] = row.samples, span = at - first.at, rate = span > 0 ? (choice.output_tokens - first.tokens) / span : 0;
  const waits = choice.phase === "waiting" && choice.output_tokens > 0 ? "retracted" : choice.phase;
  row.node.dataset.phase = waits;
  say(row.state, waits);
  const marks = [resumed ? `attempt ${choice.attempt + 1}` : "", choice.constrained ? "grammar" : "", choice.lora ? "LoRA" : ""].filter(Boolean);
  const texts = [`${choice.id.slice(0, 6)}${choice.index ? `·${choice.index}` : ""} ${marks.join(", ")}`.trim(), choice.scheduler, rate ? number(rate, 1) : "–", number(choice.pages), seconds(choice.age), choice.tenant];
  for (const [place, text] of texts.entries()) say(row.cells[place], text);
  row.cells[0].classList.toggle("resumed", resumed);
  const done = Math.min(choice.computed_tokens, choice.prompt_tokens);
  fill(row.prompt, choice.cached_tokens / choice.prompt_tokens, Math.max(0, done - choice.cached_tokens) / choice.prompt_tokens);
  fill(row.output, 0, choice.output_tokens / Math.max(choice.max_new_tokens, 1));
  say(row.promptText, `${number(choice.prompt_tokens)}${choice.cached_tokens ? `, ${number(choice.cached_tokens)} cached` : ""}`);
  say(row.outputText, `${number(choice.output_tokens)} of ${number(choice.max_new_tokens)}`);
}

function fill(bar, cached, done) {
  bar.children[0].style.width = `${Math.min(100, 100 * cached)}%`;
  bar.children[1].style.width = `${Math.min(100, 100 * done)}%`;
}

function showTrees(frame) {
  const box = get("trees"), shown = frame.schedulers.filter((scheduler) => scheduler.prefixes);
  say(get("tree-note"), frame.everything ? (shown.length ? "" : "waiting for the schedulers") : "for admin keys");
  const known = new Map([...box.children].map((node) => [node.dataset.peer, node]));
  for (const scheduler of shown) {
    let node = known.get(scheduler.peer);
    if (!node) {
      node = el("div", { "data-peer": scheduler.peer });
      box.append(node);
    }
    known.delete(scheduler.peer);
    showTree(node, scheduler);
  }
  for (const node of known.values()) node.remove();
}

// Events.

function showEvents(found) {
  const list = get("events");
  for (const event of found) {
    const key = `${event.number} ${event.at}`;
    if (shownEvents.has(key)) continue;
    shownEvents.add(key);
    const time = new Date(1000 * event.at);
    list.prepend(el("li", { class: event.kind }, el("time", { dateTime: time.toISOString() }, time.toLocaleTimeString()), el("span", {}, textOf(event))));
  }
  if (!list.children.length) list.append(el("li", { class: "none" }, "none yet"));
  else if (list.children.length > 1) list.querySelector(".none")?.remove();
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
}

function textOf({ kind, peer, cause, count }) {
  const requests = `${number(count ?? 0)} ${count === 1 ? "request" : "requests"}`;
  if (kind === "redispatched") return `${requests} dispatched again: ${cause.replaceAll("_", " ")}`;
  if (kind === "recovered") return `${requests} finished after a re-dispatch`;
  return STATES.includes(kind) ? `${peer} is ${kind}` : `${peer} ${kind}`;
}
