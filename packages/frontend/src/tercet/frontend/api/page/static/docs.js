// The API's documentation, made of /openapi.json of this server.

import { getJson, request } from "./api.js";
import { el, get, pretty, say } from "./dom.js";

const MAX_DEPTH = 4;
let schemas = {};

async function start() {
  let spec;
  try {
    spec = await getJson("openapi.json");
  } catch (error) {
    say(get("about"), error.message);
    return;
  }
  schemas = spec.components.schemas;
  say(get("about"), `${spec.info.title} ${spec.info.version}. ${spec.info.description}`);
  const tags = new Map();
  for (const [path, methods] of Object.entries(spec.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags[0];
      tags.set(tag, [...(tags.get(tag) ?? []), operationNode(method, path, operation)]);
    }
  }
  for (const [tag, nodes] of [...tags].sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b))) {
    get("operations").append(el("section", {}, el("h2", {}, tag), ...nodes));
  }
  get("filter").oninput = filter;
  filter();
}

function rank(tag) {
  const place = ["OpenAI", "Responses", "Anthropic"].indexOf(tag);
  return place < 0 ? 9 : place;
}

function filter() {
  const words = get("filter").value.toLowerCase().split(/\s+/);
  let count = 0;
  for (const section of get("operations").children) {
    let shown = 0;
    for (const node of section.querySelectorAll(".op")) {
      node.hidden = !words.every((word) => node.firstElementChild.textContent.toLowerCase().includes(word));
      shown += !node.hidden;
    }
    section.hidden = !shown;
    count += shown;
  }
  say(get("count"), `${count} routes`);
}

/** Return a folded operation, whose details are made when it is opened. */
function operationNode(method, path, operation) {
  const node = el("details", { class: "op" },
    el("summary", {}, el("span", { class: `verb ${method}` }, method.toUpperCase()), el("code", {}, path), el("span", {}, operation.summary)));
  node.ontoggle = () => {
    if (node.open && node.children.length === 1) node.append(details(method, path, operation));
  };
  return node;
}

function details(method, path, operation) {
  const node = el("div");
  if (operation.parameters) {
    const rows = operation.parameters.map((each) => row(each.name, each.required, typeOf(each.schema), `${each.description ?? ""} (${each.in})`));
    node.append(el("h3", {}, "Parameters"), table(rows));
  }
  const body = operation.requestBody?.content["application/json"];
  if (body) node.append(tryIt(method, path, body.example), el("h3", {}, "Body"), table(fields(resolve(body.schema))));
  else if (method === "get" && !path.includes("{") && !path.endsWith("stream")) node.append(tryIt(method, path));
  node.append(el("h3", {}, "Answers"));
  const answers = Object.entries(operation.responses).map(([status, answer]) => row(status, false, Object.keys(answer.content ?? {}).join(", "), answer.description));
  node.append(table(answers));
  const [media] = Object.values(operation.responses["200"].content);
  if (media.example !== undefined) {
    const text = typeof media.example === "string" ? media.example : JSON.stringify(media.example, null, 2);
    node.append(el("h3", {}, "Example of an answer"), el("pre", { tabIndex: 0 }, el("code", {}, text)));
  }
  return node;
}

function table(rows) {
  return el("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Fields" },
    el("table", {}, el("tbody", {}, ...rows)));
}

function row(name, required, type, text) {
  return el("tr", {}, el("td", {}, name, required ? el("span", { class: "required", title: "required" }, " *") : null), el("td", {}, type), el("td", {}, text));
}

function resolve(schema) {
  return schema.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema;
}

/** Return the rows of an object's fields; the field of an object of its own has those below it. */
function fields(schema, prefix = "", depth = 0) {
  const entries = Object.entries(schema.properties ?? {}), optional = ([name]) => !schema.required?.includes(name);
  return entries.sort((a, b) => optional(a) - optional(b)).flatMap(([name, field]) => {
    const inner = [field, ...(field.anyOf ?? [])].map(resolve).find((each) => each?.properties);
    const own = row(prefix + name, schema.required?.includes(name), typeOf(field), textOf(field));
    return inner && depth < MAX_DEPTH ? [own, ...fields(inner, `${prefix}${name}.`, depth + 1)] : [own];
  });
}

function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return typeOf({ ...resolve(schema), $ref: undefined }) || "object";
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return [...new Set(several.map(typeOf))].filter((each) => each && each !== "null").join(" or ");
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items) || "values"}`;
  return [schema.type ?? ""].flat().filter((each) => each !== "null").join(" or ");
}

function textOf(schema) {
  const bounds = [schema, ...(schema.anyOf ?? [])].flatMap((each) => [
    each.minimum !== undefined ? `at least ${each.minimum}` : "",
    each.maximum !== undefined ? `at most ${each.maximum}` : "",
    each.maxLength !== undefined ? `at most ${each.maxLength} characters` : "",
    each.maxItems !== undefined ? `at most ${each.maxItems} entries` : "",
  ]);
  return [schema.description ?? "", bounds.filter(Boolean).join(", ")].filter(Boolean).join(" ");
}

/** Return a form that sends a request and shows the answer as text. */
function tryIt(method, path, example) {
  const area = example === undefined ? null : el("textarea", { class: "code", rows: 8, spellcheck: false, "aria-label": "Body", value: JSON.stringify(example, null, 2) });
  const button = el("button", { type: "button" }, "Send"), output = el("pre", { tabIndex: 0, hidden: true, "aria-label": "Answer", role: "status" });
  button.onclick = async () => {
    button.disabled = true;
    output.hidden = false;
    output.textContent = "…";
    try {
      const options = area ? { method: method.toUpperCase(), body: area.value, headers: { "content-type": "application/json" } } : {};
      const text = await (await request(path.slice(1), options)).text();
      output.textContent = pretty(text);
    } catch (error) {
      output.textContent = error.message;
    }
    button.disabled = false;
  };
  return el("div", {}, el("h3", {}, "Try it"), area, el("div", { class: "docs-bar" }, button), output);
}

start();
