// The radix tree of one scheduler's prefix cache: a row for each depth, a box for each node, as wide as its pages.

import { el, number, say } from "./dom.js";

const MAX_ROWS = 8;

/** Show the tree in a node. The focused box stays focused by its place in the list. */
export function showTree(box, { peer, prefixes, load }) {
  if (!box.children.length) {
    const tree = el("div", { class: "tree", role: "tree", "aria-label": `Prefix cache of ${peer}` });
    box.append(el("p", { class: "treehead" }), tree, el("p", { class: "treefoot", "aria-live": "polite" }));
    tree.onkeydown = (event) => move(event, tree);
    for (const name of ["focusin", "mouseover"]) tree.addEventListener(name, (event) => describe(box, event.target));
  }
  const [head, tree, foot] = box.children;
  const key = JSON.stringify(prefixes);
  if (tree.dataset.key === key) return;
  tree.dataset.key = key;
  const shown = prefixes.reduce((all, each) => all + each.pages, 0);
  say(head, `${peer}: ${number(load.pages_cached)} pages in the cache${shown < load.pages_cached ? `, the largest nodes with ${number(shown)} are shown` : ""}`);
  const nodes = laidOut(prefixes), focused = tree.contains(document.activeElement) ? document.activeElement.dataset.index : null;
  tree.replaceChildren(...nodes.map((node) => boxOf(node, load.page_size)));
  const depth = Math.max(0, ...nodes.map((node) => node.depth + 1));
  tree.style.height = `${depth * 1.75}rem`;
  tree.hidden = !nodes.length;
  const entry = tree.querySelector(`[data-index="${focused ?? 0}"]`) ?? tree.firstElementChild;
  if (entry) entry.tabIndex = 0;
  if (focused !== null) entry?.focus();
  if (!nodes.length) say(foot, "The cache is empty.");
  else if (!foot.textContent || foot.textContent === "The cache is empty.") say(foot, "Point at a node, or use the arrow keys.");
}

/** Return the nodes with their depth, left edge and width; a parent is as wide as its subtree. */
function laidOut(prefixes) {
  const nodes = prefixes.map((each, index) => ({ ...each, index, below: [], weight: each.pages }));
  const roots = [];
  for (const node of nodes) (node.parent < 0 ? roots : nodes[node.parent].below).push(node);
  for (const node of [...nodes].reverse()) if (node.parent >= 0) nodes[node.parent].weight += node.weight;
  const placed = [];
  const place = (siblings, left, width, depth) => {
    if (depth >= MAX_ROWS) return;
    const all = siblings.reduce((sum, each) => sum + each.weight, 0);
    let at = left;
    for (const node of siblings.sort((a, b) => b.weight - a.weight)) {
      Object.assign(node, { depth, left: at, width: (width * node.weight) / all });
      placed.push(node);
      // the node's own pages keep a share of the width without children
      place(node.below, at, (node.width * (node.weight - node.pages)) / node.weight || 0, depth + 1);
      at += node.width;
    }
  };
  place(roots, 0, 100, 0);
  return placed;
}

function boxOf(node, pageSize) {
  const tokens = node.pages * pageSize;
  const text = `${number(tokens)} tokens in ${number(node.pages)} ${node.pages === 1 ? "page" : "pages"}, ` +
    `${node.users ? `used by ${number(node.users)} running` : "not in use"}, ${number(node.children)} ${node.children === 1 ? "branch" : "branches"}`;
  const item = el("div", {
    role: "treeitem", tabIndex: -1, class: node.users ? "used" : "idle", "aria-level": node.depth + 1, "aria-label": text,
    "data-index": node.index, "data-parent": node.parent,
  }, node.width > 4 ? number(tokens) : "");
  item.style.left = `${node.left}%`;
  item.style.width = `${node.width}%`;
  item.style.top = `${node.depth * 1.75}rem`;
  return item;
}

function describe(box, item) {
  if (item.getAttribute("role") === "treeitem") say(box.lastElementChild, item.getAttribute("aria-label"));
}

function move(event, tree) {
  const item = event.target, { index, parent } = item.dataset;
  const siblings = [...tree.querySelectorAll(`[data-parent="${parent}"]`)], at = siblings.indexOf(item);
  const next = {
    ArrowRight: siblings[at + 1],
    ArrowLeft: siblings[at - 1],
    ArrowDown: tree.querySelector(`[data-parent="${index}"]`),
    ArrowUp: tree.querySelector(`[data-index="${parent}"]`),
    Home: tree.firstElementChild,
    End: tree.lastElementChild,
  }[event.key];
  if (!next) return;
  event.preventDefault();
  item.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
