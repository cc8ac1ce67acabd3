"""Attaching a kernel to a pretrained model, and detaching it."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from ..kernels import Kernel, KernelName, resolve
from ..nearfar import NearFar
from .attention import CACHE, NAME, PADDING, PassCache, attend
from .biases import biases_of
from .budgets import Calibration
from .cache import refuse_unused_cache
from .hybrids.layers import linear_layers, serve, unserved_layer
from .modules import (
    ByLayer,
    attention_modules,
    configs_of,
    head_dim,
    is_attached,
    is_sliding,
    of_layer,
    refuse_unsupported,
    set_interface,
)
from .own_softmax import InterfaceForward, has_own_softmax
from .projections import serve_projections
from .replaced import Replaced, replace_forward
from .self_calibration import find_or_calibrate
from .sharding import ShardInputs

KernelLike = Kernel | KernelName


@dataclass
class Attached:
    """What `attach` changed, for `detach`."""

    layers: set[int] = field(default_factory=set)  # indices of layers with a kernel that are given the call's cache
    modules: list[Any] = field(default_factory=list)
    biased: list[Any] = field(default_factory=list)  # modules that cap or bias their scores
    hooks: list[Any] = field(default_factory=list)
    implementations: list[tuple[Any, str | None]] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)  # forwards of linear layers


def attach(
    model: PreTrainedModel,
    kernel: KernelLike | ByLayer[KernelLike] | None = None,
    *,
    budgets: ByLayer[Sequence[int]] | None = None,
    mean_slots: int | None = None,
    memory: int | str | None = None,
) -> PreTrainedModel:
    """Linear layers of a hybrid model go to this library's engine; softmax layers to a kernel, if one is named.

    Linear layers (gated delta rule, Kimi delta attention, Mamba-1 and -2, lightning attention, short convolutions) compute what
    they did before, much faster on a CPU. Softmax layers keep their own attention unless `kernel` names another one, which
    approximates or replaces softmax. nn.Linear takes the engine's matrix product where that is faster. No weight changes.
    `describe` shows what was done.

    >>> import transformers, linattn
    >>> config = transformers.Mamba2Config(vocab_size=60, hidden_size=32, num_heads=8, head_dim=8, num_hidden_layers=1)
    >>> model = linattn.hf.attach(transformers.AutoModelForCausalLM.from_config(config))
    >>> print(linattn.hf.describe(model))
    layer                    rule or kernel  engine  state
    backbone.layers.0.mixer  Mamba-2 scan    native  65.0 KiB

    Args:
        model: a transformers model: a hybrid (Qwen3-Next, Kimi Linear, Mamba, ..), or any decoder (Llama, Qwen, Gemma, ..),
            encoder (BERT, ..) or both (BART, T5, ..). Layers with a sliding window keep their own attention, which is linear
            already. Near/far keeps capped logits (Gemma 2), ALiBi (BLOOM, MPT, Falcon), T5's position bias and learned sinks
            (gpt-oss).
        kernel: for softmax layers: one kernel or name for all of them, or a mapping from layer to kernel, where layers
            that are not listed keep their own attention. "nearfar" takes the calibration saved in the model's folder, if there
            is one. Every layer gets its own copy; constants of a kernel given by name are not part of the state_dict. A model
            without linear layers needs it.
        budgets: layer -> slots of each kv head, for a NearFar kernel; `calibrate` finds them. A layer is named by its index, or
            by its attention module: in encoder-decoder models several have the same index.
        mean_slots: for near/far, slots of a kv head on average. They go to the heads that need them, by the calibration
            saved beside the model or, if there is none, by one on a text that the model writes: minutes, once, and one line
            says so.
        memory: for near/far instead, the size of the states of one sequence, in bytes or as "64MiB".

    Returns:
        The model.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"attach takes a transformers PreTrainedModel, got {type(model).__name__}.")
    if is_attached(model):
        raise ValueError(
            "this model, or a part of it, has linattn attached already: call linattn.hf.detach(model) first, with what it was "
            "attached to."
        )
    linear = linear_layers(model)
    if mean_slots is not None or memory is not None:
        kernel, budgets = _found_budgets(model, kernel, budgets, mean_slots, memory), None
    else:
        kernel = _read_kernel(model, kernel, budgets)
    if kernel is None and not linear:
        if (other := unserved_layer(model)) is not None:
            raise ValueError(
                f"{type(model).__name__} is not served: the linear state of {other} has a rule that linattn does not compute."
            )
        raise ValueError(
            f"{type(model).__name__} has no linear layers, and its softmax layers keep their own attention unless a kernel is "
            'named: pass kernel="nearfar" (softmax approximated with a state of bounded size) or another one.'
        )
    attached = Attached()
    if kernel is not None:
        _attach_kernels(model, kernel, budgets, attached)
    for layer in linear:
        attached.replaced += serve(layer)
    attached.replaced += serve_projections(model, [layer.module for layer in linear])
    attached.hooks.append(model.register_forward_pre_hook(refuse_unused_cache, with_kwargs=True))
    sharding = ShardInputs()
    attached.hooks.append(model.register_forward_pre_hook(sharding.before, with_kwargs=True))
    attached.hooks.append(model.register_forward_hook(sharding.after, with_kwargs=True))
    model._linattn = attached  # type: ignore[assignment]
    return model


