// Markdown to DOM nodes. Text reaches the document by text nodes alone, so no text can become an element or a script.
// Images are not loaded: a model could send what it knows to their addresses.

import { el } from "./dom.js";

const MAX_DEPTH = 12;
const MAX_TRIES = 50; // marks that are looked at as the end of an emphasis
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,}$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const ESCAPED = /[!-/:-@[-`{-~]/;

/** Renders a growing text into a node, and keeps the nodes of blocks that did not change. */
export class Markdown {
  constructor(node) {
    this.node = node;
    this.sources = [];
  }

  render(text) {
    const sources = split(text.replace(/\r\n?/g, "\n").split("\n"));
    let same = 0;
    while (same < this.sources.length && same < sources.length && this.sources[same] === sources[same]) same += 1;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    for (const source of sources.slice(same)) this.node.append(block(source.split("\n"), 0));
    this.sources = sources;
  }
}

export function render(text) {
  const node = el("div", { class: "md" });
  new Markdown(node).render(text);
  return node;
}

/** Split lines into the sources of top-level blocks. */
function split(lines) {
  const sources = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = endOf(lines, at);
    sources.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return sources;
}

/** Return the index after the block that begins at `at`. */
function endOf(lines, at) {
  const fence = FENCE.exec(lines[at]);
  let end = at + 1;
  if (fence) {
    while (end < lines.length && !closes(lines[end], fence[1])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(lines[at]) || RULE.test(lines[at])) return end;
  if (ITEM.test(lines[at])) {
    const numbered = /\d/.test(ITEM.exec(lines[at])[2]);
    while (end < lines.length) {
      const line = lines[end], item = ITEM.exec(line);
      if (!line.trim()) {
        const next = lines.slice(end).find((each) => each.trim());
        if (next === undefined || !(/^\s+/.test(next) || (ITEM.test(next) && /\d/.test(ITEM.exec(next)[2]) === numbered))) break;
      } else if (!/^\s/.test(line)) {
        if (item ? /\d/.test(item[2]) !== numbered || RULE.test(line) : begins(line)) break;
        if (!item && !lines[end - 1].trim()) break;
      }
      end += 1;
    }
    return end;
  }
  const quoted = /^ {0,3}>/.test(lines[at]);
  while (end < lines.length && lines[end].trim()) {
    if (quoted ? !/^ {0,3}>/.test(lines[end]) : begins(lines[end]) || (ITEM.test(lines[end]) && !lines[at].includes("|"))) break;
    end += 1;
  }
  return end;
}

function closes(line, fence) {
  const found = /^ {0,3}(`{3,}|~{3,})\s*$/.exec(line);
  return found !== null && found[1][0] === fence[0] && found[1].length >= fence.length;
}

function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || /^ {0,3}>/.test(line);
}

function block(lines, depth) {
  const [first] = lines, fence = FENCE.exec(first), heading = HEADING.exec(first);
  if (fence) return code(lines, fence);
  if (heading) return el(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2], depth));
  if (RULE.test(first)) return el("hr");
  if (depth < MAX_DEPTH && /^ {0,3}>/.test(first)) {
    return el("blockquote", {}, ...blocks(lines.map((line) => line.replace(/^ {0,3}> ?/, "")), depth + 1));
  }
  if (depth < MAX_DEPTH && ITEM.test(first)) return list(lines, depth);
  if (lines.length > 1 && first.includes("|") && DIVIDER.test(lines[1])) return table(lines, depth);
  return el("p", {}, ...inline(lines.map((line) => line.trimStart()).join("\n"), depth));
}

function blocks(lines, depth) {
  return split(lines).map((source) => block(source.split("\n"), depth));
}

