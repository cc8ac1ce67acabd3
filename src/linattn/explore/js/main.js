// The page: settings in, pictures out. Heavy work goes to the worker; only the latest request counts.
import { showCell } from "./cell_tip.js";
import { pythonFor } from "./code.js";
import { compute } from "./compute.js";
import { buildControls, DEFAULTS, layout, readLink, TEXTS, writeLink } from "./controls.js";
import { CostView } from "./cost_view.js";
import { drawFigures } from "./figures_view.js";
import { DESIGNS } from "./handmade.js";
import { HeadsView } from "./heads_view.js";
import { KERNELS } from "./kernels.js";
import { Maps } from "./maps.js";
import { short } from "./numbers.js";
import { drawRow } from "./row_view.js";
import { makeSource, readHeads, withNorm } from "./sources.js";
import { StateView } from "./state_view.js";
import { drawTokens, revealToken, shadeTokens } from "./tokens_view.js";

const $ = (id) => document.getElementById(id);
const given = JSON.parse($("data").textContent);
DEFAULTS.causal = given.heads.causal; // an encoder's heads look both ways
const page = { settings: readLink(location.hash), heads: readHeads(given.heads), data: null, result: null, column: null };
globalThis.linattn = page; // for the curious, and for tests

// ---------------------------------------------------------------------------------------------------------- settings
const context = {
  layers() {
    const all = given.live?.model ? page.heads.available : Object.keys(page.heads.layers);
    return all.map((layer) => [String(layer), `${layer} of ${page.heads.model}`]);
  },
  headNumbers() {
    const layer = page.heads.layers[page.settings.layer] || Object.values(page.heads.layers)[0];
    return [...Array(layer.heads).keys()];
  },
  textHint({ source, design }) {
    if (source === "handmade") return `letters A, B, C, at most ${DESIGNS[design].most}`;
    if (source !== "head") return "each character is a token; short texts repeat";
    if (given.live?.model) return "the model reads it when you stop typing";
    return "as saved with the page; to read your own text: linattn explore --model smollm2";
  },
};
const controls = buildControls($("controls"), layout(context), change);

function normalise() {
  const s = page.settings;
  if (s.kernel === "nearfar" || s.kernel === "delta") s.causal = true;
  if (s.source === "head") {
    if (!page.heads.layers[s.layer] && !given.live?.model) s.layer = Number(Object.keys(page.heads.layers)[0]);
    const layer = page.heads.layers[s.layer];
    if (layer) s.head = Math.min(s.head, layer.heads - 1);
    if (!given.live?.model) s.text = page.heads.text;
  } else if (!s.text) s.text = TEXTS[s.source];
  $("c-text").readOnly = s.source === "head" && !given.live?.model;
}

let typing = null;
function change(name, value) {
  const s = page.settings;
  s[name] = value;
  if (name === "source") {
    s.text = value === "head" ? page.heads.text : TEXTS[value];
    s.n = value === "head" ? Math.min(2048, page.heads.tokens.length) : Math.min(64, [...s.text].length);
    s.causal = value === "handmade" ? false : value === "head" ? page.heads.causal : s.causal;
    [s.row, s.at] = [-1, -1];
  }
  if (name === "design") s.text = DESIGNS[value].example;
  if (name === "text" && s.source !== "head" && s.source !== "handmade") s.n = Math.max(1, Math.min(2048, [...value].length));
  if ((name === "text" || name === "layer") && s.source === "head" && given.live?.model) {
    clearTimeout(typing);
    typing = setTimeout(readModel, name === "text" ? 700 : 0);
  }
  if (name === "scale") return remember(), redraw();
  return refresh();
}

function remember() {
  controls.update(page.settings);
  const link = writeLink({ ...page.settings, text: page.settings.source === "head" && !given.live?.model ? "" : page.settings.text });
  history.replaceState(null, "", link ? `#${link}` : location.pathname + location.search);
}

/** Asks the server for the heads of a layer on the reader's text. */
async function readModel() {
  const { text, layer } = page.settings;
  if (!text.trim()) return;
  $("status").textContent = "the model reads …";
  try {
    page.heads = readHeads(await ask("/api/heads", { text, layer }));
    page.settings.n = Math.min(2048, page.heads.tokens.length);
    refresh();
  } catch (error) {
    $("status").textContent = error.message;
  }
}

