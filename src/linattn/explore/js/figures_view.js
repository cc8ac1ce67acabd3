// The error measures, each with what a plain average of the values would give.
import { short } from "./numbers.js";

export function drawFigures(holder, { report, baseline }, kernel) {
  const signed = kernel === "delta";
  const entries = [
    [short(report.relative_error), "relative error of the output", report.relative_error > baseline.relative_error],
    [short(baseline.relative_error), "plain average of the values, which looks at nothing", false],
    [short(report.row_l1), "mean distance of the rows (0 to 2)", report.row_l1 > baseline.row_l1],
    [`${short(100 * report.bad_rows)} %`, "queries for which zeros would be closer", report.bad_rows > 0.5],
    ...(signed ? [] : [[`${short(100 * report.nonpositive)} %`, "denominators that are not positive", report.nonpositive > 0]]),
  ];
  holder.replaceChildren(...entries.map(([value, label, bad]) => {
    const box = document.createElement("div");
    box.className = bad ? "figure bad" : "figure";
    box.appendChild(document.createElement("b")).textContent = value + (bad ? " ▲" : "");
    box.appendChild(document.createElement("span")).textContent = label;
    return box;
  }));
}
