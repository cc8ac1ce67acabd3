// One row of both matrices: exact weights as bars, the kernel's as a line with dots, over the keys.
import { fit, palette } from "./colours.js";

export function drawRow(canvas, { result, data, row, column, causal }) {
  const { context, width, height } = fit(canvas, 180);
  const { n } = data;
  const colours = palette();
  const seen = causal ? row + 1 : n;
  const at = (matrix, j) => matrix[row * n + j];
  let top = 1e-9;
  let low = 0;
  let largest = 1e-9;
  for (let j = 0; j < seen; j++) {
    largest = Math.max(largest, at(result.exact, j));
    top = Math.max(top, at(result.exact, j), at(result.implied, j));
    low = Math.min(low, at(result.implied, j));
  }
  top = Math.min(top, 2.5 * Math.max(largest, 1 / seen)); // wild weights leave the picture, with an arrow
  low = Math.max(low, -top);
  const box = { left: 44, right: width - 6, top: 8, bottom: height - 26 };
  const y = (value) => box.bottom - ((Math.max(low, Math.min(top, value)) - low) / (top - low)) * (box.bottom - box.top);
  const step = (box.right - box.left) / n;
  const x = (j) => box.left + j * step;
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colours.faint;
  context.strokeStyle = colours.line;
  context.textAlign = "right";
  const marks = low < 0 ? [0, top, low].filter((v) => v === 0 || Math.abs(y(v) - y(0)) > 14) : [0, top / 2, top];
  for (const value of marks) {
    context.fillText(Number(value.toPrecision(2)), box.left - 5, y(value) + 4);
    line(context, box.left, y(value), box.right, y(value));
  }
  context.setLineDash([4, 3]);
  context.strokeStyle = colours.faint;
  line(context, x(0), y(1 / seen), x(seen), y(1 / seen));
  context.setLineDash([]);
  context.textAlign = "left";
  context.fillText("plain average", Math.min(x(seen) + 4, box.right - 76), y(1 / seen) - 4);
  context.fillStyle = colours.exact;
  const bar = Math.max(1, step * 0.7);
  for (let j = 0; j < seen; j++) {
    const value = at(result.exact, j);
    context.fillRect(x(j) + (step - bar) / 2, y(value), bar, Math.max(y(0) - y(value), 0.5));
  }
  context.strokeStyle = context.fillStyle = colours.kernel;
  context.lineWidth = 1.4;
  context.beginPath();
  for (let j = 0; j < seen; j++) {
    const [px, py] = [x(j) + step / 2, y(at(result.implied, j))];
    if (j) context.lineTo(px, py);
    else context.moveTo(px, py);
  }
  context.stroke();
  if (step > 5) {
    for (let j = 0; j < seen; j++) {
      const value = at(result.implied, j);
      const [px, py] = [x(j) + step / 2, y(value)];
      context.beginPath();
      if (value > top) context.moveTo(px - 4, py + 5), context.lineTo(px, py - 2), context.lineTo(px + 4, py + 5);
      else context.arc(px, py, 2.6, 0, 7);
      context.fill();
    }
  }
  drawNames(context, data, { step, x, box, row, column, colours });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `weights of query ${row + 1} over ${seen} keys`);
  return (px) => Math.max(0, Math.min(n - 1, Math.floor((px - box.left) / step)));
}

function drawNames(context, data, { step, x, box, row, column, colours }) {
  const every = Math.max(1, Math.ceil(30 / step));
  context.textAlign = "center";
  for (let j = 0; j < data.n; j += every) {
    context.fillStyle = colours.faint;
    context.fillText((data.tokens[j].trim() || "␣").slice(0, 8), x(j) + step / 2, box.bottom + 15);
  }
  for (const [j, shade] of [[row, colours.ink], [column, colours.selected]]) {
    if (j === null || j === undefined) continue;
    context.strokeStyle = shade;
    context.lineWidth = 1.5;
    line(context, x(j) + step / 2, box.bottom + 1, x(j) + step / 2, box.bottom + 5);
  }
}

function line(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}
