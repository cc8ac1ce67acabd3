// The tokens as text, shaded by the exact weights of one query. Only those in view are touched: thousands of spans are slow.
import { colour, theme } from "./colours.js";

export function drawTokens(holder, tokens) {
  holder.replaceChildren(...tokens.map((token, i) => {
    const span = document.createElement("span");
    span.textContent = token.replace(/\n/g, "⏎");
    span.dataset.i = i;
    return span;
  }));
  holder.scrollTop = 0;
}

/** Brings the span of the chosen query into view. */
export function revealToken(holder, row) {
  const span = holder.children[row];
  const top = span.offsetTop - holder.children[0].offsetTop;
  if (top < holder.scrollTop || top + span.offsetHeight > holder.scrollTop + holder.clientHeight) {
    holder.scrollTop = Math.max(0, top - holder.clientHeight / 2);
  }
}

/** Shades the spans in view; call it again when the holder was scrolled. */
export function shadeTokens(holder, { result, data, row, settings }) {
  const { n } = data;
  let top = 1e-30;
  for (let j = 0; j < n; j++) top = Math.max(top, result.exact[row * n + j]);
  const dark = theme() === "dark";
  holder.querySelector(".query")?.classList.remove("query");
  holder.children[row].classList.add("query");
  const [from, to] = inView(holder);
  for (let j = from; j < to; j++) {
    const later = settings.causal && j > row;
    const { css, level } = colour(later ? 0 : result.exact[row * n + j] / top);
    const { style, classList } = holder.children[j];
    const look = later ? "later" : `${css}${dark}`;
    if (holder.children[j].dataset.look === look) continue;
    holder.children[j].dataset.look = look;
    style.backgroundColor = later ? "" : css;
    style.color = !later && level > 0.45 ? (dark ? "#0b1016" : "#fff") : "";
    classList.toggle("later", later);
  }
}

/** First and last + 1 of the spans in view, and a little more; they run in lines, so their tops are sorted. */
function inView(holder) {
  const spans = holder.children;
  const first = spans[0].offsetTop;
  const index = (height) => {
    let [low, high] = [0, spans.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle].offsetTop - first < height) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  return [index(holder.scrollTop - 40), index(holder.scrollTop + holder.clientHeight + 40)];
}
