"""What tests of near/far attention share."""

import torch

from linattn import State, attention

SMALL = {"window": 24, "slots": 20, "sinks": 3, "block": 16}


CAUSAL = {"is_causal": True, "enable_gqa": True}


def tensors(N=200, heads=4, kv_heads=2, dim=8, batch=2, value_dim=6, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, N, dim, generator=g, dtype=dtype)
    k = torch.randn(batch, kv_heads, N, dim, generator=g, dtype=dtype)
    return q, k, torch.randn(batch, kv_heads, N, value_dim, generator=g, dtype=dtype)


def exact(q, k, v, mask=None, **options):
    return attention(q, k, v, kernel="softmax", key_mask=mask, enable_gqa=True, **options)


def in_pieces(q, k, v, lengths, kernel, mask=None, *, state=None, engine="auto"):
    outs, i = [], 0
    for n in lengths:
        cut = slice(i, i + n)
        out, state = attention(
            q[:, :, cut],
            k[:, :, cut],
            v[:, :, cut],
            kernel=kernel,
            key_mask=None if mask is None else mask[:, cut],
            state=state,
            return_state=True,
            engine=engine,
            **CAUSAL,
        )
        outs.append(out)
        i += n
    return torch.cat(outs, 2), state


def error(out, reference):
    return float((out - reference).norm() / reference.norm())


def state_saved_forked_and_selected(kernel, tmp_path, engine="auto"):
    """The state of 150 tokens, after it went all these ways, and the tokens that come next."""
    q, k, v = tensors(200)
    first, rest = ([x[:, :, :150] for x in (q, k, v)], [x[:, :, 150:] for x in (q, k, v)])
    _, state = attention(*first, kernel=kernel, return_state=True, engine=engine, **CAUSAL)
    expected = attention(*rest, kernel=kernel, state=state, engine=engine, **CAUSAL)
    state.save(tmp_path / "state.safetensors")
    loaded = State.load(tmp_path / "state.safetensors")
    assert torch.equal(attention(*rest, kernel=kernel, state=loaded, engine=engine, **CAUSAL), expected)
    fork = state.clone()
    attention(*rest, kernel=kernel, state=fork, engine=engine, **CAUSAL)
    assert all(torch.equal(a, b) for a, b in zip(fork.tensors().values(), state.tensors().values(), strict=True))
    chosen = state.select(torch.tensor([1, 1, 0]))
    out = attention(*(x[[1, 1, 0]] for x in rest), kernel=kernel, state=chosen, engine=engine, **CAUSAL)
    torch.testing.assert_close(out, expected[[1, 1, 0]], atol=1e-6, rtol=0)
    return state, rest
