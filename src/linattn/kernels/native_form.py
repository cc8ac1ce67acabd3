"""The description of a feature map for the native engine."""

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class FeatureMap(IntEnum):
    """The feature maps that csrc/linear/feature_maps.h computes, by their numbers there."""

    EXP = 0  # exp of a projection, times a log-weight by the norm
    TRIG = 1  # sines and cosines of a projection, likewise
    GIVEN = 2  # the tokens are features already
    ELU = 3
    RELU = 4
    QUADRATIC = 5  # 1, x_i, x_i^2 and x_i x_j, each with a factor


@dataclass(frozen=True)
class NativeForm:
    """One feature map with its parameters.

    Attributes:
        feature_map: the formula.
        features: per token.
        log_weighted: keys carry log-weights, of log2-size norm_factor |x|^2 + log2_constant.
        input_scale: multiplies the tokens (maps without a projection).
        low, high: QUADRATIC's factors of 1 and x_i, and of x_i^2 and x_i x_j.
        projection: (features or frequencies, dim) float64; EXP in units of log2.
        bias: (features,) float64, added to EXP's exponents, in units of log2.
        prepared: `Kernel.native_inputs` changes the tokens first, in torch.
    """

    feature_map: FeatureMap
    features: int
    log_weighted: bool = False
    norm_factor: float = 0.0
    log2_constant: float = 0.0
    input_scale: float = 1.0
    low: tuple[float, float] = (0.0, 0.0)
    high: tuple[float, float] = (0.0, 0.0)
    projection: Tensor | None = None
    bias: Tensor | None = None
    prepared: bool = False
