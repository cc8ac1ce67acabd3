// Pictures of a state at one token.
import { fit, paint, palette } from "./colours.js";

const STRIP = 15; // pixels of a vector beside the matrix
const GAP = 7;

/** A matrix as an image of one pixel per number. */
function image(values, rows, columns, top) {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(columns, rows);
  paint(pixels, values, top, "root");
  context.putImageData(pixels, 0, 0);
  return canvas;
}

function largest(...arrays) {
  let top = 1e-30;
  for (const values of arrays) for (const x of values) if (Math.abs(x) > top && Number.isFinite(x)) top = Math.abs(x);
  return top;
}

/** The size that all but a fiftieth of the entries stay under, so that one large row does not blind the rest. */
function usual(values) {
  const step = Math.ceil(values.length / 4096);
  const sizes = Float64Array.from({ length: Math.floor(values.length / step) }, (_, i) => Math.abs(values[i * step])).sort();
  return Math.max(sizes[Math.floor(0.98 * (sizes.length - 1))], largest(values) / 50);
}

/**
 * S in the middle, the vectors of the step around it: left the key's features, right Z and the query's features, above the
 * value (and what the state said for it), below the output.
 */
export function drawMatrix(canvas, parts) {
  const { context, width, height } = fit(canvas, 350);
  const colours = palette();
  const { S, left, right, above, below } = parts;
  const columns = S.length / left[0].values.length;
  const rows = left[0].values.length;
  const gutter = 16; // for labels
  const box = {
    left: gutter + left.length * (STRIP + GAP + 12) - 10,
    top: above.length * (STRIP + GAP + 12) + 16,
    right: width - right.length * (STRIP + GAP + 12) - 2,
    bottom: height - below.length * (STRIP + GAP + 12) - 4,
  };
  context.imageSmoothingEnabled = rows > box.bottom - box.top || columns > box.right - box.left;
  const put = (values, r, c, x, y, w, h, top) => {
    context.drawImage(image(values, r, c, top), x, y, w, h);
    context.strokeStyle = colours.line;
    context.strokeRect(x - 0.5, y - 0.5, w + 1, h + 1);
  };
  const [w, h] = [box.right - box.left, box.bottom - box.top];
  put(S, rows, columns, box.left, box.top, w, h, usual(S));
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = colours.faint;
  const vertical = ({ values, label }, x) => {
    put(values, rows, 1, x, box.top, STRIP, h, largest(values));
    context.save();
    context.translate(x - 3, box.top + h / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText(label, 0, 0);
    context.restore();
  };
  left.forEach((one, i) => vertical(one, gutter + i * (STRIP + GAP + 12)));
  right.forEach((one, i) => vertical(one, box.right + GAP + 12 + i * (STRIP + GAP + 12)));
  const horizontal = ({ values, label }, y) => {
    put(values, 1, columns, box.left, y, w, STRIP, largest(values, ...(parts.scaleOf || []).map((s) => s.values)));
    context.textAlign = "left";
    context.fillText(label, box.left, y - 3);
  };
  above.forEach((one, i) => horizontal(one, 14 + i * (STRIP + GAP + 12)));
  below.forEach((one, i) => horizontal(one, box.bottom + 18 + i * (STRIP + GAP + 12)));
  context.fillStyle = colours.ink;
  context.textAlign = "right";
  context.fillText(`S: ${rows} × ${columns}`, box.right, box.top - 4);
  return { box, rows, columns };
}

const SLOT_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6bb1", "#999933"];

/** Tokens as cells with the number of their slot, and the slots with their weights for the present query. */
export function drawSlots(canvas, { data, token, seen, chosen }) {
  const { context, width, height } = fit(canvas, 350);
  const colours = palette();
  const { block, slots } = seen;
  const lower = 120;
  const area = { width: width - 4, height: height - lower - 34 };
  let cell = Math.min(34, Math.sqrt((area.width * area.height) / data.n));
  while (Math.ceil(data.n / Math.floor(area.width / cell)) * cell > area.height) cell *= 0.97;
  const across = Math.floor(area.width / cell);
  const slotOf = new Map();
  block.slots.forEach((slot, s) => slot.tokens.forEach((t) => slotOf.set(t, s)));
  const merged = new Set(block.merges.flatMap(([from]) => from));
  context.font = `${Math.max(7, cell * 0.5)}px ui-monospace, monospace`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  const spot = (t) => [2 + (t % across) * cell, 20 + Math.floor(t / across) * cell];
  for (let t = 0; t < data.n; t++) {
    const [x, y] = spot(t);
    const slot = slotOf.get(t);
    const size = cell - 1;
    let text = "";
    if (t > token) context.fillStyle = colours.line;
    else if (slot !== undefined) [context.fillStyle, text] = [SLOT_COLOURS[slot % 8], String(slot + 1)];
    else [context.fillStyle, text] = [colours.ink, t < block.sinks ? "s" : ""];
    context.globalAlpha = t > token ? 0.5 : chosen !== null && slot !== undefined && slot !== chosen ? 0.25 : 1;
    context.fillRect(x, y, size, size);
    if (cell > 11 && text) {
      context.fillStyle = slot === undefined ? colours.line : "#fff";
      context.fillText(text, x + size / 2, y + size / 2 + 0.5);
    }
    context.globalAlpha = 1;
    if (merged.has(t) || t === token) {
      context.strokeStyle = t === token ? colours.selected : colours.ink;
      context.lineWidth = t === token ? 2.5 : 1.2;
      context.strokeRect(x - 0.5, y - 0.5, cell, cell);
    }
  }
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = colours.faint;
  context.fillText("plain: exact · s: sink · number: slot · outline: merged now", 2, 12);
  const base = height - 18;
  const top = Math.max(1e-9, ...slots);
  const step = Math.min(40, area.width / Math.max(1, slots.length));
  context.fillText("weight of each slot for this query (below: tokens in it)", 2, height - lower - 2);
  slots.forEach((weight, s) => {
    const tall = (weight / top) * (lower - 40);
    context.globalAlpha = chosen !== null && s !== chosen ? 0.3 : 1;
    context.fillStyle = SLOT_COLOURS[s % 8];
    context.fillRect(2 + s * step, base - tall, Math.max(1, step - 3), Math.max(tall, 1));
    context.globalAlpha = 1;
    if (step > 13) {
      context.fillStyle = colours.faint;
      context.textAlign = "center";
      context.fillText(block.slots[s].tokens.length, 2 + s * step + (step - 3) / 2, base + 14);
    }
  });
  return (x, y) => {
    if (y > height - lower) return x / step < slots.length ? Math.floor((x - 2) / step) : null;
    const t = Math.floor((y - 20) / cell) * across + Math.floor((x - 2) / cell);
    return slotOf.get(t) ?? null;
  };
}
