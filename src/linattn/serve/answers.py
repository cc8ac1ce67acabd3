"""Answers in OpenAI's form, whole and in chunks."""

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Protocol

from .jobs import Delta
from .sampling import Choice
from .token_texts import Offsets, TokenTexts


@dataclass
class Usage:
    """Tokens of a request."""

    prompt: int
    cached: int = 0
    written: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.written,
            "total_tokens": self.prompt + self.written,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Form(Protocol):
    """How one kind of answer is written."""

    def add(self, delta: Delta) -> None: ...
    def whole(self, answers: int, usage: Usage) -> dict[str, Any]: ...
    def opening(self, answers: int) -> list[dict[str, Any]]: ...
    def chunk(self, delta: Delta) -> dict[str, Any]: ...
    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...


class _Base:
    """What both forms share: the collected pieces of each answer."""

    object = ""

    def __init__(self, name: str, model: str, tokenizer: Any):
        self._head = {"id": name, "created": int(time.time()), "model": model}
        self._tokens = TokenTexts(tokenizer)
        self._texts: dict[int, list[str]] = defaultdict(list)
        self._choices: dict[int, list[Choice]] = defaultdict(list)
        self._finish: dict[int, str | None] = {}
        self._offsets: dict[int, Offsets] = defaultdict(lambda: Offsets(self._tokens))

    def add(self, delta: Delta) -> None:
        """Collects a piece for `whole`."""
        self._texts[delta.index].append(delta.text)
        self._choices[delta.index] += delta.choices
        self._finish[delta.index] = delta.finish

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk, for stream_options.include_usage."""
        return self._object([], chunk=True) | {"usage": usage.body()}

    def _object(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.object + (".chunk" if chunk and "chat" in self.object else ""),
            "choices": choices,
        }


class ChatForm(_Base):
    """chat.completion and chat.completion.chunk."""

    object = "chat.completion"

    def whole(self, answers: int, usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": "".join(self._texts[i]), "refusal": None},
                "logprobs": self._logprobs(self._choices[i]),
                "finish_reason": self._finish.get(i),
            }
            for i in range(answers)
        ]
        return self._object(choices, chunk=False) | {"usage": usage.body()}

    def opening(self, answers: int) -> list[dict[str, Any]]:
        """A chunk with the role of each answer."""
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(answers)]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._chunk(delta.index, {"content": delta.text}, self._logprobs(list(delta.choices)), delta.finish)

    def _chunk(
        self, index: int, delta: dict[str, str], logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._object([choice], chunk=True)

    def _logprobs(self, choices: list[Choice]) -> dict[str, Any] | None:
        if not choices:
            return None
        content = [
            {
                **self._scored(choice.token, choice.logprob),
                "top_logprobs": [self._scored(token, logprob) for token, logprob in choice.top],
            }
            for choice in choices
        ]
        return {"content": content, "refusal": None}

    def _scored(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self._tokens.bytes(token)
        return {
            "token": self._tokens.text(token),
            "logprob": logprob,
            "bytes": None if raw is None else list(raw),
        }


class CompletionForm(_Base):
    """text_completion."""

    object = "text_completion"

    def whole(self, answers: int, usage: Usage) -> dict[str, Any]:
        choices = [
            self._choice(i, "".join(self._texts[i]), self._choices[i], self._finish.get(i)) for i in range(answers)
        ]
        return self._object(choices, chunk=False) | {"usage": usage.body()}

    def opening(self, answers: int) -> list[dict[str, Any]]:
        return []

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._object([self._choice(delta.index, delta.text, list(delta.choices), delta.finish)], chunk=True)

    def _choice(self, index: int, text: str, choices: list[Choice], finish: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(index, choices) if choices else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, index: int, choices: list[Choice]) -> dict[str, Any]:
        return {
            "tokens": [self._tokens.name(choice.token) for choice in choices],
            "token_logprobs": [choice.logprob for choice in choices],
            "top_logprobs": [self._top(choice) for choice in choices],
            "text_offset": [self._offsets[index].next(choice.token) for choice in choices],
        }

    def _top(self, choice: Choice) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, logprob in choice.top:  # of two with the same name, the likelier one comes first
            found.setdefault(self._tokens.name(token), logprob)
        return found
