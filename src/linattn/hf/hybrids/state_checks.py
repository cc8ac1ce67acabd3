"""Checks of what a cache holds, before native code reads and writes it."""

from torch import Tensor


def check_state(state: Tensor, *sizes: int) -> None:
    """Raises a ValueError unless these are the first sizes of the state: native code would leave its memory."""
    if tuple(state.shape[: len(sizes)]) != sizes:
        raise ValueError(
            f"the cache holds a state of shape {tuple(state.shape)}, and this call needs {sizes}"
            f"{', ..' if state.dim() > len(sizes) else ''}: the cache was made for another batch or another model."
        )
