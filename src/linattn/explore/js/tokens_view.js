// The tokens as text, shaded by the exact weights of one query.
import { colour, theme } from "./colours.js";

export function drawTokens(holder, tokens) {
  holder.replaceChildren(...tokens.map((token, i) => {
    const span = document.createElement("span");
    span.textContent = token.replace(/\n/g, "⏎");
    span.dataset.i = i;
    return span;
  }));
}

export function shadeTokens(holder, { result, data, row, settings }) {
  const { n } = data;
  let top = 1e-30;
  for (let j = 0; j < n; j++) top = Math.max(top, result.exact[row * n + j]);
  const dark = theme() === "dark";
  for (let j = 0; j < n; j++) {
    const later = settings.causal && j > row;
    const { css, level } = colour(later ? 0 : result.exact[row * n + j] / top);
    const { style, classList } = holder.children[j];
    style.backgroundColor = later ? "" : css;
    style.color = !later && level > 0.45 ? (dark ? "#0b1016" : "#fff") : "";
    classList.toggle("query", j === row);
    classList.toggle("later", later);
  }
}
