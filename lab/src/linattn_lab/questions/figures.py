"""What the docs print of the answers: theory beside the mean over seeds."""

from ..figures import Figure, over_seeds
from .answer import Answer, Number

# Measured with a clock: these differ from machine to machine and with its load, so the docs do not print them.
TIMED = {"time_in_N", "time_in_D", "time_in_M", "exponent_sums", "exponent_mask", "step"}


def figures_of(answers: dict[int, list[Answer]]) -> dict[str, Figure]:
    """Figures of the answers to the same questions by seed.

    What no seed changes has no interval; of errors, where theory says 0, the largest is taken, and its interval goes to the
    tolerance of the finding. Findings that are lists are left out.
    """
    seeds = tuple(answers)
    found: dict[str, Figure] = {}
    for number, answer in enumerate(answers[seeds[0]]):
        for place, finding in enumerate(answer.findings):
            predicted = finding.predicted
            if finding.key in TIMED or isinstance(predicted, list):
                continue
            if "|" in finding.statement:
                raise ValueError(f"a statement has no bar, because docs put it into a table: {finding.statement!r}.")
            row = f"answers|{answer.name}: {finding.statement}"
            measured = [_number(answers[seed][number].findings[place].measured) for seed in seeds]
            theory = [_number(answers[seed][number].findings[place].predicted) for seed in seeds]
            found[f"{row}|theory"] = _mean(theory, seeds)
            if predicted == 0:  # an error, which is rounding or noise: as large as the theory allows
                largest = max(measured)
                found[f"{row}|measured"] = Figure(largest, 0.0, max(largest, finding.tolerance), seeds, ".1g")
            elif len(seeds) == 1:  # nothing is known of other seeds but what the finding allows
                room = finding.tolerance * abs(predicted)
                low, high = min(measured[0], predicted - room), max(measured[0], predicted + room)
                found[f"{row}|measured"] = Figure(measured[0], low, high, seeds)
            else:
                found[f"{row}|measured"] = _mean(measured, seeds)
    return found


def _mean(values: list[float], seeds: tuple[int, ...]) -> Figure:
    """Over seeds; the value itself where they all agree."""
    if len(set(values)) == 1:
        return Figure(values[0], values[0], values[0], seeds)
    return over_seeds(values, seeds)


def _number(value: Number) -> float:
    assert not isinstance(value, list)
    return float(value)
