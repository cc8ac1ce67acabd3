// The state token by token: player, picture, and the mathematics of the present step with its numbers.
import { hasFeatures } from "./kernels.js";
import { short } from "./numbers.js";
import { drawMatrix, drawSlots } from "./state_draw.js";
import { DeltaState, SlotsState, SumsState } from "./states.js";

const number = (x) => short(x).replace("-", "−");
const vector = (x, count = 4) => `[${Array.from(x.slice(0, count), number).join(", ")}${x.length > count ? ", …" : ""}]`;
const norm = (x) => Math.sqrt(x.reduce((sum, value) => sum + value * value, 0));
const escape = (text) => text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
const formula = (html) => `<span class="f">${html}</span>`;
const numbers = (html) => `<span class="n">${html}</span>`;

export class StateView {
  /** elements: { canvas, maths, slider, name, play, note }; moved(token) is called when the token changes. */
  constructor(elements, moved) {
    this.elements = elements;
    this.moved = moved;
    this.token = 0;
    this.chosen = null;
    const { canvas, slider } = elements;
    slider.addEventListener("input", () => this.go(Number(slider.value)));
    canvas.addEventListener("pointermove", (event) => {
      if (!this.pick) return;
      const frame = canvas.getBoundingClientRect();
      const chosen = this.pick(event.clientX - frame.left, event.clientY - frame.top);
      if (chosen !== this.chosen) {
        this.chosen = chosen;
        this.draw();
      }
    });
    canvas.addEventListener("pointerleave", () => {
      this.chosen = null;
      if (this.pick) this.draw();
    });
  }

  /** New data or settings; the state is made when it is drawn. */
  show(data, settings, result) {
    Object.assign(this, { data, settings, result, state: null });
    this.elements.slider.max = data.n - 1;
    this.token = Math.min(this.token, data.n - 1);
    this.chosen = null;
    this.draw();
  }

  go(token) {
    this.token = Math.max(0, Math.min(this.data.n - 1, token));
    this.moved(this.token);
    this.draw();
  }

  /** Starts or stops; about 8 tokens a second, more for long texts. */
  play() {
    const { play } = this.elements;
    if (this.timer) {
      clearInterval(this.timer);
      this.timer = null;
    } else {
      if (this.token >= this.data.n - 1) this.go(0);
      const stride = Math.max(1, Math.round(this.data.n / 128));
      this.timer = setInterval(() => {
        if (this.token >= this.data.n - 1) return this.play();
        return this.go(this.token + stride);
      }, 120);
    }
    play.textContent = this.timer ? "❚❚ pause" : "▶ play";
  }

  draw() {
    if (this.pending || !this.data) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = null;
      this.drawNow();
    });
  }

  drawNow() {
    const { data, settings, token } = this;
    const kind = hasFeatures(settings.kernel) ? "sums" : settings.kernel;
    this.state ||= new { sums: SumsState, delta: DeltaState, nearfar: SlotsState }[kind](data, settings);
    const now = (this.now = this.state.goTo(token));
    const { slider, name, note, canvas, maths } = this.elements;
    slider.value = token;
    name.textContent = `token ${token + 1} of ${data.n}: “${data.tokens[token]}”`;
    this.pick = null;
    if (kind === "sums") {
      drawMatrix(canvas, {
        S: now.S,
        left: [{ values: now.key, label: "φ(k)" }],
        right: [{ values: now.Z, label: "Z" }, { values: now.query, label: "φ(q)" }],
        above: [{ values: now.value, label: "v" }],
        below: [{ values: now.out, label: "out" }],
      });
      note.textContent = `A sum of outer products. Its size, ${now.S.length} + ${now.Z.length} numbers, never grows; every token costs the same.`;
    } else if (kind === "delta") {
      drawMatrix(canvas, {
        S: now.S,
        left: [{ values: now.key, label: "k" }],
        right: [{ values: now.query, label: "q" }],
        above: [{ values: now.value, label: "v" }, { values: now.predicted, label: "kᵀS: what the state said before" }],
        below: [{ values: now.out, label: "out" }],
        scaleOf: [],
      });
      note.textContent = "The state first says what it has for this key, and only the difference from the value is written.";
    } else {
      this.pick = drawSlots(canvas, { data, token, seen: now, chosen: this.chosen });
      note.textContent = "Near tokens stay exact. Far ones share slots; every block of tokens the cheapest pairs of slots merge. Point at a slot to see its tokens.";
    }
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `state after token ${token + 1}`);
    maths.innerHTML = { sums: sumsMaths, delta: deltaMaths, nearfar: slotsMaths }[kind](now, this);
  }
}

