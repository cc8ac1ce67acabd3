"""Muon (Jordan et al., 2024) for convolutions, Adam for the rest: fewer steps to the same accuracy.

A convolution's gradient, as a matrix of its filters, is turned into the nearest matrix with equal singular values, so that
every direction is learned at the same speed. Filters keep their norm: a batch norm follows, which would undo its growth.
"""

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

RATE = 10.0  # of convolutions, times the rate of the rest
MOMENTUM = 0.6
BETAS, EPSILON = (0.9, 0.999), 1e-8
COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5  # of the Newton-Schulz iteration, as published


class Muon(Optimizer):
    """Convolutions by orthogonal steps of the group's `lr` times `RATE`; other parameters by AdamW."""

    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.0):
        trained = [p for p in model.parameters() if p.requires_grad]
        filters = [p for p in trained if p.dim() == 4]
        matrices = [p for p in trained if p.dim() in (2, 3)]
        others = [p for p in trained if p.dim() < 2 or p.dim() > 4]
        groups = [
            {"params": filters, "orthogonal": True, "weight_decay": 0.0},
            {"params": matrices, "orthogonal": False, "weight_decay": weight_decay},
            {"params": others, "orthogonal": False, "weight_decay": 0.0},
        ]
        super().__init__([group for group in groups if group["params"]], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step by the gradients that the parameters have."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if group["orthogonal"]:
                    self._orthogonal(parameter, group["lr"] * RATE)
                else:
                    self._adam(parameter, group["lr"], group["weight_decay"])

    def _orthogonal(self, parameter: Tensor, rate: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].mul_(MOMENTUM).add_(parameter.grad)
        ahead = parameter.grad.add(momentum, alpha=MOMENTUM)  # type: ignore[union-attr]
        parameter.mul_(math.sqrt(len(parameter)) / parameter.norm().clamp_min(1e-7))
        parameter.sub_(orthogonal(ahead.reshape(len(parameter), -1)).view_as(parameter), alpha=rate)

    def _adam(self, parameter: Tensor, rate: float, decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        count, gradient = float(state["step"]), parameter.grad
        assert gradient is not None
        state["mean"].lerp_(gradient, 1 - BETAS[0])
        state["square"].mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        mean = state["mean"] / (1 - BETAS[0] ** count)
        spread = (state["square"] / (1 - BETAS[1] ** count)).sqrt_().add_(EPSILON)
        parameter.mul_(1 - rate * decay).addcdiv_(mean, spread, value=-rate)


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with all singular values brought near 1, by a Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    x = matrix / matrix.norm().clamp_min(1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x
