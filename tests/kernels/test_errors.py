"""What kernels refuse. The table is what a user reads."""

import pytest
import torch

from conftest import DIM
from linattn import kernels

TABLE = {
    "softmax has no features": (
        lambda: kernels.Softmax().query_features(torch.ones(2, DIM)),
        ValueError, "softmax has no finite feature map: it is computed in O(N^2), without features.",
    ),
    "features must be positive": (
        lambda: kernels.Positive(8, 0),
        ValueError, "Positive: features must be at least 1, got 0.",
    ),
    "pairs": (
        lambda: kernels.Positive(8, 7, hyperbolic=True),
        ValueError, "Positive: hyperbolic features come in pairs, so features must be even, got 7.",
    ),
    "negative offset": (
        lambda: kernels.Polynomial(2, -1.0),
        ValueError, "Polynomial: offset must not be negative (no real features exist), got -1.0.",
    ),
    "order": (
        lambda: kernels.Taylor(4),
        ValueError, "Taylor: order must be 1, 2 or 3, got 4.",
    ),
    "dim": (
        lambda: kernels.Elu(0),
        ValueError, "Elu: dim must be at least 1, got 0.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_the_message_a_user_gets(case):
    action, kind, message = TABLE[case]
    with pytest.raises(kind) as caught:
        action()
    assert str(caught.value) == message
