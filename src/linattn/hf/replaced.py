"""Attributes of modules that `attach` puts others in the way of."""

from dataclasses import dataclass
from typing import Any

from torch import nn


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
