// The three attention maps: one viewport, one chosen cell, drawn from images of one pixel per weight.
import { drawRamp, fit, paint, palette } from "./colours.js";

const LABELS_UP_TO = 26; // visible tokens that still get labels

export class Maps {
  /** canvases: { exact, implied, difference }; choose(row, column) and point(event, row, column) report to the page. */
  constructor(canvases, { choose, point, leave }) {
    this.canvases = canvases;
    this.calls = { choose, point, leave };
    this.images = {};
    this.kept = {};
    this.version = 0;
    this.view = { x: 0, y: 0, size: 1 }; // in shares of the matrix
    this.n = 0;
    for (const [name, canvas] of Object.entries(canvases)) this.listen(canvas, name);
  }

  /** result: see compute.js. Resets the viewport if the number of tokens changed. */
  show(result, data, scale) {
    const { n } = data;
    if (n !== this.n) this.view = { x: 0, y: 0, size: 1 };
    Object.assign(this, { n, tokens: data.tokens, result, scale });
    this.colour();
  }

  /** Paints the images anew: after a result, another theme or another scale. */
  colour(scale = this.scale) {
    this.scale = scale;
    const { n, result } = this;
    if (!result) return;
    const { exact, implied } = result;
    // The first rows of a causal map have few keys and large weights: the scale ends where three quarters of the rows do.
    const peaks = new Float64Array(n).fill(1e-30);
    const gaps = new Float64Array(n).fill(1e-30);
    for (let i = 0, at = 0; i < n; i++) {
      for (let j = 0; j < n; j++, at++) {
        if (exact[at] > peaks[i]) peaks[i] = exact[at];
        const difference = Math.abs(implied[at] - exact[at]);
        if (difference > gaps[i]) gaps[i] = difference;
      }
    }
    const upper = (values) => values.sort()[Math.floor(0.75 * (n - 1))];
    const top = upper(peaks);
    this.top = top;
    const widest = gaps.reduce((a, b) => Math.max(a, b), 0);
    this.gap = Math.max(1e-30, Math.min(Math.max(upper(gaps), widest / 4), top)); // a wild row must not blind the rest
    this.version++;
    this.paintOne("exact", exact, top);
    this.paintOne("implied", implied, top);
    this.paintOne("difference", implied, this.gap, exact);
    drawRamp(document.getElementById("ramp"), false, this.scale);
    drawRamp(document.getElementById("diff-ramp"), true, this.scale);
    document.getElementById("ramp-top").textContent = `≥ ${top.toPrecision(2)}`;
    document.getElementById("diff-low").textContent = `≤ −${this.gap.toPrecision(2)}`;
    document.getElementById("diff-top").textContent = `≥ ${this.gap.toPrecision(2)}`;
    this.draw();
  }

  paintOne(name, values, top, minus) {
    const { n } = this;
    const canvas = (this.images[name] ||= document.createElement("canvas"));
    canvas.width = canvas.height = n;
    const context = canvas.getContext("2d");
    const image = context.createImageData(n, n);
    paint(image, values, top, this.scale, minus);
    context.putImageData(image, 0, 0);
  }

