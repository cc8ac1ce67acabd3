"""Bad input gets a clear error at once. The table is what a user reads."""

import pytest
import torch

import linattn
from conftest import DIM, qkv
from linattn import kernels


def call(query=None, key=None, value=None, **options):
    q, k, v = qkv(6, dtype=torch.float32)
    options.setdefault("kernel", "elu")
    return linattn.attention(
        q if query is None else query, k if key is None else key, v if value is None else value, **options
    )


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


def nan_at(index):
    tensors = list(qkv(6, dtype=torch.float32))
    tensors[index][0, 0, 2, 1] = torch.nan
    return tensors


def a_state(**options):
    options.setdefault("kernel", "elu")
    return call(return_state=True, is_causal=True, **options)[1]


NAMES = "softmax, nearfar, positive, trig, polynomial, taylor, elu, relu, identity"
ATTN_MASK = (
    "attn_mask may only hide keys from every query and head, as a bool tensor of (2, 1, 1, 6); got {}. Any other mask has no "
    "linear form: every query would need sums of its own. Use is_causal=True, key_mask= for padding or cu_seqlens= for "
    "packed sequences, or torch's own scaled_dot_product_attention."
)

TABLE = {
    "not a tensor": (
        lambda: call(query=[[1.0]]),
        TypeError, "query must be a tensor, got list.",
    ),
    "whole numbers": (
        lambda: call(key=torch.ones(2, 2, 6, DIM, dtype=torch.int64)),
        TypeError, "key must be floating point, got torch.int64.",
    ),
    "one dimension": (
        lambda: call(query=ones(DIM)),
        ValueError, "query must be (..., heads, tokens, dim) or (tokens, dim), got shape (8,).",
    ),
    "numbers of dimensions": (
        lambda: call(query=ones(2, 6, DIM)),
        ValueError,
        "query, key and value must have the same number of dimensions, "
        "got query (2, 6, 8), key (2, 2, 6, 8), value (2, 2, 6, 5).",
    ),
    "dims differ": (
        lambda: call(query=ones(2, 2, 6, 4)),
        ValueError,
        "query and key must have the same dim, got 4 and 8 in query (2, 2, 6, 4), key (2, 2, 6, 8), value (2, 2, 6, 5).",
    ),
    "keys without values": (
        lambda: call(value=ones(2, 2, 5, 5)),
        ValueError,
        "every key needs a value, got 6 keys and 5 values in query (2, 2, 6, 8), key (2, 2, 6, 8), value (2, 2, 5, 5).",
    ),
    "heads without enable_gqa": (
        lambda: call(query=ones(2, 4, 6, DIM)),
        ValueError,
        "query has 4 heads and key 2: pass enable_gqa=True to let groups of query heads share keys and values.",
    ),
    "heads that do not divide": (
        lambda: call(query=ones(2, 3, 6, DIM), enable_gqa=True),
        ValueError,
        "query heads must be a multiple of key heads, got 3 and 2: 3 query heads can share any number of key heads that "
        "divides 3.",
    ),
    "key and value heads": (
        lambda: call(value=ones(2, 1, 6, 5)),
        ValueError,
        "key and value must have the same heads, got 2 and 1 in query (2, 2, 6, 8), key (2, 2, 6, 8), value (2, 1, 6, 5).",
    ),
    "batches": (
        lambda: call(query=ones(3, 2, 6, DIM)),
        ValueError,
        "the batch dimensions of query, key and value do not fit together: "
        "query (3, 2, 6, 8), key (2, 2, 6, 8), value (2, 2, 6, 5).",
    ),
    "dtypes": (
        lambda: call(key=ones(2, 2, 6, DIM, dtype=torch.float16)),
        TypeError,
        "query, key and value must have one dtype, got torch.float32, torch.float16 and torch.float32: "
        "cast them first, e.g. key.to(query.dtype).",
    ),
    "devices": (
        lambda: call(key=torch.ones(2, 2, 6, DIM, device="meta")),
        ValueError, "query, key and value must be on one device, got cpu, meta and cpu.",
    ),
    "NaN in a key": (
        lambda: call(*nan_at(1)),
        ValueError, "key must be finite, but hold NaN or infinity: attention would spread them.",
    ),
    "NaN in a value": (
        lambda: call(*nan_at(2), is_causal=True),
        ValueError, "value must be finite, but hold NaN or infinity: attention would spread them.",
    ),
    "NaN in a query": (
        lambda: call(*nan_at(0), kernel="positive"),
        ValueError, "query must be finite, but hold NaN or infinity: attention would spread them.",
    ),
    "overflow": (
        lambda: call(key=torch.full((2, 2, 6, DIM), 1e30), kernel=kernels.Polynomial(2)),
        ValueError,
        "the sums left the range of torch.float32: the features of this kernel grow too large for these inputs. "
        "Scale them down, or pass float64.",
    ),
    "rows that overflow": (
        lambda: call(value=torch.full((2, 2, 6, 5), 3e38)),
        ValueError,
        "the sums left the range of torch.float32: the features of this kernel grow too large for these inputs. "
        "Scale them down, or pass float64.",
    ),
    "a mask elsewhere": (
        lambda: call(key_mask=torch.ones(2, 6, dtype=torch.bool, device="meta")),
        ValueError, "key_mask is on meta, query is on cpu: move it with key_mask.to(query.device).",
    ),
    "an attn_mask elsewhere": (
        lambda: call(attn_mask=torch.ones(2, 1, 1, 6, dtype=torch.bool, device="meta")),
        ValueError, "attn_mask is on meta, query is on cpu: move it with attn_mask.to(query.device).",
    ),
    "decay elsewhere": (
        lambda: call(log_decay=torch.zeros(2, 2, 6, device="meta"), is_causal=True),
        ValueError, "log_decay is on meta, query is on cpu: move it with log_decay.to(query.device).",
    ),
    "a window that is not whole": (
        lambda: linattn.NearFar(window=1.5),
        TypeError, "NearFar: window must be a whole number, got 1.5.",
    ),
    "slots that are not whole": (
        lambda: linattn.NearFar(slots=[4, 2.5]),
        TypeError, "NearFar: slots must be a whole number, got 2.5.",
    ),
    "alpha is NaN": (
        lambda: linattn.NearFar(alpha=float("nan")),
        ValueError, "NearFar: alpha must be a finite number that is not negative, got nan.",
    ),
    "a cap of infinity": (
        lambda: linattn.NearFar(logit_cap=float("inf")),
        ValueError, "NearFar: logit_cap must be positive and finite, got inf.",
    ),
    "unknown kernel": (
        lambda: call(kernel="cosine"),
        ValueError,
        "unknown kernel 'cosine'; names: softmax, nearfar, positive, trig, polynomial, taylor, elu, relu, identity.",
    ),
    "not a kernel": (
        lambda: call(kernel=3),
        TypeError,
        "kernel must be a Kernel or a name, got int; "
        "names: softmax, nearfar, positive, trig, polynomial, taylor, elu, relu, identity.",
    ),
    "kernel of another dim": (
        lambda: call(kernel=kernels.Positive(64)),
        ValueError, "Positive was made for dim=64, but the tokens have dim 8: make one with Positive(dim=8).",
    ),
    "negative features": (
        lambda: call(kernel=kernels.Custom(torch.sin)),
        ValueError,
        "Custom: phi_k gave negative features, with which a denominator can vanish. "
        "Make it positive, or pass Custom(..., positive=False) if that is meant.",
    ),
    "features of another shape": (
        lambda: call(kernel=kernels.Custom(lambda x: x.square().sum(-1))),
        ValueError,
        "Custom: phi_k must map (..., tokens, dim) to (..., tokens, features); it made (2, 2, 6) of (2, 2, 6, 8).",
    ),
    "a name that was nearly right": (
        lambda: call(kernel="postive"),
        ValueError, f"unknown kernel 'postive'; names: {NAMES}. Did you mean 'positive'?",
    ),
    "a name of other libraries": (
        lambda: call(kernel="sdpa"),
        ValueError, f"unknown kernel 'sdpa'; names: {NAMES}. Did you mean 'softmax'?",
    ),
    "no kernel": (
        lambda: linattn.attention(*qkv(6, dtype=torch.float32)),
        TypeError, "attention() missing 1 required keyword-only argument: 'kernel'",
    ),
    "an attn_mask": (
        lambda: call(attn_mask=torch.ones(6, 6, dtype=torch.bool)),
        ValueError, ATTN_MASK.format("torch.bool of (6, 6)"),
    ),
    "an attn_mask of numbers": (
        lambda: call(attn_mask=torch.zeros(2, 1, 1, 6)),
        ValueError, ATTN_MASK.format("torch.float32 of (2, 1, 1, 6)"),
    ),
    "an attn_mask for each head": (
        lambda: call(attn_mask=torch.ones(2, 2, 1, 6, dtype=torch.bool)),
        ValueError, ATTN_MASK.format("torch.bool of (2, 2, 1, 6)"),
    ),
    "dropout": (
        lambda: call(dropout_p=0.1),
        ValueError,
        "dropout_p=0.1 would drop single attention weights, which a linear kernel never forms: pass 0.0, and put dropout "
        "on the output instead.",
    ),
    "a numerator of softmax": (
        lambda: call(kernel="softmax", normalize=False),
        ValueError,
        "normalize=False leaves out a denominator; exact softmax is not made of sums. Choose a linear kernel.",
    ),
    "a sparse tensor": (
        lambda: call(key=ones(2, 2, 6, DIM).to_sparse()),
        TypeError, "key must be an ordinary dense tensor, got layout torch.sparse_coo: convert with to_dense().",
    ),
    "a mask of numbers": (
        lambda: call(key_mask=torch.ones(2, 6)),
        TypeError,
        "key_mask must be a bool tensor, True = attend, got torch.float32: convert with key_mask.bool().",
    ),
    "a mask of another length": (
        lambda: call(key_mask=torch.ones(2, 7, dtype=torch.bool)),
        ValueError,
        "key_mask must be (batch, key tokens) = (2, 6), got (2, 7): it says which keys may be seen, by every head and "
        "every query.",
    ),
    "scale": (
        lambda: call(scale=-1.0),
        ValueError, "scale must be a positive number or None, got -1.0.",
    ),
    "scale of a step": (
        lambda: linattn.attention(*qkv(1, dtype=torch.float32), kernel="elu", is_causal=True, scale=-1.0,
                                  state=a_state(), return_state=True),
        ValueError, "scale must be a positive number or None, got -1.0.",
    ),
    "scale that is a tensor": (
        lambda: call(scale=torch.tensor(1.0)),
        TypeError, "scale must be a positive number or None, got Tensor.",
    ),
    "unknown engine": (
        lambda: call(engine="cuda"),
        ValueError, "unknown engine 'cuda'; engines: auto, torch, native.",
    ),
    "not a state": (
        lambda: call(state={}),
        TypeError, "state must be a linattn.State from return_state=True, got dict.",
    ),
    "state of another kernel": (
        lambda: call(state=a_state(kernel="relu"), is_causal=True),
        ValueError, "this state was made by Relu(); it cannot go on with Elu().",
    ),
    "state of another scale": (
        lambda: call(state=a_state(), is_causal=True, scale=0.5),
        ValueError, "this state was made by Elu(); it cannot go on with Elu() scale=0.5.",
    ),
    "state of another shape": (
        lambda: call(*(x[:1] for x in qkv(6, dtype=torch.float32)), state=a_state(), is_causal=True),
        ValueError,
        "this state has S of shape (2, 2, 8, 5); the call needs (1, 2, 8, 5) (batch, kv heads, features, value dim).",
    ),
    "state of exact softmax": (
        lambda: call(state=a_state(kernel="softmax"), is_causal=True),
        ValueError, "this state was made by Softmax(); it cannot go on with Elu().",
    ),
    "cache of another shape": (
        lambda: call(*(x[:1] for x in qkv(6, dtype=torch.float32)), state=a_state(kernel="softmax"), kernel="softmax"),
        ValueError,
        "this state has values of shape (2, 2, 6, 5); the call has batch (1,), 2 kv heads and value dim 5.",
    ),
    "decay without a causal mask": (
        lambda: call(log_decay=-ones(2, 2, 6)),
        ValueError, "log_decay forgets with time, so it needs is_causal=True.",
    ),
    "decay out of range": (
        lambda: call(log_decay=ones(2, 2, 6), is_causal=True),
        ValueError,
        "log_decay must be finite and not above 0: it is the logarithm of what multiplies the sums, 0 forgets nothing. "
        "To start anew inside a sequence, pass cu_seqlens.",
    ),
    "gate out of range": (
        lambda: call(gate=ones(2, 2, 6) * 1.5, is_causal=True),
        ValueError, "gate must lie in (0, 1]: 1 keeps everything and lets nothing in.",
    ),
    "decay of another shape": (
        lambda: call(gate=ones(2, 3, 6), is_causal=True),
        ValueError, "gate must be (batch, kv heads, key tokens) = (2, 2, 6), got (2, 3, 6).",
    ),
    "decay and gate": (
        lambda: call(gate=ones(2, 2, 6), log_decay=-ones(2, 2, 6), is_causal=True),
        ValueError, "log_decay and gate are two forms of the same thing: pass one.",
    ),
    "decay of exact softmax": (
        lambda: call(log_decay=-ones(2, 2, 6), is_causal=True, kernel="softmax"),
        ValueError, "log_decay and gate act on sums; exact softmax has none. Choose a linear kernel.",
    ),
    "cu_seqlens that end early": (
        lambda: call(cu_seqlens=torch.tensor([0, 3, 5])),
        ValueError, "cu_seqlens must rise from 0 to the number of query tokens, 6; got [0, 3, 5].",
    ),
    "cu_seqlens of numbers": (
        lambda: call(cu_seqlens=torch.tensor([0.0, 6.0])),
        ValueError, "cu_seqlens must be a 1-D tensor of whole numbers, got torch.float32 of (2,).",
    ),
    "cu_seqlens that differ": (
        lambda: call(cu_seqlens=(torch.tensor([0, 6]), torch.tensor([0, 3, 6]))),
        ValueError,
        "cu_seqlens give 1 query sequences and 2 key sequences: they must be the same sequences.",
    ),
    "select beyond the batch": (
        lambda: a_state().select([0, 5]),
        ValueError, "select: index 5 is outside a batch of 2.",
    ),
    "polynomial too wide": (
        lambda: call(*(ones(1, 1, 2, 128) for _ in range(3)), kernel=kernels.Polynomial(3)),
        ValueError,
        "Polynomial: degree 3 has 366145 exact features at dim 128, more than 65536: "
        "pass sketch=4096, dim=128 for random ones.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_the_message_a_user_gets(case):
    action, kind, message = TABLE[case]
    with pytest.raises(kind) as caught:
        action()
    assert str(caught.value) == message


def test_a_mask_of_all_false_is_no_error():
    """A sequence of nothing but padding is ordinary in a batch: it gets zeros."""
    assert call(key_mask=torch.zeros(2, 6, dtype=torch.bool)).abs().sum() == 0
