// The box beside the pointer: one query, one key, and their weights.
import { KERNELS } from "./kernels.js";
import { short } from "./numbers.js";

/** Shows the numbers of one cell at the pointer. */
export function showCell(tip, event, { result, data, row, column, settings }) {
  const { n, dim, tokens } = data;
  const [exact, implied] = [result.exact[row * n + column], result.implied[row * n + column]];
  let logit = 0;
  for (let c = 0; c < dim; c++) logit += data.q[row * dim + c] * data.k[column * dim + c];
  tip.replaceChildren();
  const line = (text, tag = "div") => (tip.appendChild(document.createElement(tag)).textContent = text);
  line(`query ${row + 1} “${tokens[row]}”`, "b");
  line("");
  line(`key ${column + 1} “${tokens[column]}”`, "b");
  if (settings.causal && column > row) line("hidden: the key comes later");
  else {
    line(`logit q·k/√D   ${short(logit / Math.sqrt(dim))}`);
    if (exact > 0) line(`log Σ exp(logits)   ${short(logit / Math.sqrt(dim) - Math.log(exact))}`);
    line(`exact weight   ${short(exact)}`);
    line(`${KERNELS[settings.kernel].label}   ${short(implied)}`);
    line(`difference   ${short(implied - exact)}`);
  }
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(innerWidth - tip.offsetWidth - 8, event.clientX + 14))}px`;
  tip.style.top = `${Math.max(4, Math.min(innerHeight - tip.offsetHeight - 8, event.clientY + 14))}px`;
}
