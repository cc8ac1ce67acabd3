"""Text to numbers and back: byte-level BPE, so that every text can be written and none is unknown."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from linattn._files import write_text

SPECIALS = ("<pad>", "<start>", "<end>")


class Tokens:
    """A vocabulary of byte pairs; the numbers 0, 1 and 2 pad, start and end a text."""

    pad, start, end = range(3)

    def __init__(self, tokenizer: Tokenizer):
        found = tuple(tokenizer.id_to_token(i) for i in range(len(SPECIALS)))
        if found != SPECIALS:
            raise ValueError(f"a vocabulary must begin with {SPECIALS}, got {found}.")
        tokenizer.encode_special_tokens = True  # a text that holds "<end>" does not end there
        self.tokenizer = tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], size: int = 8192) -> "Tokens":
        """Learns at most `size` tokens, the 256 bytes and the three specials included. The same texts give the same."""
        if size < 256 + len(SPECIALS):
            raise ValueError(f"a vocabulary holds the 256 bytes and {len(SPECIALS)} specials at least, got {size}.")
        tokenizer = Tokenizer(models.BPE())
        # A word that begins a line is then the same token as within a line: it can be copied from either.
        tokenizer.normalizer = normalizers.Replace("\n", "\n ")
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @property
    def size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Without start and end."""
        return self.offsets(text)[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(found.ids) for found in self.tokenizer.encode_batch_fast(list(texts))]

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The numbers of a text, and the characters (from, to) that each stands for."""
        found = self.tokenizer.encode(text)
        return list(found.ids), [(int(a), int(b)) for a, b in found.offsets]

    def decode(self, numbers: Iterable[int]) -> str:
        """The text, without specials and without blanks around it."""
        text = self.tokenizer.decode([i for i in numbers if i >= len(SPECIALS)])
        return str(text).replace("\n ", "\n").strip()

    def to_json(self) -> str:
        return str(self.tokenizer.to_str())

    @classmethod
    def from_json(cls, text: str) -> "Tokens":
        return cls(Tokenizer.from_str(text))

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(json.loads(self.to_json()), ensure_ascii=False, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Tokens":
        return cls.from_json(path.read_text(encoding="utf-8"))
