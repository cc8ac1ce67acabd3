"""The projections of attached layers: which product serves them, and that each is F.linear."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from hf_support import build, logits, tokens
from hybrid_support import FAMILIES, build_hybrid, own
from linattn.engines.native import mixer
from linattn.hf import attach, detach, projections
from linattn.hf.projections import LinearForward, native_form
from native_support import needs_native

transformers.logging.set_verbosity_error()
pytestmark = needs_native


def near(found, expected, bound=1e-4):
    assert float((found - expected).norm() / expected.norm()) < bound


@pytest.fixture
def served(monkeypatch):
    """Prompts of 20 rows and small weights take the native products on every processor; an entry for each call of a prompt."""
    calls, many = [], mixer.project_many

    def counted(*args, **options):
        calls.append(args)
        return many(*args, **options)

    monkeypatch.setattr(projections, "MANY_ROWS", 20)
    monkeypatch.setattr(projections, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(mixer, "project_many_wins", lambda: True)
    monkeypatch.setattr(mixer, "project_many", counted)
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_every_family(family, served):
    ids = tokens(2, 37)
    near(logits(attach(build_hybrid(family)), ids), logits(own(family), ids))
    assert served


def test_softmax_models_with_a_kernel_too(served):
    model, ids = build("llama"), tokens(2, 37)
    expected = logits(model, ids)
    near(logits(attach(model, "nearfar"), ids), expected)
    assert served
    detach(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_a_prompt_in_two_calls(family, served):
    model, ids = attach(build_hybrid(family)), tokens(2, 60)
    cache = transformers.DynamicCache(config=model.config)
    parts = [logits(model, part, use_cache=True, past_key_values=cache) for part in ids.split([37, 23], 1)]
    near(torch.cat(parts, 1), logits(own(family), ids))


def test_hooks_see_the_outputs_in_their_order(served):
    model, ids, seen = attach(build_hybrid("qwen3_next")), tokens(1, 40), []
    linear = next(m for m in model.modules() if hasattr(m, "in_proj_qkvz")).in_proj_qkvz
    linear.register_forward_hook(lambda _module, args, out: seen.append((args[0], out)))
    near(logits(model, ids), logits(own("qwen3_next"), ids))
    (x, out), *_ = seen
    with torch.inference_mode():
        near(out, F.linear(x, linear.weight))


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_every_number_of_rows_and_strides(served, bias):
    linear = nn.Linear(33, 70, bias=bias)
    forward = LinearForward(linear)
    wide = torch.randn(3, 25, 40)
    inputs = [wide[0, :n, 5:38] for n in (1, 2, 3, 19, 20, 25)]
    inputs += [
        wide[..., 5:38],
        wide[..., :33].transpose(0, 1),
        torch.randn(33, 2).T,
        torch.randn(33, 30).T,
        wide[:0, :, :33],
    ]
    for x in inputs:
        torch.testing.assert_close(forward(x), linear(x), rtol=1e-5, atol=1e-5)
    assert len(served) == 5


def test_torch_serves_everything_else(served):
    x, weight, bias = torch.randn(30, 8), torch.randn(5, 8), torch.randn(5)
    assert native_form(x, weight, bias) is mixer.project_many
    assert native_form(x[:2], weight, bias) is mixer.project
    assert native_form(x[:3], weight, bias) is None
    for other in (
        (x.double(), weight.double(), bias.double()),
        (x.bfloat16(), weight.bfloat16(), None),
        (x, torch.randn(8, 5).T, bias),
        (x, weight, torch.randn(10)[::2]),
        (x, nn.Parameter(weight), None),
        (x.to("meta"), weight.to("meta"), None),
    ):
        assert native_form(*other) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert native_form(x, weight, bias) is None


def test_compiled_layers_and_gradients_take_torchs(served):
    linear, x = nn.Linear(8, 70), torch.randn(30, 8)
    linear.forward = LinearForward(linear)
    linear(x).sum().backward()
    assert linear.weight.grad is not None
    with torch.no_grad():
        compiled = torch.compile(linear, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), F.linear(x, linear.weight, linear.bias))
    assert not served


def test_small_weights_and_large_outputs_take_torchs(served, monkeypatch):
    x, weight = torch.randn(30, 8), torch.randn(5, 8)
    monkeypatch.setattr(projections, "LEAST_WEIGHTS", 41)
    monkeypatch.setattr(projections, "MOST_OUTPUTS", 149)
    assert native_form(x[:1], weight, None) is None
    assert native_form(x, weight, None) is None
    assert native_form(x[:1], torch.randn(6, 8), None) is mixer.project
    assert native_form(x[:29], weight, None) is mixer.project_many


def test_processors_where_torch_is_as_fast_keep_its_product(served, monkeypatch):
    monkeypatch.setattr(mixer, "project_many_wins", lambda: False)
    assert native_form(torch.randn(30, 8), torch.randn(5, 8), None) is None
