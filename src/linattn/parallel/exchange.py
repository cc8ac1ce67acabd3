"""Exchanges that autograd can differentiate: a gather of summaries, folded in the order of the shards.

Backward is the same in the other direction: the gradients of what every process took out of the fold are gathered, and each
process differentiates the fold by its own summary. All of it has the size of a state, whatever the number of tokens.
Two nodes of autograd's graph stand for an exchange, so that backward overlaps it with other work as well: the node of `finish`
starts the gather, and the node of the start, which autograd runs after all that came later, waits for it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .groups import Members
from .messages import Gathering, Tensors

# The summaries of all processes -> for each process in order what it needs (None: nothing), then one result for all of them.
Fold = Callable[[Sequence[Tensors]], Iterator[Tensors | None]]


class Exchange:
    """Summaries on their way: started at once, `finish` waits for those of the others.

    own: the summary of this process. like: names, shapes and dtypes of what the fold gives. single: whether it gives each
    process a result of its own. shared: whether it gives one to all.
    """

    def __init__(
        self, own: Tensors, like: Tensors, fold: Fold, who: Members, *, single: bool = True, shared: bool = False
    ):
        self.like, self.fold, self.who, self.single, self.shared = like, fold, who, single, shared
        self.floats = [name for name, x in like.items() if x.is_floating_point()]
        self.summaries: list[Tensors] = []
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in own.values())
        self.started: Tensor | None = None
        self.gradients: Gathering | None = None
        if torch.is_grad_enabled():  # backward passes run on all processes or on none, so the anchor requires grad
            self.started = _Start.apply(self, torch.zeros((), requires_grad=True), *own.values())
        self.gathering = Gathering(own, who, flag=wanted, kind="forward")

    def finish(self) -> tuple[Tensors, Tensors, Tensor | None]:
        """What this process needs (zeros if nothing), what all need, and a tensor to `tie` to the output."""
        summaries, differentiable = self.gathering.wait()
        if not differentiable or self.started is None:
            self.started = None
            mine, common = _take(self.fold(summaries), self.who.rank, self.shared)
            return _filled(mine, self.like), _filled(common, self.like), None
        self.summaries = summaries
        *results, token = _Fold.apply(self, self.started)
        self.started = None  # the graph holds it
        mine = dict(zip(self.like, results, strict=False)) if self.single else {}
        return mine, dict(zip(self.like, results[len(mine) :], strict=False)), token


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Exchange, anchor: Tensor, *own: Tensor) -> Tensor:
        ctx.call = call
        return anchor.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _grad: Tensor) -> Any:
        call: Exchange = ctx.call
        assert call.gradients is not None
        received, _ = call.gradients.wait()
        call.gradients = None
        return None, None, *_own_gradients(call, received)


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Exchange, _started: Tensor) -> Any:
        mine, common = _take(call.fold(call.summaries), call.who.rank, call.shared)
        outputs = [*_filled(mine, call.like).values()] if call.single else []
        outputs += _filled(common, call.like).values() if call.shared else []
        ctx.call = call
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return (*outputs, torch.zeros(()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call: Exchange = ctx.call
        order, kinds = list(call.like), [""] * call.single + ["shared "] * call.shared
        given = {
            kind + name: grads[i * len(order) + order.index(name)].contiguous()
            for i, kind in enumerate(kinds)
            for name in call.floats
        }
        call.gradients = Gathering(given, call.who, flag=False, kind="backward")
        return None, torch.zeros(())


def _own_gradients(call: Exchange, received: list[Tensors]) -> list[Tensor | None]:
    """Of this process's summary, from the gradients of what every process took out of the fold."""
    summaries = call.summaries
    own = {name: x.detach().clone() for name, x in summaries[call.who.rank].items()}
    leaves = {name: x.requires_grad_() for name, x in own.items() if x.is_floating_point()}
    with torch.enable_grad():
        folded = call.fold([own if j == call.who.rank else x for j, x in enumerate(summaries)])
        terms = []
        for j, result in enumerate(folded):
            if result is None or (j == call.who.size and not call.shared):
                continue
            for name in call.floats:
                if not result[name].requires_grad:
                    continue
                if j < call.who.size:
                    terms.append((result[name] * received[j][name]).sum())
                else:
                    terms.append((result[name] * sum(x[f"shared {name}"] for x in received)).sum())
        if not terms:
            return [torch.zeros_like(x) if name in leaves else None for name, x in own.items()]
        found = torch.autograd.grad(
            torch.stack([x.double() for x in terms]).sum(), list(leaves.values()), allow_unused=True
        )
    by_name = dict(zip(leaves, found, strict=True))
    return [
        None if name not in leaves else torch.zeros_like(x) if by_name[name] is None else by_name[name]
        for name, x in own.items()
    ]


def _take(folded: Iterator[Tensors | None], rank: int, shared: bool) -> tuple[Tensors | None, Tensors | None]:
    """The results of a rank and of all, without computing what neither needs."""
    mine = result = None
    for j, result in enumerate(folded):
        if j == rank:
            mine = result
            if not shared:
                return mine, None
    return mine, result


def _filled(found: Tensors | None, like: Tensors) -> Tensors:
    if found is None:
        return {name: torch.zeros_like(x) for name, x in like.items()}
    return {name: found[name].contiguous() for name in like}


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *tokens: Tensor) -> Tensor:
        ctx.tokens = len(tokens)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *(grad.new_zeros(()) for _ in range(ctx.tokens))


def tie(x: Tensor, *tokens: Tensor | None) -> Tensor:
    """x, whose backward pass also runs the exchanges that gave the tokens, even where their results were not used."""
    present = [token for token in tokens if token is not None]
    return _Tie.apply(x, *present) if present else x


def connected(x: Tensor, *inputs: Tensor | None) -> Tensor:
    """x; if it is empty, its backward pass reaches all inputs, so that no parameter of a model is left without a gradient."""
    if x.numel() or not torch.is_grad_enabled():
        return x
    return tie(x, *(y.sum() for y in inputs if y is not None and y.requires_grad))
