"""States handed from process to process, each when it is ready; backward hands their gradients back.

While one process works on the first group of heads, the others wait; from then on all work, each on another group.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .groups import Members
from .messages import Tensors, count, failed, pack, receive, send, unpack


def take_over(like: Tensors, who: Members) -> Tensors:
    """The tensors that the process before this one hands on."""
    found, differentiable = receive(like, who.rank - 1, who, kind="forward")
    if not (differentiable and torch.is_grad_enabled()):
        return found
    anchor = torch.zeros((), requires_grad=True)
    floats = [name for name, x in found.items() if x.is_floating_point()]
    taken = _TakeOver.apply(who, floats, anchor, *(found[name] for name in floats))
    return {**found, **dict(zip(floats, taken, strict=True))}


class _TakeOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, who: Members, names: list[str], _anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.who, ctx.names = who, names
        return tuple(x.clone() for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        send({name: x.contiguous() for name, x in zip(ctx.names, grads, strict=True)}, ctx.who.rank - 1, ctx.who)
        return None, None, None, *(None for _ in grads)


def hand_on(tensors: Tensors, who: Members) -> Tensor | None:
    """Sends the tensors to the next process. Returns a tensor to `tie` to the output: backward waits for their gradients."""
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    send(tensors, who.rank + 1, who, flag=differentiable)
    if not differentiable:
        return None
    floats = {name: x for name, x in tensors.items() if x.is_floating_point()}
    token: Tensor = _HandOn.apply(who, list(floats), *floats.values())
    return token


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, who: Members, names: list[str], *tensors: Tensor) -> Tensor:
        ctx.who = who
        ctx.like = {name: torch.empty_like(x, device="meta") for name, x in zip(names, tensors, strict=True)}
        ctx.device = tensors[0].device
        return tensors[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _grad: Tensor) -> Any:
        like = {name: torch.empty(x.shape, dtype=x.dtype, device=ctx.device) for name, x in ctx.like.items()}
        found, _ = receive(like, ctx.who.rank + 1, ctx.who, kind="backward")
        return None, None, *found.values()


def spread(tensors: Tensors, who: Members) -> tuple[Tensors, Tensor | None]:
    """The tensors of the last process, on all of them, and a tensor to `tie` to the output. Others pass any of that shape."""
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    buffer = pack(tensors, wanted, who)
    count("forward", 0 if who.last else buffer.numel())
    try:
        dist.broadcast(buffer, who.ranks[-1], group=who.group)
    except RuntimeError as error:
        raise failed(who, error) from error
    found, differentiable = unpack(buffer, tensors, who)
    if not (differentiable and torch.is_grad_enabled()):
        return found, None
    anchor = torch.zeros((), requires_grad=True)
    floats = [name for name, x in found.items() if x.is_floating_point()]
    *made, token = _Spread.apply(who, anchor, [found[name] for name in floats], *(tensors[name] for name in floats))
    return {**found, **dict(zip(floats, made, strict=True))}, token


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, who: Members, anchor: Tensor, found: list[Tensor], *_own: Tensor) -> Any:
        ctx.who = who
        return (*(x.clone() for x in found), anchor.new_zeros(()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        summed = [x.contiguous().clone() for x in grads[:-1]]
        for x in summed:
            count("backward", x.numel() * x.element_size())
            try:
                dist.all_reduce(x, group=ctx.who.group)
            except RuntimeError as error:
                raise failed(ctx.who, error) from error
        return None, None, None, *(x if ctx.who.last else None for x in summed)
