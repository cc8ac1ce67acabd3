"""What the docs print: peak signal to noise and the gain of each filter, over seeds."""

from ..figures import Figure, over_seeds
from .denoise import Result

# Of one seed nothing is known of others. With the same seed only rounding differs: half a dB more or less would be a fault.
ROOM = 0.5


def figures_of(results: dict[int, dict[str, Result]]) -> dict[str, Figure]:
    """Figures of the results by seed and data; a seed draws other images, other people and other noise."""
    seeds = tuple(results)
    found: dict[str, Figure] = {}
    for name, first in results[seeds[0]].items():
        every = [results[seed][name] for seed in seeds]
        for suffix, fitted in (("", "clean"), (", noisy", "noisy")):
            row = f"gain|{first.name}, fitted to {first.train} {fitted}"
            found[f"{row}|noisy, dB"] = _over([one.noisy_psnr for one in every], seeds, ".2f")
            for method, column in (("purifier", "purifier, dB"), ("pca", "truncated PCA, dB")):
                gains = [one.gain[f"{method}{suffix}"] for one in every]
                found[f"{row}|{column}"] = _over(gains, seeds, "+.2f")
    return found


def _over(values: list[float], seeds: tuple[int, ...], form: str) -> Figure:
    if len(values) == 1:
        return Figure(values[0], values[0] - ROOM, values[0] + ROOM, seeds, form)
    return over_seeds(values, seeds, form)
