"""The state of the update rules: one matrix for each head."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from .base import State
from .layout import Spec


@dataclass(eq=False, repr=False)
class RecurrentState(State):
    """S of the delta rule or of decayed sums, for each state head. `kernel` is the name of the rule.

    Attributes:
        S: (..., heads, dim, value_dim), in float32 or float64.
        tokens: (..., heads), tokens seen, masked ones not counted.
    """

    S: Tensor
    tokens: Tensor

    form: ClassVar[str] = "recurrent"
    table: ClassVar[dict[str, Spec]] = {"S": Spec(("H", "D", "M")), "tokens": Spec(("H",), "count")}

    @staticmethod
    def empty(
        rule: str,
        batch: tuple[int, ...],
        heads: int,
        dim: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> "RecurrentState":
        """The state before any token."""
        S = torch.zeros(*batch, heads, dim, value_dim, dtype=dtype, device=device)
        return RecurrentState(rule, S, torch.zeros(*batch, heads, dtype=torch.int64, device=device))

    def combine(self, later: "RecurrentState", transition: Tensor | None = None) -> "RecurrentState":
        """The state after this one's tokens followed by those of `later`, which must have started from an empty state.

        transition: the effect of the tokens of `later` on an earlier state. Decayed sums: the product of their decays,
        (..., heads) or (..., heads, dim), None if nothing decays. Delta rule: the matrix (..., heads, dim, dim) of
        linattn.ops.delta_rule.transition.
        """
        if not isinstance(later, RecurrentState) or later.kernel != self.kernel or later.S.shape != self.S.shape:
            raise ValueError(f"{self!r} can be combined with a state of the same rule and shape only, got {later!r}.")
        before = self.S
        if transition is None:
            if self.kernel == "delta_rule":
                raise ValueError(
                    "the delta rule corrects what earlier tokens wrote: pass the transition matrix of the later tokens, "
                    "from linattn.ops.delta_rule.transition."
                )
        else:
            before = apply_transition(before, transition)
        return dataclasses.replace(self, S=before + later.S, tokens=self.tokens + later.tokens)

    def drop_last(self, tokens: int) -> NoReturn:
        """Always raises ValueError: the last tokens cannot be separated from the others."""
        raise ValueError(
            f"a recurrent state keeps one matrix for all its tokens, so the last {tokens} cannot be taken out of it "
            "(what decayed or was overwritten is gone): keep linattn.states.Snapshots and replay from the nearest one."
        )

    def _describe(self, sizes: dict[str, int]) -> list[str]:
        return [f"dim={sizes['D']}", f"value_dim={sizes['M']}"]


def apply_transition(S: Tensor, transition: Tensor) -> Tensor:
    """S (..., heads, dim, value_dim) after a transition (..., heads), (..., heads, dim) or (..., heads, dim, dim)."""
    lead = S.dim() - 2
    shapes = [tuple(S.shape[:lead]), tuple(S.shape[: lead + 1]), (*S.shape[: lead + 1], S.shape[lead])]
    if tuple(transition.shape) not in shapes:
        raise ValueError(
            f"a transition of S {tuple(S.shape)} must be {shapes[0]}, {shapes[1]} or {shapes[2]}, "
            f"got {tuple(transition.shape)}."
        )
    if transition.dim() == lead + 2:
        return transition @ S
    return S * (transition[..., None, None] if transition.dim() == lead else transition.unsqueeze(-1))


torch.serialization.add_safe_globals([RecurrentState])  # torch.load(weights_only=True) takes them
