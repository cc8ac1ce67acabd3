"""Calls that torch records or imitates: make_fx, torch.jit.trace and fake tensors see every operator, whatever the engine."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import linattn
from conftest import assert_close

TOKENS = [torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
OTHERS = [torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(i)) for i in range(3, 6)]
A, WEIGHT = -torch.ones(4, 3), torch.ones(4, 3)


def attend(*tokens, **options):
    return linattn.attention(*tokens, is_causal=True, **options)


def delta(*tokens, **options):
    return linattn.delta_rule(*tokens, beta=tokens[0][..., 0].sigmoid(), normalize_qk=True, **options)


def scan(query, key, value):
    u, step, B, C = query[:, 0].mT, key[:, 0].mT, value[:, 0].mT[:, :3], value[:, 1].mT[:, :3]
    return linattn.selective_scan(u, step, A, B, C, delta_softplus=True)


CALLS = {
    "elu": lambda *x: attend(*x, kernel="elu"),
    "full": lambda *x: linattn.attention(*x, kernel="positive"),
    "masked": lambda *x: attend(*x, kernel="elu", key_mask=torch.ones(1, 9, dtype=torch.bool)),
    "decay": lambda *x: attend(*x, kernel="elu", log_decay=-x[0][..., 0].abs()),
    "sums": lambda *x: attend(*x, kernel="identity", normalize=False),
    "softmax": lambda *x: attend(*x, kernel="softmax"),
    "nearfar": lambda *x: attend(*x, kernel="nearfar"),
    "delta": delta,
    "scan": scan,
    "conv": lambda *x: linattn.causal_conv1d(x[0][:, 0].mT, WEIGHT),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_of_make_fx_computes_with_its_inputs(name):
    call = CALLS[name]
    graph = make_fx(call)(*TOKENS)
    assert_close(graph(*OTHERS), call(*OTHERS))


def test_make_fx_with_symbolic_sizes():
    call = CALLS["softmax"]
    graph = make_fx(call, tracing_mode="symbolic")(*TOKENS)
    assert_close(graph(*OTHERS), call(*OTHERS))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_trace_computes_with_its_inputs(name):
    call = CALLS[name]
    traced = torch.jit.trace(call, tuple(TOKENS), check_trace=False)
    assert_close(traced(*OTHERS), call(*OTHERS))


@pytest.mark.parametrize("name", CALLS)
def test_tensors_with_memory_among_fake_ones(name):
    """Outputs have no memory then: the native engine must not write there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = CALLS[name](*TOKENS)
    assert isinstance(out, FakeTensor)


def decay(*tokens, **options):
    return attend(*tokens, kernel="identity", normalize=False, **options)


@pytest.mark.parametrize("rule", [lambda *x, **o: attend(*x, kernel="elu", **o), decay, delta])
def test_one_token_like_an_earlier_one_among_fake_tensors(rule):
    _, state = rule(*TOKENS, return_state=True)
    token = [x[:, :, :1].contiguous() for x in TOKENS]
    for _ in range(2):
        rule(*token, state=state, return_state=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        out, _ = rule(*token, state=state, return_state=True)
    assert isinstance(out, FakeTensor)


@pytest.mark.parametrize("rule", [lambda *x, **o: attend(*x, kernel="elu", **o), decay, delta])
def test_a_state_is_where_its_tokens_are_whatever_the_default_device(rule):
    with torch.device("meta"):
        _, state = rule(*TOKENS, return_state=True)
    assert {x.device.type for x in state.tensors().values()} == {"cpu"}