function code(lines, fence) {
  const closed = lines.length > 1 && closes(lines.at(-1), fence[1]);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const language = fence[2].trim().split(/\s+/)[0].slice(0, 32);
  const copy = el("button", { type: "button", class: "quiet copy" }, "Copy");
  copy.onclick = () => copied(copy, text);
  return el(
    "figure",
    { class: "codeblock" },
    el("figcaption", {}, el("span", {}, language || "text"), copy),
    el("pre", { tabIndex: 0 }, el("code", {}, ...highlighted(text, language))),
  );
}

/** Copy a text, and say so on the button. */
export async function copied(button, text) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = label), 1200);
}

function list(lines, depth) {
  const start = ITEM.exec(lines[0]), ordered = /\d/.test(start[2]);
  const node = el(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(start[2], 10);
  let item = [], width = 0;
  const indent = start[1].length;
  const flush = () => {
    if (!item.length) return;
    const tight = !item.some((line) => !line.trim());
    const children = blocks(item, depth + 1);
    const task = /^\[([ xX])\]\s/.exec(item[0]);
    const parts = children.flatMap((each) => (tight && each.localName === "p" ? [...each.childNodes] : [each]));
    if (task && parts[0]?.nodeType === 3) {
      parts[0].data = parts[0].data.slice(4);
      parts.unshift(el("input", { type: "checkbox", checked: task[1] !== " ", disabled: true }));
    }
    node.append(el("li", {}, ...parts));
  };
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent + 1) {
      flush();
      width = found[0].length;
      item = [line.slice(found[0].length)];
    } else {
      item.push(line.slice(Math.min(width, line.length - line.trimStart().length)));
    }
  }
  flush();
  return node;
}

function table(lines, depth) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const sides = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  const row = (line, name) => {
    const found = cells(line).slice(0, sides.length);
    return el("tr", {}, ...found.map((cell, place) => el(name, { class: sides[place] }, ...inline(cell, depth + 1))));
  };
  const body = lines.slice(2).map((line) => row(line, "td"));
  return el("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...body)));
}

