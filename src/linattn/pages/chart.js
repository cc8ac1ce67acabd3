// Line charts in SVG for every page: values under the pointer, series to hide, logarithmic or linear axes.

const holder = document.createElement("div");
holder.innerHTML = "<svg></svg>";
const SVG = holder.firstChild.namespaceURI;
// Okabe and Ito's colours, told apart with any colour vision; dashes and marks repeat the distinction.
export const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1", "#7f7f7f"];
const DASHES = ["", "7 4", "2 3", "9 3 2 3", "1 4", "12 4", "5 2 1 2", "3 6"];
const LETTER = 6.4; // pixels of a letter of a label
const MARKS = ["circle", "square", "diamond", "triangle"];

/** A number in few characters: 1.2k, 3.4M, 0.012. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-4)) return value.toExponential(1);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${trim(value / (limit === 1e4 ? 1e3 : limit))}${unit}`;
  }
  return Number.isInteger(value) ? String(value) : trim(value); // 2048 tokens are not 2050
}
const trim = (x) => String(Number(x.toPrecision(3)));

function make(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

function extent(values, log) {
  const usable = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
  if (!usable.length) return log ? [1, 10] : [0, 1];
  let low = Math.min(...usable);
  let high = Math.max(...usable);
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 1, high + 1];
  if (log) return [low / 1.15, high * 1.15];
  const pad = (high - low) * 0.05;
  return [low >= 0 && low < 0.4 * high ? 0 : low - pad, high + pad];
}

/** About `count` round numbers in [low, high]. */
function ticks([low, high], log, count) {
  const found = [];
  if (log) {
    const decades = Math.log10(high / low);
    const steps = decades > count ? [1] : decades > 2 ? [1, 3] : [1, 2, 5];
    const skip = Math.max(1, Math.ceil(decades / count));
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++) {
      if (steps.length === 1 && e % skip) continue;
      for (const step of steps) if (step * 10 ** e >= low && step * 10 ** e <= high) found.push(step * 10 ** e);
    }
    return found.length > 1 ? found : [low, high].map((x) => Number(x.toPrecision(2)));
  }
  const raw = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((m) => m * unit >= raw) * unit;
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-9; x += step) found.push(Number(x.toPrecision(12)));
  return found;
}

function mark(kind, x, y, size, colour, parent) {
  if (kind === "circle") return make("circle", { cx: x, cy: y, r: size, fill: colour }, parent);
  const points = {
    square: [[-1, -1], [1, -1], [1, 1], [-1, 1]],
    diamond: [[0, -1.4], [1.4, 0], [0, 1.4], [-1.4, 0]],
    triangle: [[0, -1.3], [1.3, 1], [-1.3, 1]],
  }[kind];
  const text = points.map(([dx, dy]) => `${x + dx * size},${y + dy * size}`).join(" ");
  return make("polygon", { points: text, fill: colour }, parent);
}

/**
 * Draws a chart into an element and returns { update(options) }.
 *
 * options: title, series [{ label, points [[x, y]], colour, dash, marks }], x and y { label, log, choice }, rules
 * [{ y or x, label }], height. `choice` offers linear and logarithmic axes to the reader.
 */
