"use strict";
// Everything from models and files is put in by textContent alone.

const ROW = 68, HEIGHT = 58, EDGE = 12;
const ALONE = {column: 200, width: 168, root: 44}, BESIDE = {column: 134, width: 120, root: 34};
const SVG = "http://www.w3.org/2000/svg";
const index = JSON.parse(document.getElementById("index").textContent);
const packed = JSON.parse(document.getElementById("trees").textContent);
const trees = index.trees.map((tree, place) => ({...tree, place, key: `${tree.split} ${tree.root}`}));
const $ = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function number(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? String(value) : value.toFixed(digits);
}

// --- the list of questions -------------------------------------------------------------------------------------------

const byQuestion = new Map();
for (const tree of trees) byQuestion.set(tree.key, [...(byQuestion.get(tree.key) ?? []), tree]);
for (const same of byQuestion.values()) same.sort((one, other) => one.iteration - other.iteration);

const isRight = (tree) => tree.score !== null && tree.score >= 0.5;
const first = (tree) => byQuestion.get(tree.key)[0];
const changed = (tree) => first(tree) !== tree && isRight(first(tree)) !== isRight(tree);
const FILTERS = {
  all: () => true,
  wrong: (tree) => tree.score !== null && !isRight(tree),
  right: isRight,
  changed,
  zero: (tree) => tree.zero,
  illegal: (tree) => tree.illegal,
};

function listIterations() {
  const found = new Map();
  for (const tree of trees) found.set(`${tree.split} ${tree.iteration}`, [tree.split, tree.iteration]);
  const sorted = [...found].sort(([, a], [, b]) => a[0].localeCompare(b[0]) || a[1] - b[1]);
  for (const [value, [split, iteration]] of sorted) {
    $("iteration").append(make("option", {value, textContent: `${split}, iteration ${iteration}`}));
  }
  const dev = sorted.filter(([, [split]]) => split === "dev");
  $("iteration").value = (dev.length ? dev : sorted).at(-1)[0];
}

let open = null, other = null;

function listQuestions() {
  const words = $("search").value.trim().toLowerCase();
  const now = trees.filter((tree) => `${tree.split} ${tree.iteration}` === $("iteration").value);
  const shown = now.filter((tree) => FILTERS[$("filter").value](tree)
    && (!words || `${tree.question ?? ""} ${tree.id ?? ""} ${tree.root}`.toLowerCase().includes(words)));
  $("questions").replaceChildren(...shown.map(questionItem));
  const left = index.found - trees.length;
  $("said").textContent = `${shown.length} of ${now.length} questions`
    + (left ? `; ${left} older trees are left out, choose them with --iteration or --question` : "");
  const current = $("questions").querySelector("[aria-current]") ?? $("questions").querySelector("button");
  if (current) current.tabIndex = 0;
}

function questionItem(tree) {
  const turn = changed(tree) ? (isRight(tree) ? " ▲ was wrong" : " ▼ was right") : "";
  const score = make("span", {className: isRight(tree) ? "good" : "bad", textContent: number(tree.score) + turn});
  const marks = (tree.zero ? " · zero spread" : "") + (tree.illegal ? " · illegal" : "");
  const button = make("button", {type: "button", tabIndex: -1},
    make("span", {textContent: tree.question ?? `question ${tree.root}`}), make("br"), score,
    make("span", {className: "quiet", textContent: ` · ${tree.nodes} nodes${marks}`}));
  if (open && open.key === tree.key) button.setAttribute("aria-current", "true");
  button.addEventListener("click", () => show(tree, button));
  return make("li", {}, button);
}

function moveInList(event) {
  const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
  if (!step) return;
  event.preventDefault();
  const buttons = [...$("questions").querySelectorAll("button")];
  focusOnly(buttons, buttons[buttons.indexOf(document.activeElement) + step]);
}

function focusOnly(elements, chosen) {
  if (!chosen) return;
  for (const element of elements) element.tabIndex = element === chosen ? 0 : -1;
  chosen.focus();
}

