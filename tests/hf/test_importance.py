"""Weights of layers: how much the same relative error in each of them changes what a model predicts."""

import pytest
import torch

pytest.importorskip("transformers")

from hf_support import build, tokens
from linattn.hf.calibrate import measured_layers
from linattn.hf.importance import layer_weights


def modules_of(model):
    return [module for _, module in measured_layers(model)]


def test_weights_are_those_of_small_random_errors():
    """The mean of (change of the labels' log-likelihood)^2 for errors of one relative size, to a few percent."""
    model, ids = build("llama").double(), tokens(1, 24)
    modules = modules_of(model)
    torch.manual_seed(0)
    for i, module in enumerate(modules):
        module.o_proj.weight.data *= 4.0**i
    weights = layer_weights(model, ids, modules)
    assert float(weights.mean()) == pytest.approx(1)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].float()
        labels = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
        plain = loss(model, ids, labels)
        sizes = []
        for module in modules:
            changes = []
            for _ in range(400):

                def disturb(_module, _args, out):
                    noise = torch.randn_like(out)
                    return out + 1e-6 * noise * out.norm(dim=-1, keepdim=True)

                hook = module.o_proj.register_forward_hook(disturb)
                changes.append((loss(model, ids, labels) - plain) ** 2)
                hook.remove()
            sizes.append(torch.stack(changes).mean().sqrt())
    found = torch.stack(sizes)
    assert torch.allclose(found / found.mean(), weights.double(), rtol=0.15)


def loss(model, ids, labels):
    return torch.nn.functional.cross_entropy(model(ids, use_cache=False).logits[0], labels, reduction="sum")


def test_a_silent_layer_counts_nothing_and_gradients_of_weights_are_left_alone():
    model = build("llama")
    modules = modules_of(model)
    modules[0].o_proj.weight.data.zero_()
    weights = layer_weights(model, tokens(1, 24), modules)
    assert weights[0] == 0
    assert float(weights.mean()) == pytest.approx(1)
    assert all(p.grad is None for p in model.parameters())
    assert not any(module.o_proj._forward_hooks for module in modules)


def test_an_encoder_counts_by_what_the_decoder_reads_of_it():
    model = build("t5")
    found = measured_layers(model, biased=True)
    modules = [module for _, module in found]
    assert (layer_weights(model, tokens(1, 24), modules) > 0).all()
    for name, module in found:
        if "EncDec" in name:
            module.o.weight.data.zero_()
    weights = layer_weights(model, tokens(1, 24), modules)
    assert {name for (name, _), weight in zip(found, weights, strict=True) if weight > 0} == {
        "decoder.block.0.layer.0.SelfAttention",
        "decoder.block.1.layer.0.SelfAttention",
    }
    assert float(weights.mean()) == pytest.approx(1)


def test_an_encoder_has_no_loss():
    model = build("bert")
    assert layer_weights(model, tokens(1, 24), modules_of(model)).unique().tolist() == [1]