  select(row, column) {
    this.row = row;
    this.column = column;
    this.draw();
  }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = null;
      if (this.result) for (const name of Object.keys(this.canvases)) this.drawOne(name);
    });
  }

  /** Pixels left of and above the map for labels. */
  margin(width) {
    if (this.view.size * this.n > LABELS_UP_TO || width < 130) return 0;
    const longest = this.tokens.reduce((most, token) => Math.max(most, token.trim().length), 1);
    return Math.min(12 + 7 * Math.min(longest, 7), width * 0.2);
  }

  drawOne(name) {
    const canvas = this.canvases[name];
    const { context, width } = fit(canvas, canvas.clientWidth);
    const { n, view } = this;
    const colours = palette();
    const margin = this.margin(width);
    const side = width - margin;
    const cell = side / (view.size * n);
    context.drawImage(this.scaled(name, side, cell), margin, margin, side, side);
    const place = (index, start) => margin + (index - start * n) * cell;
    context.strokeStyle = colours.selected;
    context.lineWidth = Math.max(1, Math.min(2, cell / 6));
    const thick = Math.max(cell, 2);
    context.save();
    context.beginPath();
    context.rect(margin, margin, side, side);
    context.clip();
    context.strokeRect(margin, place(this.row, view.y), side, thick);
    if (this.column !== null && this.column !== undefined) {
      context.globalAlpha = 0.55;
      context.strokeRect(place(this.column, view.x), margin, thick, side);
    }
    context.restore();
    if (margin) this.drawLabels(context, margin, cell, colours);
    canvas.setAttribute("aria-label", `${name} attention, ${n} by ${n}; query ${this.row + 1} is chosen`);
    canvas.setAttribute("role", "img");
  }

  /** The visible part of a map at the size of the screen, kept until something changes: pointing must stay quick. */
  scaled(name, side, cell) {
    const { n, view } = this;
    const pixels = Math.round(side * Math.min(2, devicePixelRatio || 1));
    const key = [this.version, view.x, view.y, view.size, pixels].join();
    const kept = (this.kept[name] ||= document.createElement("canvas"));
    if (kept.dataset.key === key) return kept;
    kept.dataset.key = key;
    kept.width = kept.height = pixels;
    const context = kept.getContext("2d");
    context.imageSmoothingEnabled = cell < 1;
    context.imageSmoothingQuality = "high";
    context.drawImage(this.images[name], view.x * n, view.y * n, view.size * n, view.size * n, 0, 0, pixels, pixels);
    return kept;
  }

  drawLabels(context, margin, cell, colours) {
    const { n, view, tokens } = this;
    context.font = `${Math.min(12, Math.max(8, cell * 0.8))}px ui-monospace, monospace`;
    context.textBaseline = "middle";
    const first = { x: Math.floor(view.x * n), y: Math.floor(view.y * n) };
    const count = Math.ceil(view.size * n) + 1;
    const text = (i) => (tokens[i].trim() || "␣").slice(0, 7);
    for (let s = 0; s < count; s++) {
      const [j, i] = [first.x + s, first.y + s];
      const at = (index, start) => margin + (index - start * n + 0.5) * cell;
      if (i < n && at(i, view.y) > margin) {
        context.fillStyle = i === this.row ? colours.selected : colours.faint;
        context.textAlign = "right";
        context.fillText(text(i), margin - 4, at(i, view.y));
      }
      if (j < n && at(j, view.x) > margin) {
        context.fillStyle = j === this.column ? colours.selected : colours.faint;
        context.save();
        context.translate(at(j, view.x), margin - 4);
        context.rotate(-Math.PI / 2);
        context.textAlign = "left";
        context.fillText(text(j), 0, 0);
        context.restore();
      }
    }
  }

  /** The cell under a pointer. */
  cellAt(canvas, event) {
    const frame = canvas.getBoundingClientRect();
    const margin = this.margin(frame.width);
    const index = (offset, start) => {
      const share = (offset - margin) / (frame.width - margin);
      return Math.max(0, Math.min(this.n - 1, Math.floor((start + share * this.view.size) * this.n)));
    };
    return [index(event.clientY - frame.top, this.view.y), index(event.clientX - frame.left, this.view.x)];
  }

  zoom(factor, x = 0.5, y = 0.5) {
    const { view, n } = this;
    const size = Math.max(Math.min(1, 4 / n), Math.min(1, view.size * factor));
    view.x = clamp(view.x + (view.size - size) * x, 1 - size);
    view.y = clamp(view.y + (view.size - size) * y, 1 - size);
    view.size = size;
    this.draw();
  }

  pan(dx, dy) {
    const { view } = this;
    view.x = clamp(view.x + dx * view.size, 1 - view.size);
    view.y = clamp(view.y + dy * view.size, 1 - view.size);
    this.draw();
  }

  listen(canvas, name) {
    let drag = null;
    canvas.addEventListener("pointermove", (event) => {
      if (!this.result) return;
      const frame = canvas.getBoundingClientRect();
      if (drag && this.view.size < 1) {
        this.pan((drag.x - event.clientX) / frame.width, (drag.y - event.clientY) / frame.height);
        drag = { x: event.clientX, y: event.clientY };
        return;
      }
      this.calls.point(event, ...this.cellAt(canvas, event), name);
    });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, y: event.clientY };
      if (this.result) this.calls.choose(...this.cellAt(canvas, event));
    });
    for (const end of ["pointerup", "pointercancel", "pointerleave"]) canvas.addEventListener(end, () => (drag = null));
    canvas.addEventListener("pointerleave", () => this.calls.leave());
    canvas.addEventListener("wheel", (event) => {
      if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey) return; // the page scrolls over a map
      event.preventDefault();
      const frame = canvas.getBoundingClientRect();
      const at = [(event.clientX - frame.left) / frame.width, (event.clientY - frame.top) / frame.height];
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, ...at);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (move) {
        const to = (value, step) => Math.max(0, Math.min(this.n - 1, (value ?? this.row) + step));
        this.calls.choose(to(this.row, move[0]), to(this.column, move[1]));
      } else if (event.key === "+" || event.key === "=") this.zoom(0.8);
      else if (event.key === "-") this.zoom(1.25);
      else if (event.key === "0") this.zoom(1e9);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }
}

const clamp = (x, most) => Math.max(0, Math.min(most, x));
