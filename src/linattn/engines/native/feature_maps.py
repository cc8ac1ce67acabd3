"""Feature maps as the native code takes them: a kernel's native form with its weights padded to whole vectors."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...kernels.base import Kernel
from ...kernels.native_form import FeatureMap, NativeForm


@dataclass
class NativeMap:
    """What csrc/linear/abi.h takes of a feature map.

    weights: the projection (r, wide(dim)), its transpose (dim, lead(r)) and the bias (lead(r)), or nothing.
    fused: the native code makes the features itself; otherwise torch does.
    """

    form: NativeForm
    weights: tuple[Tensor, ...] = ()
    plans: dict[object, object] = field(default_factory=dict)  # of the fast paths, by shapes: see plans.py

    @property
    def fused(self) -> bool:
        return self.form.feature_map != FeatureMap.GIVEN

    def numbers(self, log_weighted: bool | None = None) -> tuple[list[int], list[float]]:
        """As arguments of an operator. log_weighted: whether keys carry log-weights, by decay if not by the map."""
        form = self.form
        weighted = form.log_weighted if log_weighted is None else log_weighted
        return (
            [int(form.feature_map), form.features, int(weighted)],
            [form.norm_factor, form.log2_constant, form.input_scale, *form.low, *form.high],
        )


def make_map(kernel: Kernel, scale: float | None, dim: int) -> NativeMap:
    form = kernel.native_form(dim, scale)
    if form is None:
        return NativeMap(NativeForm(FeatureMap.GIVEN, kernel.features_for(dim)))
    return NativeMap(form, () if form.projection is None else _padded(form.projection, form.bias))


def _lead(n: int) -> int:
    """As `lead` of csrc/core/load_rows.h."""
    return (n + 15) // 16 * 16 + 16


def _wide(n: int) -> int:
    """As `wide` of csrc/core/load_rows.h."""
    return _lead(n) if n > 64 else (n + 15) // 16 * 16


def _padded(projection: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(r, dim) with rows padded, its transpose likewise, and the bias of each feature: -1e30 where there is no feature.

    With whole vectors of features and no bias the last one is empty, which saves the native code an addition.
    """
    rows, dim = projection.shape
    shapes = (rows, _wide(dim)), (dim, _lead(rows))
    padded, transposed = (torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in shapes)
    padded[:, :dim], transposed[:, :rows] = projection, projection.T
    if rows % 16 == 0 and bias is None:
        return padded, transposed, padded.new_empty(0)
    wide_bias = padded.new_full((_lead(rows),), -1e30)
    wide_bias[:rows] = 0 if bias is None else bias
    return padded, transposed, wide_bias
