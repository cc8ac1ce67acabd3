"""linattn.attention without a denominator, and with a decay for each channel: against the O(N^2) definition in float64."""

import itertools

import pytest
import torch
from torch import Tensor

import linattn
from conftest import assert_close
from linattn.engines import native

ENGINES = ["torch", "native"] if native.available() else ["torch"]
HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 5


def draw(L: int, S: int, decay: str | None, masked: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(L * 100 + S)
    q = torch.randn(2, HEADS, L, DIM, generator=generator)
    k = torch.randn(2, KV_HEADS, S, DIM, generator=generator)
    v = torch.randn(2, KV_HEADS, S, VALUE_DIM, generator=generator)
    shape = (2, KV_HEADS, S) if decay == "head" else (2, KV_HEADS, S, DIM)
    log_decay = None if decay is None else -torch.rand(shape, generator=generator)
    mask = torch.rand(2, S, generator=generator) > 0.3 if masked else None
    return q, k, v, log_decay, mask


def definition(q, k, v, log_decay, mask, *, is_causal: bool, normalize: bool = False) -> Tensor:
    """Every query with every key, each pair decayed by what lies between them; a masked token does not decay."""
    groups, L, S = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    q, k, v = q.double(), *(x.double().repeat_interleave(groups, 1) for x in (k, v))
    visible = torch.ones(L, S, dtype=torch.bool)
    visible = (visible.tril(S - L) if is_causal else visible).expand(q.shape[0], 1, L, S)
    if mask is not None:
        visible = visible & mask[:, None, None]
    pairs = torch.zeros(*q.shape[:2], L, S, q.shape[-1], dtype=torch.float64)
    if log_decay is not None:
        g = log_decay.double() if log_decay.dim() == 4 else log_decay.double().unsqueeze(-1)
        g = g if mask is None else g * mask[:, None, :, None]
        total = g.expand(*g.shape[:3], q.shape[-1]).cumsum(2).repeat_interleave(groups, 1)
        at_query = torch.nn.functional.pad(total, (0, 0, max(0, L - S), 0))[:, :, total.shape[2] + max(0, L - S) - L :]
        pairs = (at_query.unsqueeze(3) - total.unsqueeze(2)).clamp_max(0)
    weights = torch.einsum("bhld,bhsd,bhlsd->bhls", q, k, pairs.exp()).masked_fill(~visible, 0)
    out = weights @ v
    return out / weights.sum(-1, keepdim=True) if normalize else out


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("decay", [None, "head", "channel"])
def test_lengths_masks_and_decays_together(engine, decay, masked):
    for L, S in itertools.product((1, 7, 70), repeat=2):
        q, k, v, log_decay, mask = draw(L, S, decay, masked)
        for is_causal in (True, False) if decay is None else (True,):
            options = {"is_causal": is_causal, "key_mask": mask, "enable_gqa": True, "engine": engine}
            got = linattn.attention(q, k, v, kernel="identity", normalize=False, log_decay=log_decay, **options)
            assert_close(got, definition(q, k, v, log_decay, mask, is_causal=is_causal), factor=3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_decay_for_each_channel_with_a_denominator_and_any_split(engine):
    q, k, v, log_decay, mask = draw(30, 30, "channel", True)
    mask[:, 0] = True  # every row sees a key
    features = [torch.nn.functional.elu(x) + 1 for x in (q, k)]
    want = definition(*features, v, log_decay, mask, is_causal=True, normalize=True)
    options = {"kernel": "elu", "is_causal": True, "enable_gqa": True, "engine": engine, "return_state": True}
    rows, state = [], None
    for part in (slice(0, 13), slice(13, 14), slice(14, 30)):
        cut = (x[:, :, part] for x in (q, k, v))
        gates = {"log_decay": log_decay[:, :, part], "key_mask": mask[:, part]}
        row, state = linattn.attention(*cut, state=state, **gates, **options)
        rows.append(row)
    assert_close(torch.cat(rows, 2), want, factor=3)
    with pytest.raises(ValueError, match="cannot go on with"):
        linattn.attention(q, k, v, kernel="identity", normalize=False, is_causal=True, enable_gqa=True, state=state)


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_of_other_query_lengths_equal_themselves_alone(is_causal):
    q, k, v, _, _ = draw(30, 30, None, False)
    options = {"kernel": "identity", "normalize": False, "is_causal": is_causal, "enable_gqa": True}
    packed = linattn.attention(q, k, v, cu_seqlens=([0, 4, 30], [0, 10, 30]), **options)
    alone = [
        linattn.attention(q[:, :, a], k[:, :, b], v[:, :, b], **options)
        for a, b in ((slice(0, 4), slice(0, 10)), (slice(4, 30), slice(10, 30)))
    ]
    assert_close(packed, torch.cat(alone, 2), factor=3)


def test_features_with_log_weights_take_a_decay_for_each_head_only():
    q, k, v, log_decay, _ = draw(9, 9, "channel", False)
    with pytest.raises(ValueError, match="come with log-weights: pass log_decay for each head"):
        linattn.attention(q, k, v, kernel="positive", is_causal=True, log_decay=log_decay, enable_gqa=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["identity", "taylor", "learned"])
def test_autocast_narrows_neither_features_nor_sums(name, causal):
    kernel = linattn.kernels.Learned(4, 8) if name == "learned" else name
    tokens = [torch.randn(1, 2, 30, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    options = {"kernel": kernel, "normalize": False, "is_causal": causal, "return_state": True}
    expected, after = linattn.attention(*tokens, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = linattn.attention(*tokens, **options)
        _, unread = linattn.attention(tokens[0][:, :, :0], *tokens[1:], **options)
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(state.S, after.S, rtol=1e-5, atol=1e-5)
    assert torch.allclose(unread.S, after.S, rtol=1e-5, atol=1e-5)


def test_a_stream_of_tokens_without_heads_and_a_decay_for_each_channel():
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(5, 4, generator=generator) for _ in range(3)]
    log_decay = -torch.rand(5, 4, generator=generator)
    options = {"kernel": "identity", "normalize": False, "is_causal": True}
    parts, state = [], None
    for i in range(5):
        token = [x[i : i + 1] for x in tokens]
        part, state = linattn.attention(
            *token, log_decay=log_decay[i : i + 1], state=state, return_state=True, **options
        )
        parts.append(part)
    assert_close(torch.cat(parts), linattn.attention(*tokens, log_decay=log_decay, **options))


def test_one_token_refuses_an_unknown_engine():
    token = [torch.ones(1, 1, 1, 4)] * 3
    options = {"kernel": "identity", "normalize": False, "is_causal": True, "return_state": True}
    _, state = linattn.attention(*token, **options)
    with pytest.raises(ValueError, match="unknown engine 'nativ'"):
        linattn.attention(*token, state=state, engine="nativ", **options)


@pytest.mark.parametrize("decay", [None, "head", "channel"])
def test_keys_that_a_batch_shares_make_a_state_without_queries(decay):
    q, k, v, log_decay, _ = draw(3, 3, decay, masked=False)
    options = {"kernel": "identity", "normalize": False, "is_causal": True, "return_state": True, "enable_gqa": True}
    out, unread = linattn.attention(q[:, :, :0], k[:1], v[:1], log_decay=log_decay, **options)
    _, state = linattn.attention(q, k[:1], v[:1], log_decay=log_decay, **options)
    assert out.shape == (2, HEADS, 0, VALUE_DIM)
    assert_close(unread.S, state.S)
    assert unread.tokens.tolist() == state.tokens.tolist()
