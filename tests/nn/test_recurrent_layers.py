"""Layers of the update rules: weights of transformers load by name and give the same outputs; one call equals many."""

import math

import pytest
import torch
from torch.nn import functional as F

from linattn import nn
from rules_support import assert_same

WIDTH = 24
LAYERS = {
    "gated_delta_net": lambda: nn.GatedDeltaNet(
        WIDTH, num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=6
    ),
    "kimi": lambda: nn.KimiDeltaAttention(WIDTH, num_heads=2, head_dim=8),
    "mamba2": lambda: nn.Mamba2(WIDTH, num_heads=4, head_dim=8, state_size=8, n_groups=2),
    "lightning": lambda: nn.LightningAttention(WIDTH, num_heads=4, head_dim=8, layer=1, layers=4),
    "retention": lambda: nn.Retention(WIDTH, num_heads=2),
    "gla": lambda: nn.GatedLinearAttention(WIDTH, num_heads=2),
}


@pytest.fixture(params=list(LAYERS))
def layer(request: pytest.FixtureRequest) -> torch.nn.Module:
    torch.manual_seed(0)
    return LAYERS[request.param]().double()


def hidden(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-8) -> None:
    assert_same({"": actual}, {"": expected}, tolerance)


def test_one_call_is_many(layer):
    """Prompt, a few tokens at once, single tokens."""
    x = hidden(2, 90)
    whole, last = layer(x, return_state=True)
    assert whole.shape == x.shape
    rows, state = [], None
    for start, end in ((0, 80), (80, 88), (88, 89), (89, 90)):
        part, state = layer(x[:, start:end], state=state, return_state=True)
        rows.append(part)
    close(torch.cat(rows, 1), whole)
    close(state.rule.S, last.rule.S)
    picked = state.select([1])
    assert picked.nbytes * 2 == state.clone().nbytes
    close(layer(x[1:], state=picked), layer(x, state=state.detach())[1:])


def test_padding_changes_nothing(layer):
    """On the left, on the right and in between."""
    x = hidden(2, 30)
    seen = torch.ones(2, 30, dtype=torch.bool)
    seen[0, :7] = False
    seen[1, [3, 4, 28, 29]] = False
    out, state = layer(x, key_mask=seen, return_state=True)
    for i in range(2):
        alone, last = layer(x[i : i + 1, seen[i]], return_state=True)
        close(out[i : i + 1, seen[i]], alone)
        close(state.rule.S[i], last.rule.S[0])


def test_a_state_of_another_batch_is_refused(layer):
    _, state = layer(hidden(3, 5), return_state=True)
    with pytest.raises(ValueError, match=r"this state has|of this call"):
        layer(hidden(2, 5), state=state)


def test_every_parameter_is_trained(layer):
    x = hidden(1, 20)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("dtype", [torch.float16])
def test_half_precision_keeps_its_dtype(layer, dtype):
    out, state = layer.to(dtype)(hidden(1, 10, dtype=dtype), return_state=True)
    assert out.dtype == dtype
    assert state.rule.S.dtype == torch.float32


def test_gated_delta_net_is_qwen3_nexts():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = modeling.Qwen3NextConfig(
        hidden_size=WIDTH,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    same_outputs(modeling.Qwen3NextGatedDeltaNet(config, 0), LAYERS["gated_delta_net"]())


def test_kimi_delta_attention_is_kimi_linears():
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = modeling.KimiLinearConfig(
        hidden_size=WIDTH, num_hidden_layers=1, linear_num_heads=2, linear_head_dim=8, layer_types=["linear_attention"]
    )
    theirs = modeling.KimiLinearDeltaAttention(config, 0)
    ours = LAYERS["kimi"]()
    theirs.forget_gate.load_state_dict(ours.forget_gate.state_dict())  # left uninitialised there
    same_outputs(theirs, ours, eps=config.rms_norm_eps)


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_is_mamba2s(groups):
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    sizes = {"num_heads": 6, "head_dim": 8, "state_size": 8, "n_groups": groups}
    config = modeling.Mamba2Config(hidden_size=WIDTH, expand=2, num_hidden_layers=1, **sizes)
    theirs, ours = modeling.Mamba2Mixer(config, 0), nn.Mamba2(WIDTH, **sizes)
    if not hasattr(theirs.norm, "group_size"):  # before 5.23 it did not norm each group by itself, as Mamba-2 does
        ours.norm.groups = 1
    same_outputs(theirs, ours)


def test_lightning_attention_is_minimaxs():
    modeling = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = modeling.MiniMaxConfig(
        hidden_size=WIDTH, num_attention_heads=4, head_dim=8, num_hidden_layers=4, block_size=16
    )
    ours = LAYERS["lightning"]()
    theirs = modeling.MiniMaxLightningAttention(config, 1)
    same_outputs(theirs, ours, call=lambda layer, x: layer(x, None, None)[0])


def same_outputs(theirs, ours, call=lambda layer, x: layer(x), eps=1e-6):
    """Weights from theirs to ours, by name and strictly; outputs and gradients of the input are equal."""
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        if parameter.dim() > 1 and parameter.shape[0] > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    if eps != 1e-6:
        ours.o_norm.eps = eps
    x, y = (hidden(2, 75, dtype=torch.float32).requires_grad_() for _ in range(2))
    expected, got = call(theirs, x), ours(y)
    close(got, expected, 1e-5)
    expected.square().sum().backward()
    got.square().sum().backward()
    close(y.grad, x.grad, 1e-4)


def test_retention_decays_and_turns():
    """Against the quadratic form: gamma^(i - j) times the rotated products; head h keeps 1 - 2^(-5 - h)."""
    torch.manual_seed(0)
    layer = LAYERS["retention"]().double()
    x = hidden(1, 40)
    q, k = (proj(x).unflatten(-1, (2, 12)).transpose(1, 2) for proj in (layer.q_proj, layer.k_proj))
    angle = torch.arange(40)[:, None] * 10000.0 ** (-torch.arange(6).double() / 6)
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.complex(y[..., :6], y[..., 6:]) * turn for y in (q, k))
    distance = (torch.arange(40)[:, None] - torch.arange(40)).double()
    gamma = torch.tensor([1 - 1 / 32, 1 - 1 / 64], dtype=torch.float64)
    decay = (gamma[:, None, None] ** distance.clamp_min(0)).tril()
    v = layer.v_proj(x).unflatten(-1, (2, 24)).transpose(1, 2)
    rows = ((q @ k.mH).real * decay) @ v / math.sqrt(12)
    rows = F.rms_norm(rows, (24,), eps=1e-5) * F.silu(layer.g_proj(x)).unflatten(-1, (2, 24)).transpose(1, 2)
    close(layer(x), layer.o_proj(rows.transpose(1, 2).flatten(2)), 1e-6)
