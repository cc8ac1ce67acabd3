"""Attributes of modules that `attach` puts others in the way of."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module


@dataclass
class Replaced:
    """One attribute that was put in the way of a module's own, and what was there before."""

    module: Any
    attribute: str
    before: Any

    def restore(self) -> None:
        if self.before is None:
            delattr(self.module, self.attribute)
        else:
            setattr(self.module, self.attribute, self.before)


def replace_forward(module: nn.Module, forward: Any) -> Replaced:
    """accelerate's hooks, where a module has them, call _old_forward."""
    attribute = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    before = module.__dict__.get(attribute)
    setattr(module, attribute, forward)
    return Replaced(module, attribute, before)


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks, its own or those of all modules, see the calls of this module."""
    of_all = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks  # noqa: SLF001
    return bool(of_all or module._forward_hooks or module._forward_pre_hooks)  # noqa: SLF001
