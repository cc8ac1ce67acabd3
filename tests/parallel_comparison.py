"""One call over shards against the same call on one process: rows, states and gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from linattn.parallel.groups import Members
from linattn.states import State

LENGTHS = {2: ([13, 8], [0, 9]), 3: ([5, 0, 17], [6, 7, 8]), 4: ([5, 2, 1, 20], [0, 3, 0, 9])}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def floats(state: State) -> list[Tensor]:
    """What a state stands for, comparable between states with other scales."""
    tensors = state.tensors()
    if "log_scale" not in tensors:
        return [x for x in tensors.values() if x.is_floating_point()]
    scale = tensors["log_scale"].masked_fill(tensors["tokens"] == 0, 0).exp()
    return [tensors["S"] * scale[..., None, None], tensors["Z"] * scale[..., None]]


def leaves(state: State | None) -> State | None:
    if state is None:
        return None
    return state.map(lambda _, x: x.detach().clone().requires_grad_() if x.is_floating_point() else x)


class Comparison:
    """One call on one process and over shards: rows, states and gradients of all inputs.

    tensors: differentiable inputs. dims: the dimension of the tokens of each, None for weights that all processes share.
    """

    def __init__(self, who: Members, lengths: list[int], tensors: dict[str, Tensor], dims: dict[str, int | None]):
        self.who, self.lengths, self.tensors, self.dims = who, lengths, tensors, dims

    def cut(self, x: Tensor, dim: int | None) -> Tensor:
        return x if dim is None else x.narrow(dim, sum(self.lengths[: self.who.rank]), self.lengths[self.who.rank])

    def check(
        self,
        one: Any,
        several: Any,
        constants: dict[str, Tensor],
        options: dict[str, Any],
        state: State | None,
        rows: int,
    ) -> None:
        """one, several: the function for one process and for shards. rows: the dimension of the tokens in the output."""
        who, dtype = self.who, next(iter(self.tensors.values())).dtype
        whole = {name: x.clone().requires_grad_() for name, x in self.tensors.items()}
        given = leaves(state)
        returned = options.get("return_state", True)
        found = one(**whole, **constants, **options, state=given) if returned else one(**whole, **constants, **options)
        out, last = found if returned else (found, None)
        weight = torch.linspace(-1, 1, out.numel(), dtype=dtype).reshape(out.shape).cos()
        self._loss(out, weight, last, 1).backward()

        own = {name: x.clone().requires_grad_() for name, x in self.tensors.items()}
        parts = {name: self.cut(x, self.dims[name]) for name, x in own.items()}
        masks = {name: self.cut(x, -1) for name, x in constants.items()}
        again = leaves(state)
        kept = {"state": again} if returned else {}
        found = several(**parts, **masks, **options, **kept, group=who.group)
        mine, final = found if returned else (found, None)
        self._loss(mine, self.cut(weight, rows), final, who.size).backward()

        self.close(mine, self.cut(out, rows), "rows")
        if last is not None:
            assert type(last) is type(final)
            assert last.kernel == final.kernel
            for name in ("tokens", "guarded"):
                if name in last.tensors():
                    assert torch.equal(getattr(last, name), getattr(final, name)), name
            for x, y in zip(floats(final), floats(last), strict=True):
                self.close(x, y, "state")
        for name, x in own.items():
            grad = torch.zeros_like(x) if x.grad is None else x.grad
            if self.dims[name] is None:
                dist.all_reduce(grad, group=who.group)
            self.close(
                self.cut(grad, self.dims[name]), self.cut(whole[name].grad, self.dims[name]), f"gradient of {name}"
            )
        if given is not None:
            for x, y in zip(given.tensors().values(), again.tensors().values(), strict=True):
                if x.is_floating_point() and x.grad is not None:
                    grad = torch.zeros_like(y) if y.grad is None else y.grad.clone()
                    dist.all_reduce(grad, group=who.group)
                    self.close(grad, x.grad, "gradient of the state")

    def _loss(self, out: Tensor, weight: Tensor, state: State | None, share: int) -> Tensor:
        total = (out * weight).sum()
        if state is not None:
            total = total + sum(x.sin().sum() for x in floats(state)) / share
        return total

    def close(self, x: Tensor, y: Tensor, what: str) -> None:
        limit = TOLERANCE[y.dtype]
        size = max(1.0, float(y.detach().abs().max())) if y.numel() else 1.0
        error = float((x.detach() - y.detach()).abs().max()) / size if y.numel() else 0.0
        assert x.shape == y.shape, (what, x.shape, y.shape)
        assert error <= limit, f"{what}: error {error:.2e} above {limit:g}"


def bounds(tokens: int, packed: bool) -> list[int] | None:
    """Sequences that cross shards, one of them empty."""
    return [0, tokens // 4, tokens // 4, tokens // 2, tokens] if packed else None