export function lineChart(element, options) {
  const hidden = new Set();
  const log = { x: Boolean(options.x?.log), y: Boolean(options.y?.log) };
  let current = options;
  element.classList.add("chart");
  element.replaceChildren();
  const head = element.appendChild(document.createElement("div"));
  head.className = "chart-head";
  const plot = element.appendChild(document.createElement("div"));
  plot.className = "chart-plot";
  const legend = element.appendChild(document.createElement("div"));
  legend.className = "chart-legend";
  const tip = plot.appendChild(document.createElement("div"));
  tip.className = "chart-tip";
  tip.hidden = true;
  const svg = make("svg", { role: "img", tabindex: 0 }, plot);

  const styled = () => current.series.map((one, i) => ({
    colour: COLOURS[i % COLOURS.length], dash: DASHES[i % DASHES.length], mark: MARKS[i % MARKS.length], ...one,
    points: one.points.filter(([x, y]) => x !== null && y !== null && Number.isFinite(x) && Number.isFinite(y)),
  }));

  function drawHead() {
    head.replaceChildren();
    const title = head.appendChild(document.createElement("strong"));
    title.textContent = current.title || "";
    for (const axis of ["x", "y"]) {
      if (!current[axis]?.choice) continue;
      const button = head.appendChild(document.createElement("button"));
      button.type = "button";
      button.dataset.axis = axis;
      button.textContent = `${axis}: ${log[axis] ? "log" : "linear"}`;
      button.title = "logarithmic or linear axis";
      button.onclick = () => {
        log[axis] = !log[axis];
        draw();
      };
    }
  }

  function drawLegend(series) {
    legend.replaceChildren();
    if (series.length < 2) return;
    for (const one of series) {
      const button = legend.appendChild(document.createElement("button"));
      button.type = "button";
      button.setAttribute("aria-pressed", String(!hidden.has(one.label)));
      button.title = "show or hide";
      const line = make("svg", { width: 28, height: 12, viewBox: "0 0 28 12", "aria-hidden": "true" }, button);
      if (one.bars) make("rect", { x: 8, y: 1, width: 12, height: 10, fill: one.colour, "fill-opacity": 0.75 }, line);
      else if (one.line !== false) {
        make("line", { x1: 1, x2: 27, y1: 6, y2: 6, stroke: one.colour, "stroke-width": 2, "stroke-dasharray": one.dash }, line);
      }
      if (!one.bars) mark(one.mark, 14, 6, 3, one.colour, line);
      button.append(one.label);
      button.onclick = () => {
        if (!hidden.delete(one.label)) hidden.add(one.label);
        draw();
      };
    }
  }

  function draw() {
    drawHead();
    const all = styled();
    drawLegend(all);
    const series = all.filter((one) => !hidden.has(one.label));
    const width = Math.max(220, plot.clientWidth || 360);
    const height = current.height || 250;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    svg.setAttribute("aria-label", `${current.title || "chart"}: ${series.map((s) => s.label).join(", ")}`);
    svg.replaceChildren();
    const rules = current.rules || [];
    const xs = extent(series.flatMap((s) => s.points.map((p) => p[0])), log.x);
    const zero = series.some((s) => s.bars) && !log.y ? [0] : [];
    const ys = extent([...zero, ...series.flatMap((s) => s.points.map((p) => p[1])), ...rules.flatMap((r) => r.y ?? [])], log.y);
    if (series.some((s) => s.bars) && !log.x) [xs[0], xs[1]] = [xs[0] - 0.04 * (xs[1] - xs[0]), xs[1] + 0.04 * (xs[1] - xs[0])];
    const names = current.x?.names || {};
    const named = current.x?.ticks?.filter((t) => t >= xs[0] && t <= xs[1] && names[t]) || [];
    const longest = Math.max(0, ...named.map((t) => names[t].length));
    const slanted = named.length > 1 && LETTER * longest > (width - 72) / named.length; // names that would run into each other
    const box = { left: 52, right: width - 20, top: 10, bottom: height - 38 - (slanted ? Math.min(60, 0.6 * LETTER * longest) : 0) };
    const place = (range, isLog, from, to) => (value) => {
      const f = isLog ? Math.log : (v) => v;
      return from + ((f(value) - f(range[0])) / (f(range[1]) - f(range[0]))) * (to - from);
    };
    const px = place(xs, log.x, box.left, box.right);
    const py = place(ys, log.y, box.bottom, box.top);
    const xTicks = current.x?.ticks?.filter((t) => t >= xs[0] && t <= xs[1]) || ticks(xs, log.x, width / 90);
    let last = -Infinity;
    for (const value of xTicks) {
      const x = px(value);
      make("line", { x1: x, x2: x, y1: box.top, y2: box.bottom, class: "grid" }, svg);
      if (x - last < (slanted ? 12 : 34)) continue;
      last = x;
      const place = slanted
        ? { x: x + 4, y: box.bottom + 13, "text-anchor": "end", transform: `rotate(-35 ${x + 4} ${box.bottom + 13})` }
        : { x, y: box.bottom + 16, "text-anchor": "middle" };
      make("text", place, svg).textContent = names[value] ?? short(value);
    }
    for (const value of ticks(ys, log.y, height / 50)) {
      const y = py(value);
      make("line", { x1: box.left, x2: box.right, y1: y, y2: y, class: "grid" }, svg);
      make("text", { x: box.left - 6, y: y + 4, "text-anchor": "end" }, svg).textContent = short(value);
    }
    make("text", { x: (box.left + box.right) / 2, y: height - 5, "text-anchor": "middle", class: "axis" }, svg).textContent =
      current.x?.label || "";
    for (const rule of rules) drawRule(rule, px, py, box, xs, ys);
    for (const one of series) drawSeries(one, px, py, ys);
    watch(series, px, py, box);
  }

  function drawRule(rule, px, py, box, xs, ys) {
    if (rule.y !== undefined && rule.y >= ys[0] && rule.y <= ys[1]) {
      make("line", { x1: box.left, x2: box.right, y1: py(rule.y), y2: py(rule.y), class: "rule" }, svg);
      make("text", { x: box.right - 4, y: py(rule.y) - 5, "text-anchor": "end", class: "rule-label" }, svg).textContent = rule.label;
    } else if (rule.x !== undefined && rule.x >= xs[0] && rule.x <= xs[1]) {
      const x = px(rule.x);
      make("line", { x1: x, x2: x, y1: box.top, y2: box.bottom, class: "rule" }, svg);
      const right = x > (box.left + box.right) / 2;
      make("text", { x: x + (right ? -5 : 5), y: box.top + 12, "text-anchor": right ? "end" : "start", class: "rule-label" }, svg)
        .textContent = rule.label;
    }
  }

  function drawSeries(one, px, py, ys) {
    if (one.bars) return drawBars(one, px, py, ys);
    const shown = one.points.filter(([x, y]) => (!log.x || x > 0) && (!log.y || y > 0) && y >= ys[0] * (log.y ? 0.99 : 1) - 1e-12);
    const path = shown.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
    if (one.line !== false) make("path", { d: path, fill: "none", stroke: one.colour, "stroke-width": 2, "stroke-dasharray": one.dash }, svg);
    if (one.marks !== false && shown.length < 60) for (const [x, y] of shown) mark(one.mark, px(x), py(y), 3, one.colour, svg);
    return undefined;
  }

  function drawBars(one, px, py, ys) {
    const places = one.points.map((p) => px(p[0])).sort((a, b) => a - b);
    const gaps = places.slice(1).map((x, i) => x - places[i]);
    const barred = current.series.filter((s) => s.bars).length;
    const wide = Math.min(48, 0.8 * (gaps.length ? Math.min(...gaps) : 40)) / barred;
    const base = py(log.y ? ys[0] : Math.max(ys[0], 0));
    for (const [x, y] of one.points) {
      if (log.y && y <= 0) continue;
      const top = py(y);
      const frame = { x: px(x) - wide / 2, y: Math.min(top, base), width: wide, height: Math.abs(base - top) };
      make("rect", { ...frame, fill: one.colour, "fill-opacity": 0.75, stroke: one.colour }, svg);
    }
  }

  function watch(series, px, py, box) {
    const line = make("line", { y1: box.top, y2: box.bottom, class: "cursor", visibility: "hidden" }, svg);
    const places = [...new Set(series.flatMap((s) => s.points.map((p) => p[0])))].filter((x) => !log.x || x > 0).sort((a, b) => a - b);
    let at = -1;
    const show = (index) => {
      at = Math.max(0, Math.min(places.length - 1, index));
      const x = places[at];
      if (x === undefined) return;
      line.setAttribute("x1", px(x));
      line.setAttribute("x2", px(x));
      line.setAttribute("visibility", "visible");
      const rows = series.flatMap((s) => {
        const point = s.points.find((p) => p[0] === x);
        return point ? [[s, point[1]]] : [];
      });
      tip.replaceChildren();
      const heading = tip.appendChild(document.createElement("b"));
      heading.textContent = `${current.x?.label || "x"} ${current.x?.names?.[x] ?? short(x)}`;
      for (const [s, y] of rows.sort((a, b) => b[1] - a[1])) {
        const row = tip.appendChild(document.createElement("div"));
        const swatch = row.appendChild(document.createElement("i"));
        swatch.style.background = s.colour;
        row.append(`${s.label}: ${short(y)}${current.y?.unit ? ` ${current.y.unit}` : ""}`);
      }
      tip.hidden = false;
      const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
      const left = px(x) * scale;
      tip.style.left = `${Math.min(Math.max(0, left + 10), Math.max(0, plot.clientWidth - tip.offsetWidth - 4))}px`;
      if (left + 10 + tip.offsetWidth > plot.clientWidth) tip.style.left = `${Math.max(0, left - tip.offsetWidth - 10)}px`;
      tip.style.top = `${box.top + 4}px`;
    };
    const hide = () => {
      tip.hidden = true;
      line.setAttribute("visibility", "hidden");
    };
    svg.onpointermove = (event) => {
      const frame = svg.getBoundingClientRect();
      const x = ((event.clientX - frame.left) / frame.width) * svg.viewBox.baseVal.width;
      let best = 0;
      places.forEach((value, i) => {
        if (Math.abs(px(value) - x) < Math.abs(px(places[best]) - x)) best = i;
      });
      show(best);
    };
    svg.onpointerleave = hide;
    svg.onblur = hide;
    svg.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      show(at + step);
    };
  }

  new ResizeObserver(() => {
    if (Math.abs(plot.clientWidth - Number(svg.getAttribute("width"))) > 2) draw();
  }).observe(plot);
  draw();
  return {
    update(next) {
      current = { ...current, ...next };
      draw();
    },
  };
}

/** Replaces the pictures of a page that have their numbers beside them by charts. */
export function drawAll(root = document) {
  const places = new Set();
  for (const script of root.querySelectorAll('script[type="application/json"][data-chart]')) {
    places.add(script.parentElement);
  }
  for (const place of places) {
    const options = [...place.querySelectorAll("script[data-chart]")].map((script) => JSON.parse(script.textContent));
    const holders = options.map(() => document.createElement("div"));
    place.replaceChildren(...holders);
    holders.forEach((one, i) => lineChart(one, options[i]));
  }
}
