"""What the notebooks share: checks of exercises, and one look for their plots."""

import os

import matplotlib
import matplotlib.pyplot as plt
import torch

LONGEST = int(os.environ.get("COURSE_STEPS", 0))  # of a training, in steps, where only the cells are tested

torch.set_num_threads(1)  # times are processor times of one thread
plt.rcParams.update(
    {"figure.figsize": (7, 3), "figure.dpi": 72, "axes.grid": True, "grid.alpha": 0.3, "image.cmap": "cividis"}
)
plt.rcParams["axes.prop_cycle"] = matplotlib.cycler(
    color=["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1"]
)


def shorter(steps: int, tested: int = 90) -> int:
    """The steps of a training; `tested` of them, or as few as COURSE_STEPS says, where that is set."""
    return min(steps, tested, LONGEST) if LONGEST else steps


class Unsolved(AssertionError):
    """An exercise that is not solved yet."""


def check(right: object, hint: str) -> None:
    """Passes if the exercise is solved; otherwise says what to look at."""
    if not bool(right):
        raise Unsolved(hint)
    print("solved")


def log_ticks(axis: plt.Axes, ticks: list[int] | list[float]) -> None:
    """Ticks of a logarithmic x axis at these numbers alone: matplotlib's own run into each other within two decades."""
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def show(figure: object, dpi: int = 45) -> None:
    """Displays a matplotlib figure that was made without pyplot."""
    import io

    from IPython.display import Image, display

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    display(Image(buffer.getvalue()))
