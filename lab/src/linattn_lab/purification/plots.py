"""Plots of clean, noisy and purified images, and of the gain against lambda and rank."""

from pathlib import Path

from matplotlib.figure import Figure

from ..plotting import new_figure, save_figure
from .denoise import Result


def draw(results: list[Result], path: Path) -> None:
    """One column of rows of images for each data set, and its two sweeps beneath."""
    save_figure(make_figure(results), path, dpi=130)


def make_figure(results: list[Result]) -> Figure:
    figure = new_figure(9 * len(results), 9)
    columns = figure.subfigures(1, len(results), squeeze=False, wspace=0.03)[0]
    for column, result in zip(columns, results, strict=True):
        top, bottom = column.subfigures(2, 1, height_ratios=[2.1, 1])
        count = len(result.examples["clean"])
        axes = top.subplots(len(result.examples), count, squeeze=False)
        gains = {"purified": result.gain["purifier"], "PCA": result.gain["pca"]}
        for row, (name, pictures) in enumerate(result.examples.items()):
            for axis, picture in zip(axes[row], pictures, strict=True):
                axis.imshow(picture, cmap="gray", vmin=0, vmax=1)
                axis.set(xticks=[], yticks=[])
            label = f"{name}\n{result.noisy_psnr:.1f} dB" if name == "noisy" else name
            label = f"{name}\n{gains[name]:+.2f} dB" if name in gains else label
            axes[row, 0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=12)
        top.suptitle(f"{result.name}, noise of {result.sigma:g}", fontsize=15)
        left, right = bottom.subplots(1, 2, sharey=True)
        left.semilogx(result.lambda_sweep.settings, result.lambda_sweep.gains, "o-", color="C0", ms=4)
        left.axvline(result.wiener, color="C1", ls="--", label="theory: n sigma^2")
        left.set(xlabel="lambda", ylabel="gain in dB, held out", title="purifier")
        left.legend(loc="lower center")
        right.semilogx(result.rank_sweep.settings, result.rank_sweep.gains, "o-", color="C2", ms=4)
        right.axhline(max(result.lambda_sweep.gains), color="C0", ls=":", label="best purifier")
        right.set(xlabel="rank", title="truncated PCA")
        right.legend(loc="lower center")
        best = max(result.lambda_sweep.gains)
        left.set_ylim(-3, best + 1)
        for axis in (left, right):
            axis.grid(alpha=0.3)
    return figure