// --- one question, one iteration or two ------------------------------------------------------------------------------

async function unpack(tree) {
  const bytes = Uint8Array.from(atob(packed[tree.place]), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

async function show(tree, button) {
  for (const each of $("questions").querySelectorAll("[aria-current]")) each.removeAttribute("aria-current");
  if (button) {
    button.setAttribute("aria-current", "true");
    focusOnly([...$("questions").querySelectorAll("button")], button);
  }
  open = tree;
  other = $("filter").value === "changed" ? first(tree) : null;
  await draw();
  if (matchMedia("(max-width: 760px)").matches) $("view").scrollIntoView();
}

async function draw() {
  const tree = open;
  if (!tree) return;
  const choice = make("select", {id: "other"}, make("option", {value: "", textContent: "nothing"}));
  for (const same of byQuestion.get(tree.key)) {
    if (same === tree) continue;
    const text = `iteration ${same.iteration} (score ${number(same.score)})`;
    choice.append(make("option", {value: String(same.place), textContent: text, selected: same === other}));
  }
  choice.addEventListener("change", async () => {
    other = choice.value ? trees[Number(choice.value)] : null;
    await draw();
    $("other").focus();
  });
  const panels = make("div", {className: "panels"});
  for (const each of other ? [other, tree].sort((a, b) => a.iteration - b.iteration) : [tree]) {
    panels.append(panel(each, await unpack(each), other ? BESIDE : ALONE));
  }
  if (tree !== open) return; // another question was opened meanwhile
  $("view").replaceChildren(
    make("p", {className: "question", textContent: tree.question ?? `Question ${tree.root}`}),
    make("p", {}, make("label", {}, "Beside it ", choice)), panels);
}

function panel(tree, {nodes, prompts}, size) {
  const detail = make("div", {className: "detail"});
  const episode = nodes.find((node) => node.episode)?.episode;
  const gold = episode?.gold === undefined ? "" : ` · gold: ${[episode.gold].flat().join(" | ")}`;
  return make("article", {className: "panel"},
    make("h2", {textContent: `${tree.split}, iteration ${tree.iteration}`}),
    make("p", {className: "quiet", textContent: `score ${number(tree.score)}${gold}`}),
    drawTree(nodes, size, (node) => detail.replaceChildren(...describe(node, nodes, prompts))), detail);
}

// --- the tree --------------------------------------------------------------------------------------------------------

function places(nodes, {column, root}) {
  const depth = [], children = nodes.map(() => []), roots = [];
  for (const node of nodes) {
    depth.push(node.previous === null ? 0 : depth[node.previous] + 1);
    (node.previous === null ? roots : children[node.previous]).push(node.node);
  }
  const row = [];
  let rows = 0;
  const stack = [...roots].reverse(), order = [];
  while (stack.length) {
    const top = stack.pop();
    order.push(top);
    stack.push(...[...children[top]].reverse());
  }
  for (const each of order) if (!children[each].length) row[each] = rows++;
  for (const each of order.reverse()) {
    const mine = children[each];
    if (mine.length) row[each] = (row[mine[0]] + row[mine.at(-1)]) / 2;
  }
  const place = (each) => ({x: root + depth[each] * column, y: EDGE + row[each] * ROW});
  return {place, children, columns: Math.max(...depth) + 1, rows};
}

function drawTree(nodes, size, chosen) {
  const {place, children, columns, rows} = places(nodes, size);
  const line = (from, to, name) => edge({x: from.x + size.width, y: from.y}, to, name);
  const box = make("div", {className: "tree"});
  const area = {width: size.root + columns * size.column, height: rows * ROW + 2 * EDGE};
  const lines = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries(area)) lines.setAttribute(name, value);
  const root = {x: EDGE + 10 - size.width, y: (rows - 1) * ROW / 2 + EDGE};
  for (const node of nodes) {
    if (node.previous === null) lines.append(line(root, place(node.node), ""));
    for (const parent of node.parents ?? []) lines.append(line(place(parent), place(node.node), ""));
    const after = node.previous !== null && !(node.parents ?? []).includes(node.previous);
    if (after) lines.append(line(place(node.previous), place(node.node), "only-after"));
  }
  const dot = document.createElementNS(SVG, "circle");
  for (const [name, value] of Object.entries({cx: EDGE + 5, cy: root.y + HEIGHT / 2, r: 5})) dot.setAttribute(name, value);
  lines.append(dot);
  const space = make("div");
  space.style.width = `${area.width}px`;
  space.style.height = `${area.height}px`;
  const buttons = nodes.map((node) => nodeButton(node, nodes, place(node.node), size.width));
  buttons.forEach((button, each) => button.addEventListener("click", () => {
    for (const one of buttons) one.setAttribute("aria-pressed", String(one === button));
    focusOnly(buttons, button);
    chosen(nodes[each]);
  }));
  if (buttons.length) buttons[0].tabIndex = 0;
  box.addEventListener("keydown", (event) => {
    const at = buttons.indexOf(document.activeElement);
    if (at < 0) return;
    const column = nodes.map((_, each) => each).filter((each) => place(each).x === place(at).x);
    const up = column.sort((a, b) => place(a).y - place(b).y);
    const to = {
      ArrowLeft: nodes[at].previous, ArrowRight: children[at][0],
      ArrowUp: up[up.indexOf(at) - 1], ArrowDown: up[up.indexOf(at) + 1],
    }[event.key];
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    if (to !== null && to !== undefined) focusOnly(buttons, buttons[to]);
  });
  box.append(lines, space, ...buttons);
  return box;
}

function edge(from, to, name) {
  const path = document.createElementNS(SVG, "path");
  const [x, y, x2, y2] = [from.x, from.y + HEIGHT / 2, to.x, to.y + HEIGHT / 2];
  const bend = (x2 - x) / 2;
  path.setAttribute("d", `M${x} ${y} C${x + bend} ${y} ${x2 - bend} ${y2} ${x2} ${y2}`);
  path.setAttribute("class", name);
  return path;
}

function nodeButton(node, nodes, {x, y}, width) {
  const numbers = `R ${number(node.reward)}` + (node.advantage === null ? "" : `  A ${number(node.advantage)}`);
  const wrong = (node.metrics.illegal > 0 ? " ⚠ illegal" : "") + (node.truncated ? " ✂ cut off" : "");
  const again = nodes.some((one) => one.agent === node.agent && one.act > 0) ? ` ${node.act + 1}` : "";
  const said = (node.response ?? "").trim();
  const button = make("button", {type: "button", tabIndex: -1, className: "node"},
    make("span", {className: "agent", textContent: `${node.agent}${again}${wrong}`}),
    make("span", {className: said ? "" : "quiet", textContent: said || "said nothing"}),
    make("span", {className: "numbers", textContent: numbers}));
  if (!node.trained) button.classList.add("untrained");
  button.style.width = `${width}px`;
  button.style.left = `${x}px`;
  button.style.top = `${y}px`;
  const value = $("colour").value === "reward" ? node.reward : node.advantage ?? node.reward;
  button.style.backgroundImage = shade(value ?? 0, 2);
  button.setAttribute("aria-pressed", "false");
  return button;
}

function shade(value, full) {
  const strength = Math.min(Math.abs(value) / full, 1) * 0.55;
  const colour = `rgba(var(--${value > 0 ? "plus" : "minus"}), ${strength.toFixed(3)})`;
  return `linear-gradient(${colour}, ${colour})`;
}

// --- one node --------------------------------------------------------------------------------------------------------

function describe(node, nodes, prompts) {
  const facts = {
    reward: `${number(node.reward)} (shared ${number(node.shared)}, own ${number(node.specific)})`,
    advantage: number(node.advantage, 3), group: node.group === null ? "–" : number(node.group) + (node.zero ? ", zero spread" : ""),
    trained: node.trained ? "yes" : "no", ...node.metrics, ...(node.scores ?? {}),
  };
  const list = make("dl", {className: "facts"});
  for (const [name, value] of Object.entries(facts)) {
    const shown = typeof value === "number" ? number(value, 3) : String(value ?? "–");
    list.append(make("div", {}, make("dt", {textContent: name}), make("dd", {textContent: shown})));
  }
  return [
    make("h3", {textContent: `${node.agent}: response`}), response(node),
    make("h3", {textContent: "Numbers"}), list,
    ...episode(endBelow(node, nodes)),
    make("h3", {textContent: "Prompt"}), make("pre", {className: "prompt", textContent: prompts[node.prompt], tabIndex: 0}),
  ];
}

function response(node) {
  const text = make("pre", {className: "response", tabIndex: 0});
  (node.tokens ?? [node.response]).forEach((token, place) => {
    const logprob = node.logprobs[place], inserted = node.said && !node.said[place];
    const span = make("span", {textContent: token, className: inserted ? "inserted" : ""});
    if (!inserted && logprob !== null && logprob !== undefined) {
      const advantage = node.advantages ? `, advantage ${number(node.advantages[place], 3)}` : "";
      span.title = `log-probability ${number(logprob, 3)} (${(100 * Math.exp(logprob)).toFixed(1)} %)${advantage}`;
      span.style.backgroundColor = `rgba(var(--minus), ${(Math.min(-logprob / 4, 1) * 0.6).toFixed(3)})`;
    }
    text.append(span);
  });
  return text;
}

function endBelow(node, nodes) {
  let below = node;
  while (below && !below.episode) below = nodes.find((one) => one.previous === below.node);
  return below?.episode ?? null;
}

function episode(end) {
  if (!end) return [];
  const parts = [];
  const passages = Array.isArray(end.passages) ? end.passages.filter((one) => one && typeof one === "object") : [];
  if (passages.length) {
    const supporting = new Set([end.supporting ?? []].flat()), chosen = new Set([end.chosen ?? []].flat());
    const list = make("ol", {className: "passages"});
    for (const passage of passages) {
      const title = make("b", {textContent: passage.title ?? ""}), item = make("li", {}, title);
      if (supporting.has(passage.title)) item.append(make("span", {className: "tag good", textContent: "★ supporting"}));
      if (chosen.has(passage.id)) item.append(make("span", {className: "tag", textContent: "chosen"}));
      item.append(make("br"), String(passage.text ?? ""));
      list.append(item);
    }
    parts.push(make("h3", {textContent: "Passages found in this trajectory"}), list);
  }
  const list = make("dl");
  for (const name of ["queries", "supporting", "answer", "gold"]) {
    if (end[name] === undefined) continue;
    const value = Array.isArray(end[name]) ? end[name].join("\n") : String(end[name]);
    const shown = make("dd", {textContent: value});
    shown.style.whiteSpace = "pre-wrap";
    list.append(make("dt", {textContent: name}), shown);
  }
  if (list.children.length) parts.push(make("h3", {textContent: "The trajectory"}), list);
  return parts;
}

// --- start -----------------------------------------------------------------------------------------------------------

listIterations();
open = trees.find((tree) => `${tree.split} ${tree.iteration}` === $("iteration").value);
listQuestions();
draw();
for (const id of ["iteration", "filter"]) {
  $(id).addEventListener("change", () => {
    if (id === "iteration" && open) {
      open = trees.find((tree) => tree.key === open.key && `${tree.split} ${tree.iteration}` === $("iteration").value) ?? open;
      other = other === open ? null : other;
      draw();
    }
    listQuestions();
  });
}
$("search").addEventListener("input", listQuestions);
$("colour").addEventListener("change", draw);
$("questions").addEventListener("keydown", moveInList);
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input, select")) return;
  event.preventDefault();
  $("search").focus();
});
