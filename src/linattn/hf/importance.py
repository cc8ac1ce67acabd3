"""How much an error in one attention layer matters to what a language model predicts, beside the same error in another."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .call import call_for, evaluating

TOKENS = 1024  # to measure on: the logits of a long text, and their gradients, are large


def layer_weights(model: PreTrainedModel, ids: Tensor, modules: Sequence[nn.Module]) -> Tensor:
    """(layers,), with mean 1, for attention modules whose errors are relative to the size of their outputs.

    An error e in an output o of a layer changes the log-likelihood of labels by about g.e, with g the gradient at o. For
    labels that the model draws itself, the mean of (g.e)^2 is the Fisher information: twice the rise of the loss, to second
    order. For errors in random directions it is |g|^2 |e|^2 up to a constant. The weight is the square root of the sum of
    |g|^2 |o|^2 over tokens; the sum itself gives early layers too much (docs/experiments.md). Ones where there is no loss, or
    where a module does not show its output matrix.
    """
    outputs = [output_layer(module) for module in modules]
    if not model.can_generate() or any(layer is None for layer in outputs):
        return torch.ones(len(modules))
    found: dict[Any, Tensor] = {}

    def keep(layer: nn.Module, _args: Any, out: Tensor) -> None:
        found[layer] = out if out.requires_grad else out.requires_grad_()

    hooks = [layer.register_forward_hook(keep) for layer in outputs if layer is not None]
    try:
        with evaluating(model), torch.inference_mode(False), torch.enable_grad():
            ids = ids[:, :TOKENS].clone()  # one of inference mode could not be kept for the gradients
            logits = model(**call_for(model, ids)).logits[0].float()
            drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=torch.Generator().manual_seed(0))
            loss = nn.functional.cross_entropy(logits, drawn[:, 0].to(logits.device), reduction="sum")
            tensors = [found[layer] for layer in outputs]
            gradients = torch.autograd.grad(loss, tensors)
    finally:
        for hook in hooks:
            hook.remove()
    sizes = [
        (g.float().square().sum(-1) * o.detach().float().square().sum(-1)).sum().sqrt()
        for g, o in zip(gradients, tensors, strict=True)
    ]
    weights = torch.stack(sizes).cpu()
    return weights / weights.mean().clamp_min(1e-30)


def output_layer(module: Any) -> Any:
    """The layer that mixes the heads of an attention module, where it has one; else None."""
    for name in ("o_proj", "out_proj", "dense", "c_proj", "o"):
        layer = getattr(module, name, None)
        if layer is not None and hasattr(layer, "weight"):
            return layer
    return None
