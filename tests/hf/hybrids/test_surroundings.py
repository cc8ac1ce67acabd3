"""What surrounds a layer of an attached hybrid: autocast, trained parts, strided weights, hooks, bad rows."""

import copy

import pytest
import torch
import transformers

from hf_support import tokens
from hybrid_support import build_hybrid
from linattn.hf import attach
from native_support import needs_native

transformers.logging.set_verbosity_error()
pytestmark = needs_native
SSD = ["mamba2", "bamba", "granitemoehybrid", "nemotron_h", "zamba2"]


def near(found, expected, bound=1e-4):
    assert float((found - expected).norm() / expected.norm()) < bound


def pair(family, change=lambda model: None):
    theirs = build_hybrid(family)
    change(theirs)
    return theirs, attach(copy.deepcopy(theirs))


def prompt_and_token(model, ids):
    """Logits of all tokens but the last, and of the last one after them."""
    out = model(ids[:, :-1], use_cache=True)
    name = "cache_params" if out.get("cache_params") is not None else "past_key_values"
    return torch.cat([out.logits, model(ids[:, -1:], use_cache=True, **{name: out[name]}).logits], 1)


@pytest.mark.parametrize("family", [*SSD, "qwen3_next", "kimi_linear"])
def test_autocast(family):
    theirs, ours = pair(family)
    ids = tokens(2, 30)
    with torch.no_grad():
        expected = prompt_and_token(theirs, ids)
        with torch.autocast("cpu", torch.bfloat16):
            near(prompt_and_token(ours, ids), expected, 0.05)


@pytest.mark.parametrize("part", ["in_proj.bias", "conv1d.bias", "norm.weight", "D"])
def test_gradients_of_single_weights(part):
    """Everything else is frozen: the input of the last layer wants no gradient, and its output does."""

    def change(model):
        model.requires_grad_(False)
        mixer = model.backbone.layers[-1].mixer
        mixer.in_proj.bias = torch.nn.Parameter(torch.zeros(mixer.in_proj.out_features), requires_grad=False)
        mixer.get_parameter(part).requires_grad_(True)

    found = []
    for model in pair("mamba2", change):
        for count in (20, 1):
            with torch.no_grad():
                before = model(tokens(2, 9), use_cache=True).cache_params
            weight = model.backbone.layers[-1].mixer.get_parameter(part)
            if count == 1 and part == "in_proj.bias":  # transformers itself writes over what it would need here
                continue
            options = {"cache_params": before} if count == 1 else {}
            out = model(tokens(2, count), **options).logits
            found.append(torch.autograd.grad(out.square().sum(), weight)[0])
    half = len(found) // 2
    for ours, theirs in zip(found[half:], found[:half], strict=True):
        near(ours, theirs, 1e-3)


def strided(model):
    """Every parameter becomes a view whose numbers lie apart."""
    for name, weight in model.named_parameters():
        if "experts" in name:  # torch's grouped product takes no such weights
            continue
        weight.data = torch.stack([weight.data * 3, weight.data], -1)[..., 1]


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "kimi_linear", "mamba", "lfm2", "minimax"])
def test_weights_that_are_not_contiguous(family):
    theirs, ours = pair(family, strided)
    with torch.no_grad():
        near(prompt_and_token(ours, tokens(2, 30)), prompt_and_token(theirs, tokens(2, 30)))


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "kimi_linear"])
def test_hooks_of_all_modules_are_called(family):
    theirs, ours = pair(family)
    ids, kinds = tokens(2, 30), ("Linear", "RMSNormGated")
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, out: out * 1.5 if type(module).__name__.endswith(kinds) else None
    )
    try:
        with torch.no_grad():
            near(prompt_and_token(ours, ids), prompt_and_token(theirs, ids))
    finally:
        hook.remove()


def stream(model, ids, spoilt=None):
    """Logits of a prompt and four tokens one by one; the embedding of the second of these is NaN in row `spoilt`."""
    rows, options = [], {}
    with torch.no_grad():
        for i, part in enumerate(ids.split([8, 1, 1, 1, 1], 1)):
            embedded = model.get_input_embeddings()(part)
            if i == 2 and spoilt is not None:
                embedded[spoilt] = float("nan")
            out = model(inputs_embeds=embedded, use_cache=True, **options)
            name = "cache_params" if out.get("cache_params") is not None else "past_key_values"
            options = {name: out[name]}
            rows.append(out.logits)
    return torch.cat(rows, 1)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "minimax", "mamba2", "lfm2"])
def test_a_bad_row_spoils_no_other(family):
    theirs, ours = pair(family)
    found = stream(ours, tokens(2, 12), spoilt=1)
    near(found[:1], stream(theirs, tokens(2, 12))[:1])
    assert found[1, 9].isnan().all()


def test_gradients_of_a_token_after_a_prompt():
    """Of a short convolution: transformers' recurrent layers write over what the backward pass would need."""
    found = []
    for model in pair("lfm2"):
        with torch.no_grad():
            held = model(tokens(2, 9), use_cache=True).past_key_values
        out = model(tokens(2, 1), use_cache=True, past_key_values=held).logits
        weight = model.get_input_embeddings().weight
        found.append(torch.autograd.grad(out.square().sum(), weight)[0])
    near(found[1], found[0], 1e-3)
