"""Attaching a kernel to a pretrained model, and detaching it."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from ..kernels import Kernel, KernelName, resolve
from ..nearfar import NearFar
from .attention import NAME, PassCache
from .budgets import Calibration
from .modules import attention_modules, configs_of, head_dim, is_sliding, refuse_unsupported
from .sharding import ShardInputs

KernelLike = Kernel | KernelName


@dataclass
class Attached:
    """What `attach` changed, for `detach`."""

    layers: set[int] = field(default_factory=set)  # indices of layers with a kernel that are given the call's cache
    modules: list[Any] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    implementations: list[tuple[Any, str | None]] = field(default_factory=list)


def attach(
    model: PreTrainedModel,
    kernel: KernelLike | Mapping[int, KernelLike] | None = None,
    *,
    budgets: Mapping[int, Sequence[int]] | None = None,
) -> PreTrainedModel:
    """Replaces the attention of every global layer of a model. No weight changes; returns the model.

    Args:
        model: a transformers model: decoder (Llama, Qwen, Mistral, Gemma, GPT-2, GPT-NeoX, ..), encoder (BERT, ..) or both
            (BART, ..). Layers with a sliding window keep their own attention, which is linear already.
        kernel: one kernel or name for all layers, or a mapping from layer index to kernel, where layers that are not
            listed keep their own attention. None: the calibration saved in the model's folder, if any, otherwise NearFar().
            Every layer gets its own copy; constants of a kernel given by name are not part of the state_dict.
        budgets: layer index -> slots of each kv head, for a NearFar kernel; `calibrate` finds them.
    """
    if getattr(model, "_linattn", None) is not None:
        raise ValueError("this model has linattn attached already: call linattn.hf.detach(model) first.")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"attach takes a transformers PreTrainedModel, got {type(model).__name__}.")
    found = attention_modules(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention layer that goes through transformers' attention interface."
        )
    if kernel is None and budgets is None and (saved := Calibration.find(model)) is not None:
        kernel = saved.kernels()
    attached, chosen = Attached(), _choose_kernels(found, kernel, budgets)
    for config in configs_of(model):
        attached.implementations.append((config, config._attn_implementation))
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ValueError(f"{type(model).__name__} does not let its attention be replaced.")
    sharding = ShardInputs()
    attached.hooks.append(model.register_forward_pre_hook(sharding.before, with_kwargs=True))
    attached.hooks.append(model.register_forward_hook(sharding.after, with_kwargs=True))
    for _, module in found:
        if not is_sliding(module) and (hook := PassCache.for_module(module)) is not None:
            attached.hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            attached.layers |= {module.layer_idx} if module in chosen else set()
    for module, own in chosen.items():
        module.linattn_kernel = own
        attached.modules.append(module)
    model._linattn = attached  # type: ignore[assignment]
    return model


def _choose_kernels(
    found: Sequence[tuple[str, Any]],
    kernel: KernelLike | Mapping[int, KernelLike] | None,
    budgets: Mapping[int, Sequence[int]] | None,
) -> dict[Any, Kernel]:
    """Attention module -> its kernel, for the layers that get one."""
    chosen: dict[Any, Kernel] = {}
    for name, module in found:
        choice = kernel.get(module.layer_idx) if isinstance(kernel, Mapping) else kernel or NearFar()
        if choice is None or is_sliding(module):
            continue
        refuse_unsupported(name, module)
        chosen[module] = _kernel_for(module, choice, budgets)
    if not chosen:
        raise ValueError(
            "there is no layer to attach to: every attention layer has a sliding window, or none is named in `kernel`."
        )
    return chosen


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Restores exactly what `attach` changed."""
    attached = getattr(model, "_linattn", None)
    if attached is None:
        raise ValueError("this model has no linattn attached.")
    for hook in attached.hooks:
        hook.remove()
    for module in attached.modules:
        del module.linattn_kernel
    for config, implementation in attached.implementations:
        config._attn_implementation_internal = implementation
    del model._linattn
    return model


def _kernel_for(module: Any, choice: KernelLike, budgets: Mapping[int, Sequence[int]] | None) -> Kernel:
    """A layer's own kernel, on its device."""
    device = next(module.parameters()).device
    own = copy.deepcopy(resolve(choice, head_dim(module), device)).to(device)
    if isinstance(choice, str):
        for part in own.modules():  # recreated from the name
            for name, constant in list(part.named_buffers(recurse=False)):
                part.register_buffer(name, constant, persistent=False)
    if budgets is None or module.layer_idx not in budgets:
        return own
    if not isinstance(own, NearFar):
        raise ValueError(f"budgets are for NearFar kernels, not for {type(own).__name__}.")
    return own.with_slots(budgets[module.layer_idx])