def _read_kernel(
    model: PreTrainedModel,
    kernel: KernelLike | ByLayer[KernelLike] | None,
    budgets: ByLayer[Sequence[int]] | None,
) -> KernelLike | ByLayer[KernelLike] | None:
    """The kernel argument, with the model's saved calibration for "nearfar"."""
    if kernel is None and budgets is not None:
        return NearFar()
    if isinstance(kernel, str) and kernel == "nearfar":
        saved = None if budgets is not None else Calibration.find(model)
        return NearFar() if saved is None else saved.kernels()
    return kernel


def _attach_kernels(
    model: PreTrainedModel,
    kernel: KernelLike | ByLayer[KernelLike],
    budgets: ByLayer[Sequence[int]] | None,
    attached: Attached,
) -> None:
    """Gives softmax layers their kernels, and notes in `attached` what was changed."""
    found = attention_modules(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention layer that goes through transformers' attention interface."
        )
    chosen = _choose_kernels(found, kernel, budgets)
    if any(config._attn_implementation in (NAME, PADDING) for config in configs_of(model)):
        raise ValueError(
            "this model shares its configuration with another one, or another part, that linattn is attached to, and detaching "
            "one would change both: attach the whole model, or give it a configuration of its own (copy.deepcopy)."
        )
    for config in configs_of(model):
        attached.implementations.append((config, config._attn_implementation))
    if any(has_own_softmax(module) for _, module in found):
        _attach_own_softmax(model, found, chosen, attached)
    else:
        _attach_interface(model, found, chosen, attached)
    for name, module in found:
        biases = biases_of(name, module, found)
        if biases.any or biases.understood:
            module.linattn_biases = biases
            attached.biased.append(module)
    for module, own in chosen.items():
        module.linattn_kernel = own
        attached.modules.append(module)


def _attach_own_softmax(
    model: PreTrainedModel, found: Sequence[tuple[str, Any]], chosen: Mapping[Any, Kernel], attached: Attached
) -> None:
    """BLOOM, MPT and Falcon call no attention interface: all of their modules get a forward that does."""
    for config in configs_of(model):
        config._attn_implementation_internal = PADDING
    for _, module in found:
        attached.replaced.append(replace_forward(module, InterfaceForward(module, attend, CACHE)))
        attached.layers |= {module.layer_idx} if module in chosen else set()