/** Return the nodes of a text with code, emphasis and links. */
function inline(text, depth) {
  const nodes = [];
  let plain = "", at = 0;
  const push = (...more) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(...more);
  };
  const missing = new Set(); // marks without a partner further on: each is looked for once
  const find = (mark, from) => {
    if (missing.has(mark)) return -1;
    const found = text.indexOf(mark, from);
    if (found < 0) missing.add(mark);
    return found;
  };
  while (at < text.length) {
    const char = text[at], rest = text.slice(at, at + 3);
    if (char === "\\" && at + 1 < text.length && (ESCAPED.test(text[at + 1]) || text[at + 1] === "\n")) {
      if (text[at + 1] === "\n") push(el("br"));
      else plain += text[at + 1];
      at += 2;
    } else if (char === "`") {
      const ticks = /^`+/.exec(text.slice(at, at + 16))[0];
      let end = find(ticks, at + ticks.length);
      let tries = 0;
      while (end >= 0 && text[end + ticks.length] === "`") end = ++tries > MAX_TRIES ? -1 : text.indexOf(ticks, end + ticks.length + 1);
      if (end < 0) {
        plain += ticks;
        at += ticks.length;
      } else {
        push(el("code", {}, text.slice(at + ticks.length, end).replaceAll("\n", " ").replace(/^ (.+) $/, "$1")));
        at = end + ticks.length;
      }
    } else if (char === "\n") {
      if (plain.endsWith("  ")) {
        plain = plain.trimEnd();
        push(el("br"));
      } else plain += "\n";
      at += 1;
    } else if (depth < MAX_DEPTH && (char === "*" || char === "_" || rest.startsWith("~~"))) {
      const mark = rest.startsWith(char + char) ? char + char : char;
      const opens = !/\s|^$/.test(text[at + mark.length] ?? "") && !(char === "_" && /\w/.test(text[at - 1] ?? ""));
      let end = opens ? find(mark, at + mark.length) : -1;
      let tries = 0;
      while (end >= 0 && (/\s/.test(text[end - 1]) || (mark.length === 1 && text[end + 1] === char) || (char === "_" && /\w/.test(text[end + mark.length] ?? "")))) {
        end = ++tries > MAX_TRIES ? -1 : text.indexOf(mark, end + (mark.length === 1 && text[end + 1] === char ? 2 : 1));
      }
      if (end < 0 || end === at + mark.length) {
        plain += mark;
        at += mark.length;
      } else {
        const name = mark === "~~" ? "del" : mark.length === 2 ? "strong" : "em";
        push(el(name, {}, ...inline(text.slice(at + mark.length, end), depth + 1)));
        at = end + mark.length;
      }
    } else if (depth < MAX_DEPTH && (char === "[" || rest.startsWith("!["))) {
      const open = char === "[" ? at : at + 1;
      const middle = find("](", open), end = middle < 0 ? -1 : closing(text, middle + 2);
      const between = middle < 0 ? "" : text.slice(open + 1, middle);
      if (end < 0 || between.includes("[") || between.length > 2000) {
        plain += char;
        at += 1;
      } else {
        const target = text.slice(middle + 2, end).trim().split(/\s+"/)[0].replace(/^<|>$/g, "");
        push(link(target, ...(open === at ? inline(between, depth + 1) : [`image: ${between || target}`])));
        at = end + 1;
      }
    } else if (char === "h" && /^https?:\/\//.test(text.slice(at, at + 8)) && !/\w/.test(text[at - 1] ?? "")) {
      const target = /^[^\s<>"'`|]+/.exec(text.slice(at, at + 2048))[0].replace(/[.,;:!?)\]*_]+$/, "");
      push(link(target, target));
      at += target.length;
    } else {
      plain += char;
      at += 1;
    }
  }
  push();
  return nodes;
}

/** Return the index of the parenthesis that ends a link's target, or -1. */
function closing(text, from) {
  let open = 0;
  for (let at = from; at < text.length && at < from + 2048 && text[at] !== "\n"; at += 1) {
    if (text[at] === "(") open += 1;
    else if (text[at] === ")" && open-- === 0) return at;
  }
  return -1;
}

/** Return a link to another site; of other targets, the text and the target without a link. */
function link(target, ...children) {
  let url = null;
  try {
    url = new URL(target);
  } catch {
    // a relative target would lead into this server
  }
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return el("span", { title: target }, ...children);
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, ...children);
}

const WORDS = new Set(
  ("abstract and as async await bool break case catch char class const continue def default del delete do double elif else " +
    "enum except export extends false False final finally float fn for from func function global go if impl import in int " +
    "interface is lambda let long loop match mod mut new nil none None not null or package pass private protected public " +
    "pub raise return self static string struct super switch this throw true True try type typeof undefined union use var " +
    "void when where while with yield select SELECT FROM WHERE INSERT UPDATE JOIN GROUP ORDER BY").split(" "),
);
const HASH = new Set(["python", "py", "sh", "bash", "shell", "yaml", "yml", "toml", "ruby", "rb", "r", "perl", "make"]);

/** Return code with marked comments, strings, numbers and words that most languages reserve. */
function highlighted(text, language) {
  if (!language || language === "text" || text.length > 50_000) return [text];
  const comment = HASH.has(language) ? "#[^\\n]*" : language === "sql" ? "--[^\\n]*" : "\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?\\*\\/";
  const token = new RegExp(`(${comment})|("(?:\\\\.|[^"\\\\\\n])*"|'(?:\\\\.|[^'\\\\\\n])*')|\\b(\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
  const nodes = [];
  let last = 0;
  for (const found of text.matchAll(token)) {
    const kind = found[1] ? "c" : found[2] ? "s" : found[3] ? "n" : WORDS.has(found[4]) ? "k" : "";
    if (!kind) continue;
    nodes.push(text.slice(last, found.index), el("span", { class: `hl-${kind}` }, found[0]));
    last = found.index + found[0].length;
  }
  nodes.push(text.slice(last));
  return nodes;
}
