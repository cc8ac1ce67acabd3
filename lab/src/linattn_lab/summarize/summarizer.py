"""A trained model with its vocabulary: documents in, one line each out."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn._files import parsing

from ..training.tensor_files import VERSION, read_tensors, write_tensors
from . import decoding as decode
from .decoding import BEAM, LENGTH_PENALTY, MAX_TOKENS
from .kinds import marked
from .model import START, ModelConfig, Seq2Seq, padded
from .tokenizer import Tokens

SHIPPED = Path(__file__).parent / "weights" / "default.safetensors"
BATCH_TOKENS = 2**15  # documents read together, padding included


@dataclass
class Explanation:
    """What the model looked at while it wrote.

    Attributes:
        summary: the text; output: its tokens, as text.
        source: where each token of the document stands in it: (first character, last + 1).
        attention: (outputs, source tokens), the pointer's weights; copy: (outputs,), the share that is copied.
    """

    summary: str
    output: list[str]
    source: list[tuple[int, int]]
    attention: Tensor
    copy: Tensor


class Summarizer:
    """A model, its vocabulary, and facts about its training."""

    def __init__(self, model: Seq2Seq, tokens: Tokens, facts: dict[str, Any]):
        self.model, self.tokens, self.facts = model, tokens, facts

    @classmethod
    def load(cls, path: Path | None = None, kernel: str | None = None) -> "Summarizer":
        """From a file that `save` wrote or a folder of `train`; by default the one that comes with the package.

        kernel: another than it was trained with, on the same weights.
        """
        path = SHIPPED if path is None else path / "model.safetensors" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"{path} is not there: train a model with `linattn lab summarize train`.")
        tensors, metadata = read_tensors(path)
        if "tokens" not in metadata:
            raise ValueError(f"{path} holds no vocabulary: give the model.safetensors that `train` writes at its end.")
        with parsing(path):
            facts = json.loads(metadata["facts"])
            config = ModelConfig(**facts["model"])
        if kernel is not None and kernel != config.kernel:
            config = dataclasses.replace(config, kernel=kernel)
            tensors = {name: x for name, x in tensors.items() if ".kernel." not in name}
        model = Seq2Seq(config)
        with parsing(path):
            model.load_state_dict({name: x.float() for name, x in tensors.items()})
        return cls(model.eval(), Tokens.from_json(metadata["tokens"]), facts)

    def save(self, path: Path) -> None:
        """One file: weights in half precision, configuration and vocabulary."""
        metadata = {"version": VERSION, "facts": json.dumps(self.facts), "tokens": self.tokens.to_json()}
        write_tensors(path, {name: x.half() for name, x in self.model.state_dict().items()}, metadata)

    def marked(self, document: str, kind: str) -> str:
        """A document as this model reads it: with the mark of its kind, if it has learned from that kind."""
        return marked(document, kind) if kind in self.facts.get("kinds", []) else document

    def summarize(
        self,
        documents: Sequence[str],
        *,
        beam: int = BEAM,
        max_tokens: int = MAX_TOKENS,
        length_penalty: float = LENGTH_PENALTY,
        pick: decode.Pick | None = None,
        batch_size: int = 32,
        progress: Callable[[Iterable[Any]], Iterable[Any]] | None = None,
    ) -> list[str]:
        """A line for each document. `beam` 1 is greedy; `pick`, such as decode.by_chance(0.7), is used instead of beams."""
        sources = self.tokens.encode_many(documents)
        if not all(sources):
            raise ValueError(f"document {[bool(s) for s in sources].index(False)} is empty.")
        found = [""] * len(documents)
        groups = list(_groups([len(source) for source in sources], batch_size))
        for group in groups if progress is None else progress(groups):
            rows = self._write(padded([sources[i] for i in group]), beam, max_tokens, length_penalty, pick)
            for i, row in zip(group, rows, strict=True):
                found[i] = self.tokens.decode(row)
        return found

    @torch.no_grad()
    def explain(
        self,
        document: str,
        *,
        beam: int = BEAM,
        max_tokens: int = MAX_TOKENS,
        length_penalty: float = LENGTH_PENALTY,
        pick: decode.Pick | None = None,
    ) -> Explanation:
        """A summary, and where the pointer was for each of its tokens."""
        numbers, spans = self.tokens.offsets(document)
        if not numbers:
            raise ValueError("the document is empty.")
        source = padded([numbers])
        row = self._write(source, beam, max_tokens, length_penalty, pick)[0]
        writing, steps = self.model.start(self.model.encode(source)), []
        for token in [START, *row[:-1]]:
            said, writing = self.model.step(torch.tensor([token]), writing)
            steps.append(said)
        return Explanation(
            self.tokens.decode(row),
            [self.tokens.decode([token]) for token in row],
            spans,
            torch.cat([said.weights for said in steps]),
            torch.cat([said.copy for said in steps]),
        )

    def _write(
        self, source: Tensor, beam: int, max_tokens: int, length_penalty: float, pick: decode.Pick | None
    ) -> list[list[int]]:
        if beam < 1 or max_tokens < 1:
            raise ValueError(f"beam and max_tokens must be at least 1, got {beam} and {max_tokens}.")
        if pick is not None or beam == 1:
            return decode.write(self.model, source, max_tokens, pick or decode.likeliest)
        return decode.beam_search(self.model, source, beam, max_tokens, length_penalty)


def _groups(lengths: list[int], batch_size: int) -> Iterable[list[int]]:
    """Documents of like length together, as many as a batch may hold."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if group and (len(group) == batch_size or (len(group) + 1) * lengths[i] > BATCH_TOKENS):
            yield group
            group = []
        group.append(i)
    if group:
        yield group
