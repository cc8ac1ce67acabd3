"""Near/far with logit caps, ALiBi and tables of position biases, against softmax while keys fit and a dense twin beyond."""

from functools import cache

import pytest
import torch

from linattn import NearFar, attention, implied_attention
from linattn.engines.native import available
from linattn.engines.native.ffi import library
from linattn.nearfar.biases import Scores
from linattn.nearfar.bidirectional import Options, compress
from linattn.nearfar.merge import merge
from linattn.nearfar.positioned import with_positions
from native_support import isas, needs_native
from nearfar_support import CAUSAL, SMALL, error, in_pieces, tensors
from nearfar_twin import twin

N = 90
SLOPES = torch.tensor([0.5, 0.1, 0.02, 0.004])


def table(reach, seed=3):
    return torch.randn(4, 2 * reach + 1, generator=torch.Generator().manual_seed(seed))


BIASES = {
    "cap": {"logit_cap": 1.5},
    "ALiBi": {"alibi_slopes": SLOPES},
    "table": {"position_bias": table(25)},
    "table beyond the window": {"position_bias": table(60)},
    "table and cap": {"position_bias": table(7), "logit_cap": 2.0},
}
NATIVE = [name for name in BIASES if name != "table beyond the window"]
MASKED = [13, 0]  # hidden tokens at the beginning of each sequence
MASK = torch.arange(N) >= torch.tensor(MASKED).unsqueeze(-1)


def kernel_of(name, **changes):
    return NearFar(**{**SMALL, **BIASES[name], **changes})


def softmax(q, k, v, kernel, *, causal=True, first=(0, 0)):
    """Dense, in float64. first: where the visible tokens of each sequence begin."""
    q, k, v = (x.double() for x in (q, k, v))
    groups, S = q.shape[1] // k.shape[1], k.shape[2]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    relative = torch.arange(S) - torch.arange(S).unsqueeze(-1)
    if kernel.logit_cap is not None:
        logits = kernel.logit_cap * torch.tanh(logits / kernel.logit_cap)
    if kernel.alibi_slopes is not None:
        logits = logits + kernel.alibi_slopes.double()[:, None, None] * relative
    if kernel.position_bias is not None:
        reach = kernel.reach
        logits = logits + kernel.bias_table().double()[:, relative.clamp(-reach, reach) + reach]
    seen = (relative <= 0) if causal else torch.ones(S, S, dtype=torch.bool)
    visible = torch.arange(S) >= torch.tensor(first).unsqueeze(-1)
    return logits.masked_fill(~(seen & visible[:, None, None]), -torch.inf).softmax(-1).nan_to_num() @ v


@cache
def reference(name, recall):
    """Tokens, and what the twin gives for them: one sequence begins with hidden tokens."""
    q, k, v = tensors(N)
    q = q * 1.5
    return (q, k, v), twin(q, k, v, kernel_of(name, recall=recall), mask=MASK)


def check(name, engine, recall, tolerance=2e-6):
    """One call, chunks, and token by token, with padding and without. Biases count when blocks are chosen for recall, too."""
    tokens, expected = reference(name, recall)
    kernel = kernel_of(name, recall=recall)
    for rows, given in ((slice(None), MASK), (slice(1, 2), None)):
        for lengths in ([50, 1, 1, 30, N - 82],) if recall else ([N], [50, 1, 1, 30, N - 82], [1] * N):
            out, _ = in_pieces(*(x[rows] for x in tokens), lengths, kernel, given, engine=engine)
            assert error(out, expected[rows]) < tolerance


@pytest.mark.parametrize("name", BIASES)
def test_the_torch_engine_is_the_dense_twin(name):
    check(name, "torch", recall=2)
    check(name, "torch", recall=0)
    tokens, expected = reference(name, 0)
    one = [x[1:].double() for x in tokens]
    wide = attention(*one, kernel=kernel_of(name), engine="torch", **CAUSAL)
    assert error(wide, expected[1:]) < 1e-12
    assert error(wide, softmax(*one, kernel_of(name), first=(0,))) > 1e-2  # keys were merged


@needs_native
@pytest.mark.parametrize("isa", isas)
@pytest.mark.parametrize("name", NATIVE)
def test_the_native_engine_is_the_dense_twin(name, isa):
    before = library.isa
    library.set_isa(isa)
    try:
        check(name, "native", recall=2)
        check(name, "native", recall=0)
    finally:
        library.set_isa(before)


