// The lines of Python that give what the page shows.

const text = (value) => JSON.stringify(value).replace(/[\u007f-\uffff]/g, (c) => c); // a Python string as well

function sourceLines(settings, data, heads) {
  const { source, norm } = settings;
  const scaled = norm === 1 ? "" : `\nq, k = ${norm} * q, ${norm} * k`;
  if (source === "gaussian") {
    return `g = torch.Generator().manual_seed(${settings.data})
q, k, v = torch.randn(3, 1, ${data.n}, ${data.dim}, dtype=torch.float64, generator=g)  # each (heads, tokens, dim)${scaled}`;
  }
  if (source === "letters") {
    return `text = ${text(data.tokens.join(""))}
letters = sorted(set(text))
g = torch.Generator().manual_seed(${settings.data})
table = torch.randn(2, len(letters), ${data.dim}, dtype=torch.float64, generator=g)
index = [letters.index(c) for c in text]
q = k = table[0, index].unsqueeze(0)  # (heads, tokens, dim)
v = table[1, index].unsqueeze(0)${scaled}`;
  }
  if (source === "handmade") {
    const typed = data.tokens.filter((t) => t !== "#").join("");
    return `from linattn_lab.handmade.designs import DESIGNS
from linattn_lab.handmade.numpy_head import single_head
design = DESIGNS["${settings.design}"]
trace = single_head(design.encode(design.read("${typed}")), design.weights())
q, k, v = (torch.from_numpy(x).unsqueeze(0) for x in (trace.Q, trace.K, trace.V))${scaled}`;
  }
  const model = heads.model.startsWith("SmolLM2") ? "smollm2" : heads.model;
  return `from linattn.hf import weights
from linattn.hf.heads import read_heads
model, tokenizer = weights.load(${text(model)})
text = ${text(heads.text.length > 400 ? heads.text.slice(0, 400) : heads.text)}${heads.text.length > 400 ? "  # and so on" : ""}
ids = tokenizer(text, return_tensors="pt").input_ids[:, :${data.n}]
q, k, v, causal = read_heads(model, ids, [${settings.layer}])[${settings.layer}]
group = q.shape[0] // k.shape[0]
q, k, v = (x.double() for x in (q[${settings.head}:${settings.head + 1}], k[${settings.head} // group][None], v[${settings.head} // group][None]))${scaled}`;
}

function kernelLine({ kernel, features, seed, window, slots, sinks, block }, dim) {
  return {
    positive: `linattn.kernels.Positive(${dim}, features=${features}, seed=${seed})`,
    trig: `linattn.kernels.Trig(${dim}, features=${features}, seed=${seed})`,
    "trig-raw": `linattn.kernels.Trig(${dim}, features=${features}, normalize=False, seed=${seed})`,
    elu: "linattn.kernels.Elu()",
    relu: "linattn.kernels.Relu()",
    polynomial: "linattn.kernels.Polynomial(degree=2, offset=1.0)",
    taylor: "linattn.kernels.Taylor(order=2)",
    nearfar: `linattn.NearFar(window=${window}, slots=${slots}, sinks=${sinks}, block=${block})`,
  }[kernel];
}

/** Runs as it stands: prints the errors that the page shows, and leaves both matrices in `exact` and `implied`. */
export function pythonFor(settings, data, heads) {
  const causal = settings.causal ? "True" : "False";
  const start = `import torch\nimport linattn\n\n${sourceLines(settings, data, heads)}\n\n`;
  const exact = `exact = linattn.implied_attention(q, k, "softmax", is_causal=${causal})\n`;
  const decay = settings.causal ? settings.decay : 0;
  if (settings.kernel === "delta") {
    const forget = decay ? `, log_decay=torch.full((1, ${data.n}), ${decay}, dtype=q.dtype)` : "";
    return `${start}beta = torch.full((1, ${data.n}), ${settings.beta}, dtype=q.dtype)
own = torch.eye(${data.n}, dtype=q.dtype).unsqueeze(0)  # every token's value is its own unit vector
${exact}implied = linattn.delta_rule(q, k, own, beta=beta${forget}, normalize_qk=True)
out, right = implied @ v, exact @ v
print("relative error", ((out - right).norm() / right.norm()).item())
`;
  }
  const made = `kernel = ${kernelLine(settings, data.dim)}\n`;
  if (decay) {
    return `${start}${made}forget = torch.full((1, ${data.n}), ${decay}, dtype=q.dtype)
own = torch.eye(${data.n}, dtype=q.dtype).unsqueeze(0)  # every token's value is its own unit vector
${exact}implied = linattn.attention(q, k, own, kernel=kernel, is_causal=True, log_decay=forget)
out, right = implied @ v, exact @ v
print("relative error", ((out - right).norm() / right.norm()).item())
`;
  }
  if (settings.kernel === "nearfar") {
    // What is merged depends on the values, so they must be there.
    return `${start}${made}${exact}implied = linattn.implied_attention(q, k, kernel, value=v, is_causal=True)
report = linattn.measure.fidelity(q, k, v, kernel, is_causal=True)
print("relative error", report.relative_error)
print("plain average ", report.baseline.relative_error)
`;
  }
  return `${start}${made}${exact}implied = linattn.implied_attention(q, k, kernel, is_causal=${causal})
report = linattn.measure.fidelity(q, k, v, kernel, is_causal=${causal})
print("relative error", report.relative_error)
print("plain average ", report.baseline.relative_error)
`;
}
