"""Tokens to text as they come: whole characters only, and nothing of a stop text."""

from collections.abc import Sequence
from typing import Any


class TextStream:
    """The text of an answer, piece by piece.

    A piece is held back while it may be the beginning of a stop text or half a character.

    Args:
        tokenizer: of transformers.
        stop: texts that end the answer.
        before: the last tokens of a text that the answer goes on with. Some tokenizers leave out the space at the
            beginning of what they decode; behind other tokens it is there.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = (), before: Sequence[int] = ()):
        self._tokenizer, self._stop = tokenizer, [text for text in stop if text]
        self._ids = list(before)
        if self._decode(self._ids).endswith("\ufffd"):  # half a character
            self._ids = []
        # Of the tokens that are decoded again each time, and of the new ones among them.
        self._start, self._read = 0, len(self._ids)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that can be shown after one more token; `stopped` says whether a stop text has ended it."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._take(now[len(before) :])

    def flush(self) -> str:
        """What is still held back when the answer ends otherwise."""
        before = self._decode(self._ids[self._start : self._read])
        rest = self._decode(self._ids[self._start :])[len(before) :]
        self._start = self._read = len(self._ids)
        text = self._take(rest)
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _take(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many last characters of the text are the first of the stop text."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
