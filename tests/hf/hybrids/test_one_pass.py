"""Prompts whose layers are one native call between their projections: they take it, and compute what transformers computes."""

import copy

import pytest
import torch
import transformers

from hf_support import logits, tokens
from hybrid_support import FAMILIES, KINDS
from linattn.engines.native import mixer
from linattn.hf import attach, projections
from linattn.hf.hybrids import delta_net, delta_pass, kimi, mamba2
from linattn.hf.hybrids.layers import linear_layers
from native_support import needs_native

transformers.logging.set_verbosity_error()
pytestmark = needs_native
LAYERS = (mamba2.Mamba2Forward, delta_net.DeltaNetForward, kimi.KimiDeltaForward)
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


KDA = ["kimi_linear", "glm5_next", "bailing_hybrid"]


def big_heads(family):
    """A tiny model of KDA with heads as wide as the call for prompts needs them, and gates that matter."""
    config = FAMILIES[family]()
    text = config.text_config if family == "glm5_next" else config
    text.linear_head_dim, text.index_topk = 16, 512  # rounding would change which keys an indexer selects
    model = KINDS.get(family, transformers.AutoModelForCausalLM).from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "_proj" in name or "conv1d" in name:
                p.mul_(4)
            if name.endswith(("A_log", "dt_bias", "o_norm.weight")):
                p.normal_(0.5, 0.5)
    return model


def build(family):
    torch.manual_seed(0)
    if family in KDA:
        return big_heads(family)
    if family == "mamba2":
        config = transformers.Mamba2Config(**SIZES, num_heads=4, head_dim=16, state_size=16, n_groups=2)
    else:
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        dims = {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "num_attention_heads": 2, "head_dim": 16}
        experts = {
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        }
        layers = {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 1}
        if family == "qwen3_5":
            config = transformers.Qwen3_5TextConfig(**SIZES, **heads, **dims, **layers, intermediate_size=32)
        else:
            config = transformers.Qwen3NextConfig(**SIZES, **heads, **dims, **experts, **layers)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(params=["mamba2", "qwen3_next", *KDA])
def pair(request, monkeypatch):
    """A model, the attached one, and an entry for each layer that took one call; every prompt takes the native product."""
    calls = []
    for module, name in ((mamba2, "scan_layer"), (delta_pass, "delta_layer")):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, f=function: (calls.append(args), f(*args))[1])
    monkeypatch.setattr(projections, "MANY_ROWS", 20)
    monkeypatch.setattr(mixer, "project_many_wins", lambda: True)
    theirs = build(request.param)
    return theirs, attach(copy.deepcopy(theirs)), calls


def served(model):
    return [m.__dict__["forward"] for m in model.modules() if "forward" in m.__dict__]


def norm_of(layer):
    return layer.o_norm if hasattr(layer, "o_norm") else layer.norm


def near(found, expected):
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_prompts_and_what_follows_them(pair):
    theirs, ours, calls = pair
    ids = tokens(2, 90)
    near(logits(ours, ids), logits(theirs, ids))
    assert len(calls) == sum(type(m) in LAYERS for m in served(ours))
    found = ours.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(found, theirs.generate(ids, max_new_tokens=6, do_sample=False))
    cache = transformers.DynamicCache(config=ours.config)
    held = {"cache_params" if ours.config.model_type == "mamba2" else "past_key_values": cache}
    del calls[:]
    sizes = [1, 17, 32, 40]  # the first part is shorter than the convolution is wide, and takes the steps one by one
    with torch.no_grad():
        rows = [ours(part, **held, use_cache=True).logits for part in ids.split(sizes, 1)]
    assert len(calls) == 3 * len([m for m in served(ours) if type(m) in LAYERS])
    near(torch.cat(rows, 1), logits(theirs, ids))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", *KDA])
def test_single_tokens_take_one_call(family, monkeypatch):
    """Two prompts, then tokens one by one; a hook on the norm, which that call would miss, is called again."""
    calls, function = [], delta_pass.delta_layer_step
    monkeypatch.setattr(delta_pass, "delta_layer_step", lambda *args: (calls.append(args), function(*args))[1])
    theirs = build(family)
    ours, ids = attach(copy.deepcopy(theirs)), tokens(2, 30)
    layers = [m for m in served(ours) if type(m) in LAYERS]
    cache, seen = transformers.DynamicCache(config=ours.config), []
    with torch.no_grad():
        rows = [ours(part, past_key_values=cache, use_cache=True).logits for part in ids.split([20, *[1] * 8, 2], 1)]
        assert len(calls) == 8 * len(layers) > 0
        norm_of(layers[0].module).register_forward_hook(lambda *args: seen.append(args))
        rows.append(ours(ids[:, :1], past_key_values=cache, use_cache=True).logits)
    assert len(calls) == 9 * len(layers) - 1
    assert len(seen) == 1
    near(torch.cat(rows, 1), logits(theirs, torch.cat([ids, ids[:, :1]], 1)))


