// The settings: defaults, the link that holds them, and the controls.
import { KERNELS } from "./kernels.js";
import { DESIGNS } from "./handmade.js";
import { SOURCES } from "./sources.js";

export const TEXTS = {
  letters: "the cat sat on the mat, the rat sat on the cat",
  gaussian: "any text: every token has its own vector",
  handmade: "ABBCC",
};
export const DEFAULTS = {
  source: "head", text: "", n: 64, dim: 16, data: 0, design: "identity", layer: 5, head: 6,
  kernel: "positive", features: 64, seed: 0, norm: 1, causal: true, window: 16, slots: 8, sinks: 2, block: 8, beta: 0.5, decay: 0,
  row: -1, at: -1, scale: "root", theme: "auto",
};
const LENGTHS = [4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048];
const POWERS = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
const options = (table, label) => Object.entries(table).map(([value, entry]) => [value, label(entry, value)]);
const uses = (name) => (s) => KERNELS[s.kernel].uses.includes(name) && (name !== "decay" || s.causal);

/** Groups of controls; `when` says whether one is shown. */
export function layout(context) {
  return {
    "Queries, keys, values": [
      { name: "source", label: "from", choices: options(SOURCES, (label) => label) },
      { name: "design", label: "design", choices: options(DESIGNS, (d, name) => `${name}: ${d.about}`), when: (s) => s.source === "handmade" },
      { name: "layer", label: "layer", choices: () => context.layers(), when: (s) => s.source === "head" },
      { name: "head", label: "head", values: () => context.headNumbers(), when: (s) => s.source === "head" },
      { name: "text", label: "your text", area: true, hint: (s) => context.textHint(s) },
      { name: "n", label: "tokens", values: LENGTHS, when: (s) => s.source !== "handmade" },
      { name: "dim", label: "dim D", values: [2, 4, 8, 16, 32, 64], when: (s) => s.source === "letters" || s.source === "gaussian" },
      { name: "data", label: "seed of the vectors", values: [...Array(20).keys()], when: (s) => s.source === "letters" || s.source === "gaussian" },
      { name: "norm", label: "norm of q and k ×", values: [0.1, 0.25, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 4], hint: () => "larger is sharper attention" },
      { name: "causal", label: "causal: only earlier keys", check: true, when: (s) => s.kernel !== "nearfar" && s.kernel !== "delta" },
    ],
    Kernel: [
      { name: "kernel", label: "kernel", choices: options(KERNELS, (k) => k.label), hint: (s) => KERNELS[s.kernel].about },
      { name: "features", label: "features r", values: POWERS, when: uses("features") },
      { name: "seed", label: "seed of the features", values: [...Array(20).keys()], when: uses("seed") },
      { name: "window", label: "window (exact, last)", values: [0, 4, 8, 16, 32, 64, 128, 256, 512], when: uses("window") },
      { name: "slots", label: "slots (far)", values: [0, 2, 4, 8, 16, 32, 64, 128, 256], when: uses("slots") },
      { name: "sinks", label: "sinks (exact, first)", values: [0, 1, 2, 4, 8], when: uses("sinks") },
      { name: "block", label: "merge every", values: [4, 8, 16, 32, 64], when: uses("block") },
      { name: "beta", label: "β, how much is corrected", values: [0.05, 0.1, 0.25, 0.5, 0.75, 1], when: uses("beta") },
      { name: "decay", label: "log-decay g per token", values: [-1, -0.5, -0.2, -0.1, -0.05, -0.02, -0.01, 0], when: uses("decay") },
    ],
    Picture: [
      { name: "scale", label: "colours", choices: [["root", "root of the weight"], ["linear", "the weight"], ["log", "logarithm, four decades"]] },
    ],
  };
}