async function ask(path, question) {
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question) });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

// ----------------------------------------------------------------------------------------------------------- computing
let worker = null;
try {
  worker = new Worker(globalThis.linattnWorker("worker.js"));
  worker.onmessage = ({ data: { id, result } }) => id === request && arrived(result, asked);
  worker.onerror = (event) => {
    event.preventDefault();
    worker = null; // the page can do it alone
    refresh();
  };
} catch {
  worker = null;
}
let request = 0;
let asked = null; // the data of the latest request: the page shows the former until its weights arrive
let started = 0;
const SMALL = 130; // tokens that the page computes at once, so that a slider shows its effect without delay

function refresh() {
  normalise();
  remember();
  const { settings } = page;
  asked = withNorm(makeSource(settings, page.heads), settings.norm);
  request++;
  started = performance.now();
  page.busy = true;
  if (asked.n <= SMALL || !worker) {
    arrived(compute(asked, settings), asked);
  } else {
    $("status").textContent = `computing ${asked.n} × ${asked.n} weights …`;
    worker.postMessage({ id: request, data: asked, settings: { ...settings } });
  }
}

function arrived(result, data) {
  Object.assign(page, { result, data });
  page.shown = { data: page.data, settings: { ...page.settings } };
  page.busy = false;
  page.column = null;
  $("status").textContent = `${page.data.n} tokens, D = ${page.data.dim}; computed here in ${Math.round(performance.now() - started)} ms`;
  maps.show(result, page.data, page.settings.scale);
  drawTokens($("tokens"), page.data.tokens);
  drawFigures($("figures"), result, page.settings.kernel);
  const at = page.settings.at < 0 ? Math.min(page.data.n - 1, Math.floor(page.data.n / 2)) : page.settings.at;
  state.token = at;
  state.show(page.data, { ...page.settings }, result);
  cost.show(page.data, page.settings);
  headsView.show(page.settings, page.heads);
  $("code").textContent = pythonFor(page.settings, page.data, page.heads);
  $("kernel-name").textContent = KERNELS[page.settings.kernel].label;
  $("about").textContent = about();
  choose(page.settings.row < 0 ? page.data.n - 1 : page.settings.row, null, true);
}

function about() {
  const { source, layer, head, design } = page.settings;
  const { n, dim } = page.data;
  const from = {
    head: `Layer ${layer}, head ${head} of ${page.heads.model} reads ${n} tokens (D = ${dim}).`,
    letters: `Every character has one random vector of ${dim} numbers as query and key, so a character looks for its like.`,
    gaussian: `Independent Gaussian queries, keys and values of ${dim} numbers: the hardest case, without any structure to find.`,
    handmade: `“${design}”: ${DESIGNS[design].about}; all weights set by hand (D = ${dim}).`,
  };
  return from[source];
}

// --------------------------------------------------------------------------------------------------------------- views
const tip = $("tip");
const maps = new Maps({ exact: $("map-exact"), implied: $("map-implied"), difference: $("map-difference") }, {
  choose: (row, column) => choose(row, column),
  point: (event, row, column) => showCell(tip, event, { ...page, row, column }),
  leave: () => (tip.hidden = true),
});
const state = new StateView(
  { canvas: $("state"), maths: $("maths"), slider: $("at"), name: $("at-name"), play: $("play"), note: $("state-note") },
  (token) => {
    page.settings.at = token;
    remember();
    choose(token, page.column, true);
  },
);
const cost = new CostView(given, ask);
const headsView = new HeadsView($("heads"), $("heads-note"), (head) => change("head", head));

const name = (i) => `“${page.data.tokens[i]}”`;

/** Chooses a query, and a key or none. quiet: the link keeps following the last token. */
function choose(row, column, quiet = false) {
  const last = page.data.n - 1;
  page.row = Math.max(0, Math.min(last, row));
  page.column = column === null ? null : Math.max(0, Math.min(last, column));
  if (!quiet) {
    page.settings.row = page.row;
    remember();
  }
  maps.select(page.row, page.column);
  drawRowView();
  revealToken($("tokens"), page.row);
  shadeTokens($("tokens"), page);
}