@pytest.mark.parametrize("engine", ["torch", pytest.param("auto", marks=needs_native)])
@pytest.mark.parametrize("name", BIASES)
def test_exact_while_the_keys_fit(name, engine):
    """Also through slots, once keys have left the window."""
    kernel = kernel_of(name, slots=100)
    q, k, v = tensors(N)
    for given, first in ((None, (0, 0)), (MASK, MASKED)):
        expected = softmax(q, k, v, kernel, first=first)
        for lengths in ([N], [60, 1, 1, 20, N - 82], [1] * N):
            out, _ = in_pieces(q, k, v, lengths, kernel, given, engine=engine)
            shown = torch.ones(N, dtype=torch.bool) if given is None else given.all(0)
            assert error(out[:, :, shown], expected[:, :, shown]) < 1e-6
    few = attention(q[:, :, -5:], k, v, kernel=kernel_of(name), engine=engine, **CAUSAL)
    assert error(few, softmax(q, k, v, kernel)[:, :, -5:]) < 1e-6


def both_ways(q, k, v, kernel, hidden=0):
    """Near/far without a causal mask, dense: every far key has its share of its slot's weight, and the bias of its side.

    hidden: tokens of zeros that are in the call, too.
    """
    scale, D = q.shape[-1] ** 0.25, q.shape[-1]
    B, heads, S, _ = q.shape
    H = k.shape[1]
    x = (q / scale).unflatten(1, (H, -1))
    entries = torch.cat([k / scale, v], -1)
    x, entries = (torch.nn.functional.pad(t, (0, 0, 0, hidden)) for t in (x, entries))
    visible = (torch.arange(S + hidden) < S).expand(B, -1)
    far = compress(x, entries, visible, kernel.slots, Options(kernel.alpha, merge, Scores(kernel.logit_cap)))
    out = torch.zeros(B, heads, S, v.shape[-1], dtype=q.dtype)
    given, reach = kernel.bias_table(), kernel.reach
    for b in range(B):
        for h in range(heads):
            kv = h // (heads // H)
            for i in range(S):
                start = i // kernel.block * kernel.block
                logits = []
                for j in range(S):
                    near = start - kernel.window <= j < start + kernel.block + kernel.window
                    key = k[b, kv, j] if near else far.slots[b, kv, far.slot[b, kv, j], :D] * scale
                    score = q[b, h, i] @ key * D**-0.5
                    if kernel.logit_cap is not None:
                        score = kernel.logit_cap * torch.tanh(score / kernel.logit_cap)
                    if not near:
                        score = score + far.bias[b, kv, far.slot[b, kv, j]] + far.log_share[b, kv, j]
                    distance = max(-reach, min(reach, j - i)) if near else (reach if j > i else -reach)
                    logits.append(score + (0 if given is None else given[h, distance + reach]))
                out[b, h, i] = torch.stack(logits).softmax(0) @ v[b, kv]
    return out