/** Settings from the part of the link after "#"; unknown or bad values are left at their defaults. */
export function readLink(hash) {
  const settings = { ...DEFAULTS };
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!(name in DEFAULTS)) continue;
    if (typeof DEFAULTS[name] === "boolean") settings[name] = value === "1";
    else if (typeof DEFAULTS[name] === "number") {
      if (value !== "" && Number.isFinite(Number(value))) settings[name] = Number(value);
    } else settings[name] = value.slice(0, 20000);
  }
  const within = (name, low, high, whole = true) => {
    settings[name] = Math.max(low, Math.min(high, whole ? Math.round(settings[name]) : settings[name]));
  };
  if (!(settings.kernel in KERNELS)) settings.kernel = DEFAULTS.kernel;
  if (!(settings.source in SOURCES)) settings.source = DEFAULTS.source;
  if (!(settings.design in DESIGNS)) settings.design = DEFAULTS.design;
  for (const [name, low, high] of [["n", 1, 2048], ["dim", 1, 128], ["features", 1, 1024], ["seed", 0, 2 ** 32 - 1], ["data", 0, 2 ** 32 - 1],
    ["window", 0, 2048], ["slots", 0, 512], ["sinks", 0, 64], ["block", 1, 256], ["row", -1, 2047], ["at", -1, 2047], ["head", 0, 255], ["layer", 0, 255]]) within(name, low, high);
  within("norm", 0, 16, false);
  within("beta", 0, 2, false);
  within("decay", -8, 0, false);
  return settings;
}

/** The link's part after "#": what differs from the defaults. */
export function writeLink(settings) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(settings)) {
    if (value !== DEFAULTS[name]) parameters.set(name, typeof value === "boolean" ? Number(value) : value);
  }
  return String(parameters);
}

/** Builds the controls; changed(name, value) reports what the reader does. Returns { update(settings) }. */
export function buildControls(root, groups, changed) {
  const rows = [];
  for (const [title, controls] of Object.entries(groups)) {
    const group = root.appendChild(document.createElement("fieldset"));
    group.appendChild(document.createElement("legend")).textContent = title;
    for (const control of controls) rows.push(buildOne(group, control, changed));
  }
  return { update: (settings) => rows.forEach((row) => row(settings)) };
}

function buildOne(group, control, changed) {
  const { name } = control;
  const box = group.appendChild(document.createElement("div"));
  box.className = control.check ? "control check" : "control";
  const label = box.appendChild(document.createElement("label"));
  label.htmlFor = `c-${name}`;
  const list = () => (typeof control.values === "function" ? control.values() : control.values);
  const kind = control.choices ? "select" : control.area ? "textarea" : "input";
  const input = document.createElement(kind);
  input.id = `c-${name}`;
  const output = document.createElement("output");
  if (control.check) {
    input.type = "checkbox";
    label.append(input, control.label);
    input.onchange = () => changed(name, input.checked);
  } else {
    label.append(control.label, ...(control.values ? [output] : []));
    box.append(input);
  }
  if (control.values) {
    input.type = "range";
    input.min = 0;
    input.oninput = () => changed(name, list()[Number(input.value)]);
  } else if (control.choices) input.onchange = () => changed(name, Number.isInteger(DEFAULTS[name]) ? Number(input.value) : input.value);
  else if (control.area) {
    input.rows = 3;
    input.spellcheck = false;
    input.oninput = () => changed(name, input.value);
  }
  const hint = box.appendChild(document.createElement("p"));
  hint.className = "hint";
  return (settings) => {
    box.hidden = control.when ? !control.when(settings) : false;
    const value = settings[name];
    if (control.check) input.checked = value;
    if (control.choices) {
      const choices = typeof control.choices === "function" ? control.choices() : control.choices;
      if (input.dataset.made !== JSON.stringify(choices)) {
        input.replaceChildren(...choices.map(([v, t]) => new Option(t, v)));
        input.dataset.made = JSON.stringify(choices);
      }
      input.value = String(value);
    }
    if (control.values) {
      const values = list();
      input.max = values.length - 1;
      const nearest = values.reduce((best, v, i) => (Math.abs(v - value) < Math.abs(values[best] - value) ? i : best), 0);
      input.value = nearest;
      output.textContent = value;
      input.setAttribute("aria-valuetext", String(value));
    }
    if (control.area && document.activeElement !== input) input.value = value;
    hint.textContent = control.hint ? control.hint(settings) : "";
    hint.hidden = !hint.textContent;
  };
}
