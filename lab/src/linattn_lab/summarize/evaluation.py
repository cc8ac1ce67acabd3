"""What a model and simple rules reach on pairs of one kind."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from ..commandline import table
from .baselines import ORACLE
from .pairs import Pair
from .rouge import MEASURES, bootstrap, rouge_of_each

MODEL = "model"


class Evaluation:
    """Summaries of the same documents by different means, and their ROUGE.

    Args:
        said: the summaries by the name of what wrote them, MODEL or a rule.
        seed: of the bootstrap.
    """

    def __init__(self, kind: str, pairs: list[Pair], said: dict[str, list[str]], seed: int = 0):
        self.kind, self.pairs, self.said, self.seed = kind, pairs, said, seed

    @cached_property
    def each(self) -> dict[str, np.ndarray]:
        """ROUGE (pairs, MEASURES) by name."""
        references = [pair.summary for pair in self.pairs]
        return {name: rouge_of_each(found, references) for name, found in self.said.items()}

    def means(self, name: str) -> dict[str, float]:
        return dict(zip(MEASURES, self.each[name].mean(0).tolist(), strict=True))

    def intervals(self, name: str) -> dict[str, dict[str, float]]:
        """By measure: value, low and high. Empty for a name that said nothing."""
        if name not in self.said:
            return {}
        low, high = bootstrap(self.each[name], self.seed)
        return {
            measure: {"value": round(value, 2), "low": round(float(low[i]), 2), "high": round(float(high[i]), 2)}
            for i, (measure, value) in enumerate(self.means(name).items())
        }

    def names(self) -> list[str]:
        """Rules from the lowest ROUGE-1 to the highest, then the oracle, then the model."""
        return sorted(self.said, key=lambda name: (name == MODEL, name == ORACLE, self.means(name)["rouge1"]))

    def table(self) -> str:
        rows = [["", "ROUGE-1", "95 %", "ROUGE-2", "ROUGE-L"]]
        for name in self.names():
            found = self.intervals(name)
            first, second, last = (f"{found[measure]['value']:.2f}" for measure in MEASURES)
            rows.append([name, first, f"{found['rouge1']['low']:.1f}..{found['rouge1']['high']:.1f}", second, last])
        return table(rows, " rrrr")

    def figures(self) -> dict[str, Any]:
        """For machines: of the model by measure, of the rules by name."""
        own = self.means(MODEL) if MODEL in self.said else {}
        rules = {name: self.means(name) for name in self.names() if name != MODEL}
        return {**own, "pairs": len(self.pairs), "baselines": rules}

    def rows(self) -> Iterator[dict[str, str]]:
        """Each document with everything that was said of it."""
        for i, pair in enumerate(self.pairs):
            found = {"document": pair.document, "summary": pair.summary} | ({"kind": self.kind} if self.kind else {})
            yield found | {name: lines[i] for name, lines in self.said.items()}
