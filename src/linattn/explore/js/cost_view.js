// Costs as the text grows: FLOPs and bytes by formula, and seconds where this machine was asked.
import { lineChart, short } from "./chart.js";
import { crossing, exactCost, kernelCost } from "./cost.js";
import { KERNELS } from "./kernels.js";

const LENGTHS = Array.from({ length: 15 }, (_, i) => 2 ** (i + 4)); // 16 to 262144

export class CostView {
  constructor(given, ask) {
    this.times = given.times;
    this.ask = ask;
    this.button = document.getElementById("measure");
    this.button.hidden = !given.live?.times;
    this.button.onclick = () => this.measure();
  }

  show(data, settings) {
    Object.assign(this, { data, settings: { ...settings } });
    const { dim, width, n } = data;
    const label = KERNELS[settings.kernel].label;
    const series = (field) => [
      { label: "exact softmax", points: LENGTHS.map((x) => [x, exactCost(x, dim, width, settings.causal)[field]]) },
      { label, points: LENGTHS.map((x) => [x, kernelCost(settings, x, dim, width)[field]]) },
    ];
    const axis = { label: "tokens", log: true };
    const where = crossing(settings, dim, width);
    const here = [{ x: n, label: "this text" }];
    const flops = { title: "FLOPs of all outputs, one head", series: series("flops"), x: axis, y: { log: true, choice: true }, rules: here };
    const bytes = { title: "bytes kept for the next token", series: series("bytes"), x: axis, y: { log: true, choice: true }, rules: here };
    this.charts ||= {
      flops: lineChart(document.getElementById("chart-flops"), flops),
      bytes: lineChart(document.getElementById("chart-bytes"), bytes),
    };
    this.charts.flops.update(flops);
    this.charts.bytes.update(bytes);
    const [exact, kernel] = [exactCost(n, dim, width, settings.causal), kernelCost(settings, n, dim, width)];
    const cross = where === null ? "The kernel never needs fewer FLOPs." : `The kernel needs fewer FLOPs from ${short(where)} tokens on.`;
    document.getElementById("cost-note").textContent =
      `At ${n} tokens: ${short(exact.flops)} FLOPs exact, ${short(kernel.flops)} by the kernel; state ${short(exact.bytes)}B and ${short(kernel.bytes)}B. ${cross}`;
    this.showTimes();
  }

  async measure() {
    const { button } = this;
    button.disabled = true;
    button.textContent = "measuring …";
    try {
      this.times = await this.ask("/api/times", { settings: this.settings, dim: this.data.dim });
      button.textContent = "Measure again";
    } catch (error) {
      button.textContent = error.message.slice(0, 60);
    }
    button.disabled = false;
    this.showTimes();
  }

  showTimes() {
    const holder = document.getElementById("chart-times");
    if (!this.times) return;
    const { lengths, exact, kernel, machine, name } = this.times;
    const points = (values) => lengths.map((n, i) => [n, values[i] * 1e3]);
    const options = {
      title: `milliseconds measured: one head, float32, ${machine}`,
      series: [{ label: "softmax (torch)", points: points(exact) }, { label: KERNELS[name].label, points: points(kernel) }],
      x: { label: "tokens", log: true, ticks: lengths },
      y: { log: true, choice: true, unit: "ms" },
      rules: [],
    };
    if (this.timesChart) this.timesChart.update(options);
    else this.timesChart = lineChart(holder, options);
  }
}
