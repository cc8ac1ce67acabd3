"""Single tokens as text and as bytes: a token may be only a part of a character."""

import codecs
import re
from typing import Any

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece writes a byte


def _byte_level() -> dict[str, int]:
    """The byte behind each character of GPT-2's alphabet, in which byte-level tokenizers write their tokens."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_level()


class TokenTexts:
    """What a tokenizer's tokens say, one by one."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Bytes that are no whole character are shown as U+FFFD."""
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def bytes(self, token: int) -> bytes | None:
        """Its bytes in UTF-8, also of a part of a character; None if the tokenizer does not tell them."""
        text = self.text(token)
        if "\ufffd" not in text:
            return text.encode()
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if found := _FALLBACK.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return bytes(_BYTES[c] for c in piece) if all(c in _BYTES for c in piece) else None

    def name(self, token: int) -> str:
        """Its text, or "bytes:\\xe6\\xbc" of a part of a character, so that different tokens have different names."""
        text = self.text(token)
        raw = self.bytes(token) if "\ufffd" in text else None
        return text if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Offsets:
    """Where each token begins in the text of an answer, counted in whole characters."""

    def __init__(self, texts: TokenTexts):
        self._texts, self._decoder, self._length = texts, codecs.getincrementaldecoder("utf-8")("replace"), 0

    def next(self, token: int) -> int:
        """The place of one more token."""
        start, raw = self._length, self._texts.bytes(token)
        self._length += len(self._texts.text(token) if raw is None else self._decoder.decode(raw))
        return start
