"""Replacing the attention of an existing model, with shared weights."""

import copy
from collections.abc import Callable

from torch import nn

from ..kernels import Kernel, KernelName
from .multihead import MultiheadAttention

Choice = Kernel | KernelName | Callable[[str, nn.MultiheadAttention], Kernel | KernelName | None]


def swap(model: nn.Module, kernel: Choice) -> nn.Module:
    """Replaces every torch.nn.MultiheadAttention inside a model, in place, by one with a kernel and the same weights.

    >>> import torch, linattn
    >>> model = torch.nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
    >>> weight = model.self_attn.in_proj_weight
    >>> linattn.nn.swap(model, kernel="elu").self_attn.in_proj_weight is weight
    True

    Args:
        model: any module; returned after the change. For a MultiheadAttention, its replacement is returned.
        kernel: a Kernel, of which every layer gets a copy; a name; or a function of a layer's name and module that
            returns one of these, or None to leave the layer as it is.

    Raises:
        ValueError: a layer has dropout of attention weights, which has no linear form. Nothing is replaced then.
    """
    if type(model) is nn.MultiheadAttention:
        chosen = _chosen(kernel, "", model)
        if chosen is None:
            return model
        _refuse_dropout("the module", model)
        return swapped(model, chosen)
    found = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.MultiheadAttention
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no torch.nn.MultiheadAttention to swap.")
    choices = [
        (name, module, chosen) for name, module in found if (chosen := _chosen(kernel, name, module)) is not None
    ]
    for name, module, _ in choices:
        _refuse_dropout(name, module)
    made: dict[tuple[nn.Module, Kernel | KernelName], MultiheadAttention] = {}  # a layer in several places stays one
    for name, module, chosen in choices:
        parent, _, child = name.rpartition(".")
        if (module, chosen) not in made:
            made[module, chosen] = swapped(module, chosen)
        setattr(model.get_submodule(parent), child, made[module, chosen])
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # nested tensors belong to the softmax path that is no longer there
    return model


def swapped(module: nn.MultiheadAttention, kernel: Kernel | KernelName) -> MultiheadAttention:
    """One module with a kernel, on the parameters, buffers and hooks of another."""
    new = MultiheadAttention.__new__(MultiheadAttention)
    nn.Module.__init__(new)
    new.__dict__.update(module.__dict__)  # with the dictionaries of hooks themselves, so that handles remove from both
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_load_state_dict_pre_hooks"):
        new.__dict__[name] = copy.copy(module.__dict__[name])  # the kernel comes to some of them
    new.take(kernel)
    return new


def _refuse_dropout(name: str, module: nn.MultiheadAttention) -> None:
    if module.dropout > 0:
        raise ValueError(
            f"{name} has attention dropout {module.dropout}, which drops single weights that a linear kernel never forms: "
            "set its dropout to 0.0 before swap, and put dropout on its output instead."
        )


def _chosen(kernel: Choice, name: str, module: nn.MultiheadAttention) -> Kernel | KernelName | None:
    return kernel if isinstance(kernel, (Kernel, str)) else kernel(name, module)
