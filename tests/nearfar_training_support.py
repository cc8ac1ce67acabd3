"""What tests of native training share: gradients by either engine, and the nodes of a compiled graph."""

import torch

from linattn import NearFar, attention
from nearfar_support import CAUSAL


def error(got, expected):
    """The largest difference, relative to the largest number. What is 0 by right is a rounding error of numbers near 1."""
    if expected.numel() == 0:
        return 0.0
    return float((got - expected).detach().abs().max() / expected.detach().abs().max().clamp_min(1e-2))


def table(reach, heads=4, seed=3):
    return torch.randn(heads, 2 * reach + 1, generator=torch.Generator().manual_seed(seed))


def weights(rows, seed=7):
    return torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed)).to(rows.dtype)


def run(tokens, options, engine, *, lengths=None, mask=None, state_weights=True):
    """Outputs, and gradients of a weighted sum of them and of the last state, for queries, keys, values and the table.

    lengths: of successive calls, each of which goes on from the state of the one before.
    """
    dtype = torch.float64 if engine == "torch" else torch.float32
    leaves = [x.detach().to(dtype).requires_grad_() for x in tokens]
    options = dict(options)
    if "position_bias" in options:
        leaves.append(options["position_bias"].detach().to(dtype).requires_grad_())
        options["position_bias"] = leaves[-1]
    kernel, state, outs, at = NearFar(**options), None, [], 0
    for n in lengths or [tokens[0].shape[2]]:
        cut = slice(at, at + n)
        out, state = attention(
            *(x[:, :, cut] for x in leaves[:3]),
            kernel=kernel,
            state=state,
            return_state=True,
            engine=engine,
            key_mask=None if mask is None else mask[:, cut],
            **CAUSAL,
        )
        outs.append(out)
        at += n
    out = torch.cat(outs, 2)
    if mask is not None:  # a hidden token's row is 0 or what the others show it, as the calls may be
        out = out.masked_fill(~mask[:, None, :, None], 0)
    total = (out * weights(out)).sum()
    if state_weights:  # what the order of slots does not change
        live = state.bias > -torch.inf
        total = total + (state.sink * weights(state.sink)).sum() + (state.near * weights(state.near)).sum()
        total = total + (state.slots.square().sum(-1) * state.bias.masked_fill(~live, 0).sin()).sum()
    return out, torch.autograd.grad(total, leaves)


def nodes_of(function, *inputs):
    """The compiled function's result, and the operators of this library in its graph."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    out = torch.compile(function, fullgraph=True, backend=backend)(*inputs)
    found = [str(n.target) for graph in graphs for n in graph.graph.nodes if "linattn" in str(n.target)]
    return out, [x.removesuffix(".default").split(".")[-1] for x in found]


def check(tokens, options, tolerance=1e-4, out_tolerance=1e-5, **how):
    """Outputs and gradients of the native engine are those of the torch engine."""
    out, grads = run(tokens, options, "native", **how)
    expected, wide = run(tokens, options, "torch", **how)
    assert error(out, expected) < out_tolerance
    for got, want in zip(grads, wide, strict=True):
        assert error(got, want) < tolerance
