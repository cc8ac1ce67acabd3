"""Sums with decay on every instruction set: outputs, states and gradients against float64, masks, packing, heads, lengths."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from linattn.engines.native import decayed_sums_bindings
from linattn.engines.native.decayed_sums import available, decayed_sums, decode
from linattn.ops.decayed_sums.call import DecayedSumsCall
from native_support import close, isa, needs_native  # noqa: F401

pytestmark = [needs_native, pytest.mark.skipif(not available(), reason="the library has no decayed sums")]
SCALE = 0.3


@dataclass
class Case:
    """Shapes of a call, and how strong its decays are."""

    tokens: int
    heads: tuple[int, int, int] = (2, 2, 2)  # of queries, keys, states
    dim: int = 16
    value_dim: int = 16
    batch: int = 1
    decay: float | None = 0.2  # the largest |g|; None: no decay
    channels: bool = False
    bounds: list[int] | None = None
    mask: bool = False
    dtype: torch.dtype = torch.float32
    at_least: float = 0.0  # the smallest |g|

    def inputs(
        self, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, list[int] | None, Tensor]:
        g = torch.Generator().manual_seed(seed)
        b, t, d, m = self.batch, self.tokens, self.dim, self.value_dim
        query_heads, key_heads, heads = self.heads
        q, k = (torch.randn(b, h, t, d, generator=g).to(self.dtype) for h in (query_heads, key_heads))
        v = torch.randn(b, heads, t, m, generator=g).to(self.dtype)
        decay = None
        if self.decay is not None:
            spread = torch.rand(b, heads, t, *([d] if self.channels else []), generator=g)
            decay = -(self.at_least + (self.decay - self.at_least) * spread)
        mask = torch.rand(b, t, generator=g) < 0.7 if self.mask else None
        sequences = len(self.bounds) - 1 if self.bounds else 1
        return q, k, v, decay, mask, self.bounds, torch.randn(b * sequences, heads, d, m, generator=g)


def step_by_step(query, key, value, log_decay, mask, bounds, state) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    heads, outputs, total = value.shape[1], max(query.shape[1], value.shape[1]), query.shape[2]
    bounds = bounds or [0, total]
    key = key[:, [h * key.shape[1] // heads for h in range(heads)]]
    query = query[:, [o * query.shape[1] // outputs for o in range(outputs)]]
    read = [o * heads // outputs for o in range(outputs)]
    rows, finals = [], []
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        S = state[i :: len(bounds) - 1]
        for t in range(begin, end):
            new = S
            if log_decay is not None:
                factor = log_decay[:, :, t].exp()
                new = new * (factor[..., None] if factor.dim() == 3 else factor[..., None, None])
            new = new + key[:, :, t, :, None] * value[:, :, t, None, :]
            S = new if mask is None else torch.where(mask[:, t, None, None, None], new, S)
            rows.append(SCALE * torch.einsum("bod,bodm->bom", query[:, :, t], S[:, read]))
        finals.append(S)
    out = torch.stack(rows, 2) if rows else query.new_zeros(*query.shape[:3], value.shape[3])
    return out, torch.stack(finals, 1).flatten(0, 1)


def run(inputs) -> tuple[Tensor, Tensor]:
    return decayed_sums(DecayedSumsCall(*inputs, SCALE))


def doubled(inputs):
    return [x.double() if isinstance(x, Tensor) and x.dtype is not torch.bool else x for x in inputs]


CASES = {
    "one token": Case(1, dim=5, value_dim=7),
    "two": Case(2),
    "31": Case(31, value_dim=33),
    "63, no decay": Case(63, decay=None),
    "64": Case(64, batch=2, mask=True),
    "65": Case(65, dim=20, value_dim=9),
    "127, keys shared": Case(127, heads=(1, 1, 3)),
    "200, queries share": Case(200, heads=(4, 1, 2), mask=True),
    "queries and keys shared differently": Case(70, heads=(2, 3, 6), dim=8, value_dim=8),
    "strong decay": Case(130, decay=21.0, at_least=20.0, mask=True),
    "any decay": Case(130, decay=90.0),
    "packed": Case(150, heads=(1, 1, 2), bounds=[0, 7, 7, 100, 150], mask=True, batch=2),
    "channels": Case(65, dim=20, value_dim=9, channels=True, mask=True),
    "channels, 31": Case(31, heads=(2, 1, 2), channels=True, batch=2),
    "channels, strong": Case(100, decay=21.0, at_least=20.0, channels=True),
    "channels, any decay": Case(100, heads=(4, 1, 2), decay=90.0, channels=True),
    "channels, packed": Case(150, heads=(1, 1, 2), bounds=[0, 7, 7, 100, 150], channels=True),
}
cases = pytest.mark.parametrize("name", CASES)


@cases
def test_outputs_states_and_gradients(name, isa):  # noqa: F811
    inputs = CASES[name].inputs()
    mine = [x.requires_grad_() if isinstance(x, Tensor) and x.dtype is torch.float32 else x for x in inputs]
    exact = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in doubled(mine)]
    got, expected = run(mine), step_by_step(*exact)
    for one, other in zip(got, expected, strict=True):
        close(one.detach(), other.detach(), 1e-5)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(9)) for x in got]
    leaves = [x for x in mine if isinstance(x, Tensor) and x.requires_grad]
    grads = torch.autograd.grad(sum((x * w).sum() for x, w in zip(got, weights, strict=True)), leaves)
    leaves = [x for x in exact if isinstance(x, Tensor) and x.requires_grad]
    truth = torch.autograd.grad(sum((x * w.double()).sum() for x, w in zip(expected, weights, strict=True)), leaves)
    for grad, true in zip(grads, truth, strict=True):
        close(grad, true, 3e-5)


@pytest.mark.parametrize("channels", [False, True])
def test_segments_on_several_threads(channels):
    """One head: threads share its tokens, forward and backward; checkpoints lie every 256 tokens."""
    inputs = Case(1100, heads=(1, 1, 1), dim=8, value_dim=8, decay=0.05, channels=channels).inputs()
    results = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        mine = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in inputs]
        out, final = run(mine)
        leaves = [x for x in mine if isinstance(x, Tensor)]
        results.append([out.detach(), final.detach(), *torch.autograd.grad(out.sum() + final.sum(), leaves)])
        with torch.no_grad():
            results[-1] += run(mine)
    torch.set_num_threads(before)
    for one, other in zip(*results, strict=True):
        close(one, other, 1e-5)
    expected = step_by_step(*doubled(inputs))
    close(results[1][0], expected[0])
    close(results[1][1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [False, True])
def test_half_inputs(dtype, channels, isa):  # noqa: F811
    inputs = Case(100, heads=(1, 1, 2), dim=20, value_dim=24, dtype=dtype, channels=channels).inputs()
    out, final = run(inputs)
    expected, state = step_by_step(*doubled(inputs))
    assert out.dtype is dtype
    assert final.dtype is torch.float32
    close(out, expected, 1e-3 if dtype is torch.float16 else 8e-3)
    close(final, state, 1e-5)


@pytest.mark.parametrize("channels", [False, True])
def test_masked_tokens_have_no_effect(channels):
    q, k, v, decay, mask, bounds, state = Case(140, channels=channels, mask=True, batch=2).inputs()
    clean = run((q, k, v, decay, mask, bounds, state))
    hidden = ~mask
    k, v, decay = (x.clone() for x in (k, v, decay))
    for x in (k, v, decay):
        x.transpose(1, 2)[hidden] = torch.nan
        x.requires_grad_()
    dirty = run((q, k, v, decay, mask, bounds, state))
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one, other)
    for grad in torch.autograd.grad(dirty[0].sum() + dirty[1].sum(), (k, v, decay)):
        assert grad.isfinite().all()
        assert not grad.transpose(1, 2)[hidden].any()


@pytest.mark.parametrize("channels", [False, True])
def test_later_tokens_change_nothing_earlier(channels):
    inputs = list(Case(200, channels=channels, heads=(1, 1, 2)).inputs())
    first = run(inputs)[0]
    changed = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    for x in changed[:4]:
        x[:, :, 77:] *= 0.5
    second = run(changed)[0]
    assert torch.equal(first[:, :, :77], second[:, :, :77])
    assert not torch.equal(first[:, :, 77:], second[:, :, 77:])


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("cut", [1, 64, 99])
def test_two_calls_are_one(channels, cut):
    q, k, v, decay, _, _, state = Case(150, channels=channels, heads=(2, 1, 2), batch=2).inputs()
    out, final = run((q, k, v, decay, None, None, state))
    early, middle = run((*(x[:, :, :cut] for x in (q, k, v, decay)), None, None, state))
    late, last = run((*(x[:, :, cut:] for x in (q, k, v, decay)), None, None, middle))
    close(torch.cat([early, late], 2), out)
    close(last, final)


@pytest.mark.parametrize("name", ["one token", "channels", "64", "queries and keys shared differently", "63, no decay"])
def test_decode_is_a_call_of_one_token(name, isa):  # noqa: F811
    q, k, v, decay, mask, _, state = CASES[name].inputs()
    for t in range(min(3, q.shape[2])):
        token = slice(t, t + 1)
        inputs = [None if x is None else x[:, :, token] for x in (q, k, v, decay)]
        seen = None if mask is None else mask[:, token]
        expected = run((*inputs, seen, None, state))
        out, new = decode(DecayedSumsCall(*inputs, seen, None, state, SCALE))
        close(out, expected[0])
        close(new, expected[1])
        again, same = decode(DecayedSumsCall(*inputs, seen, None, state, SCALE), out_state=state)
        assert same is state
        assert torch.equal(again, out)
        assert torch.equal(state, new)
    with pytest.raises(ValueError, match="out_state"):
        decode(DecayedSumsCall(*inputs, seen, None, state, SCALE), out_state=state[:, :, 1:])


def test_no_decay_forgets_nothing():
    """A log decay of exactly 0 gives the bits of a call without decay."""
    q, k, v, _, _, _, state = Case(300, decay=None, dim=8).inputs()
    plain = run((q, k, v, None, None, None, state))
    zeros = run((q, k, v, torch.zeros(1, 2, 300), None, None, state))
    for one, other in zip(plain, zeros, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("decay", [None, 0.0, -1e-6])
def test_a_million_equal_tokens(decay):
    n, value = 1_000_000, torch.tensor([0.1, 0.7, 1.3, 0.3])
    q = torch.ones(1, 1, 1, 2).expand(1, 1, n, 2)
    v = value.expand(1, 1, n, 4)
    g = None if decay is None else torch.full((1, 1, 1), decay).expand(1, 1, n)
    _, final = decayed_sums(DecayedSumsCall(q, q, v, g))
    rate = 0.0 if decay is None else float(torch.tensor(decay, dtype=torch.float32))
    weights = torch.arange(n, dtype=torch.float64).mul(rate).exp().sum()
    close(final, (weights * value.double()).expand(1, 1, 2, 4), 3e-5)


def test_strided_inputs_are_taken_as_they_are():
    """Layout (batch, tokens, heads, dim), as models have it, and a last dimension that is not contiguous."""
    q, k, v, decay, _, _, state = Case(90, heads=(1, 1, 3)).inputs()
    expected = run((q, k, v, decay, None, None, state))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, decay)]
    turned[1] = turned[1].transpose(-1, -2).contiguous().transpose(-1, -2)
    for one, other in zip(run((*turned, None, None, state)), expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("channels", [False, True])
def test_operators(channels):
    from linattn.engines.native import decayed_sums as operators

    q, k, v, decay, mask, bounds, state = Case(20, channels=channels, mask=True, bounds=[0, 5, 20], dim=4).inputs()
    floats = [x.requires_grad_() for x in (q, k, v, decay, state)]
    torch.library.opcheck(operators.forward_op, (*floats[:4], mask, bounds, floats[4], SCALE, True))
    torch.library.opcheck(
        operators.forward_op, (q.detach(), k.detach(), v.detach(), None, None, None, None, SCALE, False)
    )
    compiled = torch.compile(
        lambda *x: decayed_sums(DecayedSumsCall(*x, None, None, floats[4][:1], SCALE)), backend="eager", fullgraph=True
    )
    close(compiled(*floats[:4])[0].detach(), run((*floats[:4], None, None, floats[4][:1]))[0].detach())


def test_no_tokens_and_second_derivatives():
    empty = Case(0).inputs()
    out, final = run(empty)
    assert out.shape == (1, 2, 0, 16)
    assert torch.equal(final, empty[-1])
    q, k, v, decay, _, _, state = Case(5).inputs()
    out, _ = run((q.requires_grad_(), k, v, decay, None, None, state))
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(grad.sum(), q)


def test_the_structure_matches_the_library(monkeypatch):
    monkeypatch.setattr(decayed_sums_bindings, "_entry", decayed_sums_bindings._entry.__wrapped__)
    assert decayed_sums_bindings.available()
    monkeypatch.setattr(decayed_sums_bindings.ctypes, "sizeof", lambda _: 1)
    with pytest.raises(RuntimeError, match="another version"):
        decayed_sums_bindings._entry("forward")
