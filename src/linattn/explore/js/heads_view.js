// All heads of a layer as small maps, each with the error of the chosen kernel, so that the telling ones are found at a glance.
import { paint } from "./colours.js";
import { compute } from "./compute.js";
import { short } from "./numbers.js";
import { makeSource, withNorm } from "./sources.js";

const TOKENS = 64; // at most, of a small map

export class HeadsView {
  /** holder: where the maps go; choose(head) reports which one the reader takes. */
  constructor(holder, note, choose) {
    Object.assign(this, { holder, note, choose, run: 0, entries: [] });
  }

  /** Shows the layer of the settings; maps of a newer call replace those of an older one as they are computed. */
  show(settings, heads) {
    const run = ++this.run;
    const layer = settings.source === "head" && heads?.layers[settings.layer];
    this.holder.hidden = this.note.hidden = !layer;
    if (!layer) return;
    const n = Math.min(TOKENS, settings.n, heads.tokens.length);
    this.note.textContent =
      `All ${layer.heads} heads of layer ${settings.layer}, first ${n} tokens: exact weights, and the kernel's error (the plain average's in brackets).`;
    while (this.entries.length < layer.heads) this.entries.push(this.entry(this.entries.length));
    this.holder.replaceChildren(...this.entries.slice(0, layer.heads).map(({ button }) => button));
    const next = (head) => {
      if (run !== this.run || head === layer.heads) return;
      this.fill(this.entries[head], { ...settings, head, n }, heads);
      setTimeout(() => next(head + 1)); // the page goes on answering
    };
    this.entries.forEach(({ button }, head) => button.setAttribute("aria-pressed", head === settings.head));
    setTimeout(() => next(0));
  }

  entry(head) {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.head = head;
    button.onclick = () => this.choose(head);
    const canvas = button.appendChild(document.createElement("canvas"));
    const label = button.appendChild(document.createElement("span"));
    return { button, canvas, label };
  }

  fill({ button, canvas, label }, settings, heads) {
    const data = withNorm(makeSource(settings, heads), settings.norm);
    const { exact, report, baseline } = compute(data, settings);
    canvas.width = canvas.height = data.n;
    const context = canvas.getContext("2d");
    const image = context.createImageData(data.n, data.n);
    let top = 1e-30;
    for (let at = data.n; at < exact.length; at++) top = Math.max(top, exact[at]);
    paint(image, exact, top, settings.scale);
    context.putImageData(image, 0, 0);
    const better = report.relative_error < baseline.relative_error;
    label.replaceChildren(`head ${settings.head}`, document.createElement("br"),
      `${short(report.relative_error)}${better ? "" : " ▲"} (${short(baseline.relative_error)})`);
    button.classList.toggle("bad", !better);
    button.setAttribute("aria-label", `head ${settings.head}: error ${short(report.relative_error)}, plain average ${short(baseline.relative_error)}`);
  }
}
