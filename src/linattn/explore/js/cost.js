// FLOPs and bytes by formula: the numbers of linattn.measure.cost, for one head.

const CHUNK = 64;

/** Features of a kernel for tokens of `dim` coordinates. */
export function featureCount({ kernel, features }, dim) {
  if (kernel === "positive") return features;
  if (kernel === "trig" || kernel === "trig-raw") return 2 * features;
  if (kernel === "polynomial" || kernel === "taylor") return 1 + dim + (dim * (dim + 1)) / 2;
  return dim;
}

/** { flops, bytes } of exact softmax. */
export function exactCost(tokens, dim, width, causal) {
  const pairs = causal ? (tokens * (tokens + 1)) / 2 : tokens * tokens;
  return { flops: 2 * pairs * (dim + width), bytes: 4 * tokens * (dim + width) };
}

/** { flops, bytes } of the kernel of the settings. */
export function kernelCost(settings, tokens, dim, width) {
  if (settings.kernel === "nearfar") return nearFarCost(settings, tokens, dim, width);
  if (settings.kernel === "delta") {
    // k^T S, k (..)^T and q^T S, 2 D M each, for every token
    return { flops: tokens * 6 * dim * width, bytes: 4 * dim * width };
  }
  const r = featureCount(settings, dim);
  const random = { positive: r, trig: r / 2, "trig-raw": r / 2 }[settings.kernel] || 0;
  let flops = tokens * (4 * dim * random + 4 * r * (width + 1));
  if (settings.causal) flops += tokens * Math.min(tokens, CHUNK) * 2 * (r + width + 1);
  return { flops, bytes: 4 * r * (width + 1) };
}

function nearFarCost({ window, slots, sinks, block }, tokens, dim, width) {
  const exact = window + block;
  const seen = Math.min(tokens, exact + sinks + slots);
  const merges = Math.max(0, tokens - exact - sinks - slots) / block;
  const stride = block % 4 === 0 ? 4 : 1; // every how many tokens a query is sampled
  const sampled = (2 * tokens * seen * dim) / stride;
  const flops = 2 * tokens * seen * (dim + width) + merges * 2 * (slots + block) ** 2 * (dim + width) + sampled;
  const statistics = 2 * window + (2 + Math.floor(block / stride)) * (dim + 1);
  const bytes = 4 * ((window + block + sinks) * (dim + width) + slots * (dim + width + 3) + statistics);
  return { flops: Math.round(flops), bytes };
}

/** The number of tokens from which on the kernel needs fewer FLOPs than exact softmax, or null up to `most`. */
export function crossing(settings, dim, width, most = 2 ** 24) {
  const cheaper = (n) => kernelCost(settings, n, dim, width).flops < exactCost(n, dim, width, settings.causal).flops;
  if (!cheaper(most)) return null;
  let [low, high] = [0, most];
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (cheaper(middle)) high = middle;
    else low = middle;
  }
  return high;
}
