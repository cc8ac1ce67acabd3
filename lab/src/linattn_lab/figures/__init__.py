"""Published figures: each with its interval and seeds, kept as JSON, printed in the docs and rerun by one command."""

from .figure import Figure, add_figures, over_seeds, save_figures

__all__ = ["Figure", "add_figures", "over_seeds", "save_figures"]