/** The exact output of the token and the distance from it, as a line. */
function distance(out, { result, data, token, settings }) {
  if (!result || !settings.causal) return "";
  const exact = result.outExact.subarray(token * data.width, (token + 1) * data.width);
  const error = norm(out.map((x, c) => x - exact[c])) / Math.max(norm(exact), 1e-300);
  return `<p>exact softmax: ${numbers(vector(exact))}<br>relative error of this token: ${numbers(number(error))}</p>`;
}

function sumsMaths(now, view) {
  const g = view.settings.causal ? view.settings.decay || 0 : 0;
  const keep = g ? `e<sup>g</sup> ` : "";
  const said = g ? `, e<sup>g</sup> = ${number(Math.exp(g))}` : "";
  const scale = now.level ? `<p class="note">Numbers of S and Z are times e<sup>${number(-now.level)}</sup>: the state carries that scale, so nothing overflows.</p>` : "";
  return `<p>The token “${escape(view.data.tokens[view.token])}” is written:</p>
${formula(`S ← ${keep}S + φ(k) v<sup>ᵀ</sup>`)}${numbers(`φ(k) = ${vector(now.key)}, |v| = ${number(norm(now.value))}${said}`)}
${formula(`Z ← ${keep}Z + φ(k)`)}${numbers(`Z = ${vector(now.Z)}`)}
<p>and its query reads:</p>
${formula("out = φ(q)<sup>ᵀ</sup>S / φ(q)<sup>ᵀ</sup>Z")}${numbers(`= ${vector(now.numerator)} / ${number(now.denominator)}<br>= ${vector(now.out)}`)}
${now.denominator > 0 ? "" : "<p><b>The denominator is not positive:</b> these weights are no average.</p>"}
${distance(now.out, view)}${scale}`;
}

function deltaMaths(now, view) {
  const { beta, decay } = view.settings;
  return `<p>The state is asked for the key of “${escape(view.data.tokens[view.token])}”:</p>
${formula(`p = k<sup>ᵀ</sup>${decay ? "e<sup>g</sup>" : ""}S`)}${numbers(`= ${vector(now.predicted)}, |v − p| = ${number(norm(now.value.map((x, c) => x - now.predicted[c])))}`)}
<p>and corrected towards the value:</p>
${formula(`S ← ${decay ? "e<sup>g</sup>" : ""}S + β k (v − p)<sup>ᵀ</sup>`)}${numbers(`β = ${beta}, β (v − p) = ${vector(now.written)}`)}
<p>Then the query reads:</p>
${formula("out = q<sup>ᵀ</sup>S / √D")}${numbers(`= ${vector(now.out)}`)}
<p class="note">With β = 1 the state returns exactly v for k afterwards. The rule is for models trained with it: it does not approximate softmax.</p>`;
}

function slotsMaths(now, view) {
  const { block, slots, sinks, near, logits } = now;
  const sum = (x) => x.reduce((a, b) => a + b, 0);
  const chosen = view.chosen !== null && block.slots[view.chosen] ? view.chosen : slots.indexOf(Math.max(...slots));
  const slot = block.slots[chosen];
  const merges = block.merges.length
    ? `<p>Entering the block at token ${block.start + 1}, ${block.merges.length} slot${block.merges.length > 1 ? "s were" : " was"} merged.</p>`
    : `<p>Nothing was merged on entering the block at token ${block.start + 1}.</p>`;
  const detail = slot
    ? `<p>Slot ${chosen + 1} stands for ${slot.tokens.length} token${slot.tokens.length > 1 ? "s" : ""}:</p>
${formula("k̃ = Σ p<sub>j</sub> k<sub>j</sub>, &nbsp; p<sub>j</sub> ∝ exp(a·k<sub>j</sub>)")}${numbers(slot.tokens.slice(0, 5).map((t, m) => `${escape(view.data.tokens[t].trim() || "␣")} ${number(slot.shares[m])}`).join(", ") + (slot.tokens.length > 5 ? ", …" : ""))}
${formula("logit = q·k̃ + bias")}${numbers(`= ${number(logits[chosen] - slot.bias)} + ${number(slot.bias)}, weight ${number(slots[chosen])}`)}`
    : "<p>No slot is in use yet: everything is exact.</p>";
  return `<p>One softmax over ${sinks.length} sinks, ${slots.length} slots and ${near.length} near tokens:</p>
${numbers(`sinks ${number(sum(sinks))}, slots ${number(sum(slots))}, near ${number(sum(near))}`)}${merges}${detail}
<p class="note">a is the mean query so far. A slot with a single token is exact.</p>
${view.result ? distance(view.result.outImplied.slice(view.token * view.data.width, (view.token + 1) * view.data.width), view) : ""}`;
}
