"""The delta rule on its own: other implementations, state tracking, transitions, hard inputs."""

from dataclasses import replace

import pytest
import torch

from linattn.ops.delta_rule import chunk
from linattn.ops.delta_rule.call import DeltaRuleCall
from linattn.ops.delta_rule.reference import normalized
from linattn.ops.delta_rule.transition import combine, transition
from rules_support import DECAYS, assert_chunked_equals_definition, assert_same, make, results


def theirs(function, inputs):
    """transformers' functions have tokens before heads, scale by 1/sqrt(dim) and want equal head counts."""
    tokens = [x.transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value)]
    g = inputs.log_decay.transpose(1, 2)
    options = {"initial_state": inputs.state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, final = function(*tokens, g=g, beta=inputs.beta.transpose(1, 2), **options)
    return {"out": out.transpose(1, 2), "final": final}


@pytest.mark.parametrize("T", [1, 50, 130])
def test_qwen3_next(T):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = replace(make("delta", T, "head", dtype=torch.float32), scale=8**-0.5)
    out, final = inputs.run("chunk")
    assert_same({"out": out, "final": final}, theirs(modeling.torch_chunk_gated_delta_rule, inputs), 1e-5)


def test_kimi_linear():
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    inputs = replace(make("delta", 100, "channel", dtype=torch.float32), scale=8**-0.5)
    out, final = inputs.run("chunk")
    assert_same({"out": out, "final": final}, theirs(modeling.recurrent_kimi_delta_attention, inputs), 1e-5)
    assert_same({"out": out, "final": final}, theirs(modeling.chunk_kimi_delta_attention, inputs), 1e-5)


def test_beta_of_two_tracks_parity():
    """Reflections: with beta = 2 and value 0 a token turns S into -S, which no state with positive eigenvalues can do."""
    bits = (torch.rand(1, 1, 300, generator=torch.Generator().manual_seed(0)) < 0.5).double()
    one = torch.ones(1, 1, 300, 1, dtype=torch.float64)
    start = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    out, _ = chunk.delta_rule(DeltaRuleCall(one, one, 0 * one, 2 * bits, state=start))
    assert torch.equal(out.flatten(), 1 - 2 * (bits.flatten().cumsum(0) % 2))


def test_beta_of_two_composes_permutations():
    """Products of reflections: swapping two of three places is 1 - 2 k k^T with k = (e_i - e_j) / sqrt(2)."""
    generator = torch.Generator().manual_seed(1)
    pairs = torch.tensor([[0, 1], [0, 2], [1, 2]])[torch.randint(3, (200,), generator=generator)]
    key = torch.zeros(200, 3, dtype=torch.float64)
    key.scatter_(1, pairs, torch.tensor([1.0, -1.0], dtype=torch.float64).expand(200, 2) / 2**0.5)
    state = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64).reshape(1, 1, 3, 1)
    beta = torch.full((1, 1, 200), 2.0, dtype=torch.float64)
    value = torch.zeros(1, 1, 200, 1, dtype=torch.float64)
    key = key.reshape(1, 1, 200, 3)
    _, final = chunk.delta_rule(DeltaRuleCall(key, key, value, beta, state=state))
    places = [10.0, 20.0, 30.0]
    for i, j in pairs.tolist():
        places[i], places[j] = places[j], places[i]
    assert final.flatten().tolist() == pytest.approx(places, abs=1e-10)


@pytest.mark.parametrize("norm", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("decay", DECAYS)
def test_key_norms(norm, decay):
    """Keys as they are, with beta |k|^2 <= 2."""
    inputs = replace(make("delta", 130, decay), normalize_qk=False)
    inputs = replace(inputs, key=norm * normalized(inputs.key), beta=inputs.beta / norm**2)
    assert_chunked_equals_definition(inputs)


def test_equal_keys_and_beta_one_store_the_last_value():
    """The triangular system of a chunk is as far from the identity as it can be."""
    inputs = replace(make("delta", 200, "none", dtype=torch.float32), normalize_qk=False, scale=1.0)
    key = torch.zeros_like(inputs.key)
    key[..., 0] = 1
    case = replace(inputs, key=key, query=key, beta=torch.ones_like(inputs.beta))
    assert_same({"out": case.run("chunk")[0]}, {"out": inputs.value}, 1e-5)


@pytest.mark.parametrize("decay", DECAYS)
def test_transitions_compose(decay):
    """Two segments, each on its own, combined: outputs of the whole, and gradients through it."""
    inputs = make("delta", 150, decay, heads=(2, 1, 2), mask=True).map(lambda x: x.requires_grad_())
    expected = results(inputs, "reference")["final"]
    maps = []
    for start, end in ((0, 70), (70, 150)):
        cut = inputs.tokens(start, end)
        maps.append(
            transition(DeltaRuleCall(cut.key, cut.key, cut.value, cut.beta, cut.log_decay, cut.mask, normalize_qk=True))
        )
    local, moved = combine(*maps)
    final = moved @ inputs.state + local
    assert_same({"final": final}, {"final": expected})
    leaves = [inputs.key, inputs.value, inputs.beta, inputs.state]
    wanted = torch.autograd.grad(inputs.run("reference")[1].cos().sum(), leaves)
    for got, want in zip(torch.autograd.grad(final.cos().sum(), leaves), wanted, strict=True):
        assert_same({"grad": got}, {"grad": want})