let columnAt = () => 0;
function drawRowView() {
  const { result, data, row, column, settings } = page;
  columnAt = drawRow($("row"), { result, data, row, column, causal: settings.causal });
  const { n } = data;
  const seen = settings.causal ? row + 1 : n;
  let [best, l1] = [0, 0];
  for (let j = 0; j < seen; j++) {
    if (result.exact[row * n + j] > result.exact[row * n + best]) best = j;
    l1 += Math.abs(result.exact[row * n + j] - result.implied[row * n + j]);
  }
  $("row-note").textContent =
    `Query ${row + 1} ${name(row)} looks most at key ${best + 1} ${name(best)}: ${short(result.exact[row * n + best])} by softmax (bars), ` +
    `${short(result.implied[row * n + best])} by the kernel (line). The rows differ by ${short(l1)} in all (2 at most between averages), the output by ${short(result.rowErrors[row])} of its length.`;
}

// -------------------------------------------------------------------------------------------------- pointer and keys
$("tokens").addEventListener("pointerover", (event) => event.target.dataset.i && choose(Number(event.target.dataset.i), null, true));
$("tokens").addEventListener("scroll", () => page.result && shadeTokens($("tokens"), page));
$("tokens").addEventListener("click", (event) => event.target.dataset.i && choose(Number(event.target.dataset.i), null));
$("row").addEventListener("pointermove", (event) => {
  const column = columnAt(event.clientX - $("row").getBoundingClientRect().left);
  choose(page.row, column, true);
  showCell(tip, event, { ...page, column });
});
$("row").addEventListener("pointerleave", () => (tip.hidden = true));
$("row").addEventListener("keydown", (event) => {
  const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!move) return;
  event.preventDefault();
  choose(page.row + move[0], move[1] || page.column !== null ? (page.column ?? page.row) + move[1] : null);
});
$("first").onclick = () => state.go(0);
$("back").onclick = () => state.go(state.token - 1);
$("next").onclick = () => state.go(state.token + 1);
$("play").onclick = () => state.play();
$("keys").onclick = () => $("help").showModal();
$("theme").onclick = nextTheme;
$("share").onclick = () => copy(location.href, $("share"));
$("copy").onclick = () => copy($("code").textContent, $("copy"));

async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    if (button.id === "copy") getSelection().selectAllChildren($("code"));
    button.textContent = button.id === "copy" ? "Selected: press Ctrl + C" : "Copy it from the address bar";
  }
  setTimeout(() => (button.textContent = before), 1500);
}

function applyTheme() {
  const chosen = page.settings.theme;
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
  $("theme").textContent = `Theme: ${chosen}`;
}

function nextTheme() {
  page.settings.theme = { auto: "light", light: "dark", dark: "auto" }[page.settings.theme] || "auto";
  applyTheme();
  remember();
  redraw();
}

function redraw() {
  if (!page.result) return;
  maps.colour();
  state.draw();
  headsView.show(page.settings, page.heads);
  choose(page.row, page.column, true);
}

document.addEventListener("keydown", (event) => {
  if (event.target.closest("textarea, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  const kernels = Object.keys(KERNELS);
  const act = {
    ",": () => state.go(state.token - 1),
    ".": () => state.go(state.token + 1),
    k: () => change("kernel", kernels[(kernels.indexOf(page.settings.kernel) + 1) % kernels.length]),
    t: nextTheme,
    "?": () => $("help").showModal(),
  }[event.key];
  if (act) return event.preventDefault(), act();
  if (event.key === " " && !event.target.closest("button, input, summary")) {
    event.preventDefault();
    state.play();
  }
  return undefined;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("hashchange", () => {
  page.settings = readLink(location.hash);
  applyTheme();
  refresh();
});
let width = innerWidth;
addEventListener("resize", () => {
  if (width !== innerWidth) redraw();
  width = innerWidth;
});
if (matchMedia("(max-width: 60rem)").matches) document.querySelector(".panel details").open = false;
if (!location.hash && page.heads) page.settings.n = Math.min(DEFAULTS.n, page.heads.tokens.length);
applyTheme();
refresh();
page.ready = true;