def _attach_interface(
    model: PreTrainedModel, found: Sequence[tuple[str, Any]], chosen: Mapping[Any, Kernel], attached: Attached
) -> None:
    set_interface(model, NAME)
    for _, module in found:
        if not is_sliding(module) and (hook := PassCache.for_module(module)) is not None:
            attached.hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            attached.layers |= {module.layer_idx} if module in chosen else set()


def _found_budgets(
    model: PreTrainedModel,
    kernel: KernelLike | ByLayer[KernelLike] | None,
    budgets: ByLayer[Sequence[int]] | None,
    mean_slots: int | None,
    memory: int | str | None,
) -> ByLayer[KernelLike]:
    """Layer -> kernel, from a calibration that is saved, kept or made now."""
    kernel = None if kernel == "nearfar" else kernel
    if not (kernel is None or isinstance(kernel, NearFar)) or budgets is not None:
        raise ValueError("mean_slots and memory are for one NearFar kernel whose budgets are to be found.")
    return find_or_calibrate(model, kernel, mean_slots=mean_slots, memory=memory).kernels()


def _choose_kernels(
    found: Sequence[tuple[str, Any]],
    kernel: KernelLike | ByLayer[KernelLike],
    budgets: ByLayer[Sequence[int]] | None,
) -> dict[Any, Kernel]:
    """Attention module -> its kernel, for the layers that get one."""
    chosen: dict[Any, Kernel] = {}
    for given in (kernel, budgets):
        _refuse_unknown(found, given)
    for name, module in found:
        choice = of_layer(kernel, name, module) if isinstance(kernel, Mapping) else kernel
        if choice is None or is_sliding(module):
            continue
        near_far = isinstance(choice, NearFar) or choice == "nearfar"
        refuse_unsupported(name, module, near_far=near_far)
        own = _kernel_for(module, choice, None if budgets is None else of_layer(budgets, name, module))
        chosen[module] = biases_of(name, module, found).given_to(own) if isinstance(own, NearFar) else own
    if not chosen:
        raise ValueError(
            "there is no layer to attach to: every attention layer has a sliding window, or none is named in `kernel`."
        )
    return chosen


def _refuse_unknown(found: Sequence[tuple[str, Any]], given: object) -> None:
    names, indices = [name for name, _ in found], [module.layer_idx for _, module in found]
    for key in given if isinstance(given, Mapping) else ():
        if isinstance(key, str) and key not in names:
            raise ValueError(f"this model has no attention module {key!r}: its first one is {names[0]!r}.")
        if not isinstance(key, str) and key not in indices:
            known = sorted({index for index in indices if index is not None})
            raise ValueError(f"this model has no attention in a layer {key!r}: those with it are {known}.")


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Restores exactly what `attach` changed."""
    attached = getattr(model, "_linattn", None)
    if attached is None:
        raise ValueError("this model has no linattn attached.")
    for hook in attached.hooks:
        hook.remove()
    for module in attached.modules:
        del module.linattn_kernel
    for module in attached.biased:
        del module.linattn_biases
    for replaced in attached.replaced:
        replaced.restore()
    for config, implementation in attached.implementations:
        config._attn_implementation_internal = implementation
    del model._linattn
    return model


def _kernel_for(module: Any, choice: KernelLike, slots: Sequence[int] | None) -> Kernel:
    """A layer's own kernel, on its device."""
    device = next(module.parameters()).device
    own = copy.deepcopy(resolve(choice, head_dim(module), device)).to(device)
    if isinstance(choice, str):
        for part in own.modules():  # recreated from the name
            for name, constant in list(part.named_buffers(recurse=False)):
                part.register_buffer(name, constant, persistent=False)
    if slots is not None:
        if not isinstance(own, NearFar):
            raise ValueError(f"budgets are for NearFar kernels, not for {type(own).__name__}.")
        own = own.with_slots(slots)
    if isinstance(own, NearFar) and hasattr(module, "sinks"):
        own.sinks += 1  # a learned sink is a token in front of the others
    return own
