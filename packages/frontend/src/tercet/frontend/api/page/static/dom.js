// Elements, and values as text.

const byId = new Map();

export function get(id) {
  if (!byId.has(id)) byId.set(id, document.getElementById(id));
  return byId.get(id);
}

/** Make an element. `fields` are properties, `data-*`, `aria-*` and `role` are attributes; children are nodes or text. */
export function el(name, fields = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(fields)) {
    if (value === undefined || value === null) continue;
    if (key === "class") node.className = value;
    else if (key.includes("-") || key === "role" || key === "scope") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children.filter((each) => each !== null && each !== undefined));
  return node;
}

export function svg(name, fields = {}) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(fields)) node.setAttribute(key, value);
  return node;
}

/** Replace a node's text if it differs: a selection in an unchanged text stays. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Return JSON with indentation; other text, such as JSON that is still arriving, as it is. */
export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function number(value, digits = 0) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function seconds(value) {
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

export function percent(part, whole) {
  const value = (100 * part) / whole;
  return whole > 0 ? `${number(value, value > 0 && value < 9.95 ? 1 : 0)}%` : "–";
}
