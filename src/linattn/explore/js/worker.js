// The heavy part, beside the page: both attention matrices, and how far they are from each other.
import { computeSteps } from "./compute.js";

let latest = 0;

onmessage = async ({ data: { id, data, settings } }) => {
  latest = id;
  const steps = computeSteps(data, settings);
  let until = performance.now() + 12;
  for (;;) {
    const { done, value } = steps.next();
    if (done) {
      const buffers = [value.exact.buffer, value.implied.buffer];
      postMessage({ id, result: value }, buffers);
      return;
    }
    if (performance.now() < until) continue;
    await new Promise((resolve) => setTimeout(resolve)); // lets a newer request in
    if (latest !== id) return;
    until = performance.now() + 12;
  }
};