@pytest.mark.parametrize("engine", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("name", NATIVE)
def test_budgets_per_head_are_heads_on_their_own(name, engine):
    q, k, v = tensors(N)
    sizes, kernel = [8, 30], kernel_of(name, slots=[8, 30])
    out, _ = in_pieces(q, k, v, [60, 1, N - 61], kernel, engine=engine)
    for h, slots in enumerate(sizes):
        heads = [2 * h, 2 * h + 1]
        own = kernel.of_heads(heads).changed(slots=slots)
        alone = attention(q[:, heads], k[:, h : h + 1], v[:, h : h + 1], kernel=own, engine=engine, **CAUSAL)
        torch.testing.assert_close(out[:, heads], alone, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["cap", "table", "table and cap"])
def test_both_sides_are_the_dense_twin(name):
    kernel = kernel_of(name, window=10, slots=8)
    q, k, v = tensors(50, batch=1, dtype=torch.float64)
    expected = both_ways(q, k, v, kernel)
    out = attention(q, k, v, kernel=kernel, enable_gqa=True)
    assert error(out, expected) < 1e-12
    pad = torch.nn.functional.pad
    mask = pad(torch.ones(1, 50, dtype=torch.bool), (9, 4))
    padded = attention(*(pad(x, (0, 0, 9, 4)) for x in (q, k, v)), kernel=kernel, key_mask=mask, enable_gqa=True)
    assert error(padded[:, :, 9:59], both_ways(q, k, v, kernel, hidden=13)) < 1e-12
    if available():
        assert error(attention(*(x.float() for x in (q, k, v)), kernel=kernel, enable_gqa=True), expected) < 2e-6
    wide = kernel_of(name, slots=100)
    assert error(attention(q, k, v, kernel=wide, enable_gqa=True), softmax(q, k, v, wide, causal=False)) < 1e-12


@pytest.mark.parametrize("causal", [True, False])
def test_keys_that_repeat_are_merged_without_loss(causal):
    """A slot of equal keys is exact, whatever their scores are made of."""
    q, k, v = tensors(200, dtype=torch.float64)
    which = torch.randint(12, (200,), generator=torch.Generator().manual_seed(1))
    k, v = k[:, :, which], v[:, :, which]
    kernel = kernel_of("table and cap", sinks=0)
    out = attention(q, k, v, kernel=kernel, is_causal=causal, enable_gqa=True)
    assert error(out, softmax(q, k, v, kernel, causal=causal)) < 1e-9


@pytest.mark.parametrize("name", BIASES)
def test_recalling_everything_is_exact(name):
    q, k, v = tensors(N)
    kernel = kernel_of(name, recall=100)
    for lengths in ([N], [60, 1, 1, N - 62]):
        out, _ = in_pieces(q, k, v, lengths, kernel)
        assert error(out, softmax(q, k, v, kernel)) < 1e-5


@pytest.mark.parametrize(
    ("name", "seen", "bits"),
    [("ALiBi", 2500, 16), ("table beyond the window", 300, 16), ("table beyond the window", 300, 8)],
)
def test_positions_are_not_rounded_where_far_tokens_are(name, seen, bits):
    """ALiBi's have a form in half precision up to 2048, those of tables none."""
    q, k, v = tensors(seen + 40, batch=1)
    q, kernel = q[:, :, -40:], kernel_of(name, window=2, block=64, recall=1000, recall_bits=bits)
    _, state = attention(q[:, :, :1], k[:, :, :seen], v[:, :, :seen], kernel=kernel, return_state=True, **CAUSAL)
    out = attention(q, k[:, :, -40:], v[:, :, -40:], kernel=kernel, state=state, **CAUSAL)
    whole = torch.nn.functional.pad(q, (0, 0, seen, 0))
    assert error(out, softmax(whole, k, v, kernel, first=(0,))[:, :, -40:]) < (0.02 if bits == 8 else 2e-3)


@pytest.mark.parametrize("name", BIASES)
def test_packed_sequences_and_rows_of_a_state_have_positions_of_their_own(name):
    q, k, v = tensors(150, batch=1)
    kernel, bounds = kernel_of(name), [0, 61, 61, 150]
    out, state = attention(q, k, v, kernel=kernel, cu_seqlens=bounds, return_state=True, **CAUSAL)
    alone = [attention(*(x[:, :, a:b] for x in (q, k, v)), kernel=kernel, **CAUSAL) for a, b in ((0, 61), (61, 150))]
    torch.testing.assert_close(out, torch.cat(alone, 2), atol=2e-6, rtol=1e-5)
    more = [torch.cat([x[:, :, :20], x[:, :, 40:40], x[:, :, 90:120]], 2) for x in (q, k, v)]
    went_on = attention(*more, kernel=kernel, cu_seqlens=[0, 20, 20, 50], state=state, **CAUSAL)
    both = [torch.cat([x[:, :, 61:150], x[:, :, 90:120]], 2) for x in (q, k, v)]
    expected = attention(*both, kernel=kernel, **CAUSAL)[:, :, 89:]
    torch.testing.assert_close(went_on[:, :, 20:], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", BIASES)
def test_gradients_agree_with_finite_differences(name):
    """Of keys, values and the table; which pairs merge carries no gradient."""
    q, k, v = tensors(90, heads=2, kv_heads=1, dim=3, batch=1, value_dim=2, dtype=torch.float64)
    given = {x: y.double()[:2] if isinstance(y, torch.Tensor) else y for x, y in BIASES[name].items()}
    learned = given.get("position_bias")
    inputs = [x.requires_grad_() for x in (k, v, *([] if learned is None else [learned]))]
    way = [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).double() for i, x in enumerate(inputs)]
    weight = torch.randn(1, 2, 90, 2, generator=torch.Generator().manual_seed(9)).double()
    for causal in (True, False) if name != "ALiBi" else (True,):

        def f(t, causal=causal):
            moved = [x + t * d for x, d in zip(inputs, way, strict=True)]
            own = given if learned is None else {**given, "position_bias": moved[2]}
            kernel = NearFar(window=8, slots=8, sinks=2, block=8, **own)
            return (attention(q, *moved[:2], kernel=kernel, is_causal=causal, enable_gqa=True) * weight).sum()

        slope = sum((g * d).sum() for g, d in zip(torch.autograd.grad(f(0.0), inputs), way, strict=True))
        torch.testing.assert_close(slope, (f(1e-7) - f(-1e-7)) / 2e-7, rtol=1e-5, atol=1e-6)


def test_far_positions_are_told_apart_in_float32():
    """After 100,000 tokens, as well as the rounding of the largest bias lets them be."""
    q, k, v = tensors(64, dtype=torch.float32, batch=1)
    kernel = kernel_of("ALiBi")
    place = (100_000 + torch.arange(64)).unsqueeze(0)
    (x, y, _), scale = with_positions(kernel, (q, k, v), None, place)
    seen = torch.ones(64, 64, dtype=torch.bool).tril()
    logits = (x @ y.repeat_interleave(2, 1).mT * scale).masked_fill(~seen, -torch.inf)
    expected = softmax(q, k, torch.eye(64).expand(1, 2, 64, 64), kernel, first=(0,))
    assert (logits.softmax(-1) - expected).abs().max() < 3e-3
    half, _ = with_positions(kernel, (q.half(), k.half(), v.half()), None, place)
    assert half[0].dtype == half[1].dtype == torch.float32
    out = attention(q.half(), k.half(), v.half(), kernel=kernel, **CAUSAL)
    assert out.dtype == torch.float16


@needs_native
def test_a_table_that_is_trained_between_two_tokens_is_read_again():
    q, k, v = tensors(110)
    learned = table(20)
    kernel = NearFar(**SMALL, position_bias=lambda: learned)
    results = []
    for engine in ("native", "torch"):
        learned.copy_(table(20))
        _, state = attention(
            *(x[:, :, :90] for x in (q, k, v)), kernel=kernel, return_state=True, engine=engine, **CAUSAL
        )
        out = []
        for i in range(90, 100):
            token = (x[:, :, i : i + 1] for x in (q, k, v))
            row, state = attention(*token, kernel=kernel, state=state, return_state=True, engine=engine, **CAUSAL)
            out.append(row)
            learned.mul_(1.3)
        results.append(torch.cat(out, 2))
    assert error(*results) < 1e-5


@needs_native
def test_slots_that_dropped_tokens_bring_near_are_left_to_the_torch_engine():
    q, k, v = tensors(110)
    kernel = kernel_of("table")
    _, state = attention(*(x[:, :, :99] for x in (q, k, v)), kernel=kernel, return_state=True, **CAUSAL)
    state = state.drop_last(8)  # across the block at 96
    token = [x[:, :, 99:100] for x in (q, k, v)]
    with pytest.raises(ValueError, match="slots are nearer than position_bias reaches"):
        attention(*token, kernel=kernel, state=state, engine="native", **CAUSAL)
    torch.testing.assert_close(
        attention(*token, kernel=kernel, state=state, **CAUSAL),
        attention(*token, kernel=kernel, state=state, engine="torch", **CAUSAL),
    )


def test_the_implied_attention_has_the_biases():
    q, k, v = tensors(60, batch=1)
    for name in BIASES:
        kernel = kernel_of(name, slots=100)
        weights = implied_attention(q, k, kernel, value=v, is_causal=True)
        torch.testing.assert_close(
            weights.double() @ v.repeat_interleave(2, 1).double(), softmax(q, k, v, kernel, first=(0,))
        )


def test_bad_arguments_say_what_is_wrong():
    q, k, v = tensors(40)
    for wrong, message in (
        ({"logit_cap": 0}, "logit_cap must be positive"),
        ({"alibi_slopes": SLOPES, "logit_cap": 1.0}, "neither with position_bias nor with logit_cap"),
        ({"alibi_slopes": [[1.0]]}, "one finite number per query head"),
        ({"position_bias": torch.zeros(4, 6)}, "query heads, 2 n"),
    ):
        with pytest.raises(ValueError, match=message):
            NearFar(**wrong)
    with pytest.raises(ValueError, match="causal attention"):
        attention(q, k, v, kernel=kernel_of("ALiBi"), enable_gqa=True)
    with pytest.raises(ValueError, match="for 4 query heads, but the call has 2"):
        attention(q[:, :2], k, v, kernel=kernel_of("ALiBi"), **CAUSAL)
    with pytest.raises(ValueError, match="queries and keys of the same tokens"):
        attention(q[:, :, :9], k, v, kernel=kernel_of("table"), enable_gqa=True)
    with pytest.raises(ValueError, match="a key for every query"):
        attention(q, k[:, :, :9], v[:, :, :9], kernel=kernel_of("table"), **CAUSAL)
    _, state = attention(q, k, v, kernel=kernel_of("cap"), return_state=True, **CAUSAL)
    with pytest.raises(ValueError, match=r"logit_cap=1\.5"):
        attention(q, k, v, kernel=NearFar(**SMALL), state=state, **CAUSAL)
    if available():
        with pytest.raises(ValueError, match="farther than the window"):
            attention(q, k, v, kernel=kernel_of("table beyond the window"), engine="native", **CAUSAL)