def test_gradients_and_hooks_of_the_norm_take_the_steps_one_by_one(pair):
    theirs, ours, calls = pair
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    near(logits(ours, ids, attention_mask=mask)[0, 7:], logits(theirs, ids, attention_mask=mask)[0, 7:])
    del calls[:]
    near(ours(ids).logits.detach(), logits(theirs, ids))  # with gradients
    assert not calls
    seen, norms = [], [m for m in ours.modules() if type(m).__name__.endswith("RMSNormGated")]
    for norm in norms:
        norm.register_forward_hook(lambda *args: seen.append(args))
    near(logits(ours, ids), logits(theirs, ids))
    assert len(seen) == len(norms) > 0


def layer_pair(family, monkeypatch):
    """A configuration, one linear layer of it as transformers has it and attached, and a list of its native calls."""
    calls = []
    for name in ("delta_layer", "delta_layer_step"):
        function = getattr(delta_pass, name)
        monkeypatch.setattr(delta_pass, name, lambda *args, f=function: (calls.append(args), f(*args))[1])
    theirs = build(family)
    models = theirs, attach(copy.deepcopy(theirs))
    return theirs.config.get_text_config(), *(linear_layers(m)[0].module for m in models), calls


def in_parts(config, layer, x, sizes, recording=False):
    """Outputs of a layer that reads x (B, T, width) in parts, and what its cache holds at the end."""
    cache = transformers.DynamicCache(config=config)
    if recording:
        cache.activate_past_recording()
    with torch.no_grad():
        out = torch.cat([layer(part, cache_params=cache) for part in x.split(sizes, 1)], 1)
    held = cache.layers[layer.layer_idx]
    return out, held.conv_states[0], held.recurrent_states[0]


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("family", ["qwen3_next", *KDA])
def test_the_cache_holds_what_transformers_puts_there(family, recording, monkeypatch):
    """A prompt, tokens, a short part, a later part and a token; a cache that records its inputs takes tokens another way."""
    config, theirs, ours, calls = layer_pair(family, monkeypatch)
    x = torch.randn(2, 61, 32, generator=torch.Generator().manual_seed(0))
    sizes = [19, 1, 1, 3, 36, 1]
    for found, expected in zip(
        in_parts(config, ours, x, sizes, recording), in_parts(config, theirs, x, sizes, recording), strict=True
    ):
        assert found.shape == expected.shape
        near(found, expected)
    assert len(calls) == (2 if recording else 5)


@pytest.mark.parametrize("family", KDA)
def test_a_forget_gate_that_is_watched_or_trained_is_called(family, monkeypatch):
    config, theirs, ours, calls = layer_pair(family, monkeypatch)
    x, seen = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0)), []
    expected = in_parts(config, theirs, x, [19, 1])[0]
    hook = ours.forget_gate.register_forward_hook(lambda *args: seen.append(args))
    near(in_parts(config, ours, x, [19, 1])[0], expected)
    hook.remove()
    assert (len(seen), len(calls)) == (2, 0)
    for layer in (theirs, ours):
        layer.requires_grad_(False)
        layer.forget_gate.dt_bias.requires_grad_(True)
    grads = [torch.autograd.grad(layer(x).square().sum(), layer.forget_gate.dt_bias)[0] for layer in (ours, theirs)]
    near(*grads)
    assert not calls


@pytest.mark.parametrize("family", KDA)
def test_a_bad_row_of_a_prompt_spoils_no_other(family, monkeypatch):
    config, theirs, ours, calls = layer_pair(family, monkeypatch)
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0))
    expected = in_parts(config, theirs, x, [39, 1])
    x[1, 30] = float("nan")
    found = in_parts(config, ours, x, [39, 1])
    assert len(calls) == 2
    for ours_has, theirs_has in zip(found, expected, strict=True):
        near(ours_has[0], theirs_has[0])
    near(found[0][1, :30], expected[0][1, :30])
    assert found[0][1, 30:].isnan().all()
