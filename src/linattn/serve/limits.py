"""What a request may cost. Each limit has an error that names it and the option that sets it."""

from dataclasses import dataclass

from .errors import ApiError


@dataclass(frozen=True)
class Limits:
    """Attributes:
    max_body: bytes of a request's body.
    max_tokens: tokens of one answer, and their number if a request does not say.
    max_concurrent: sequences that are worked on together.
    max_queue: requests that wait for a place.
    timeout: seconds from a request's arrival to its end.
    context: positions of a sequence, prompt and answer together.
    """

    max_body: int = 16 * 2**20
    max_tokens: int = 1024
    max_concurrent: int = 64
    max_queue: int = 256
    timeout: float = 600.0
    context: int = 2**20

    def answer_tokens(self, prompt: int, wanted: int | None, *, param: str) -> int:
        """How many tokens the answer may have after a prompt; ApiError if the request asks for too much."""
        if prompt >= self.context:
            message = f"the prompt has {prompt} tokens, with its state; the model takes {self.context} (--context)."
            raise ApiError(400, message, code="context_length_exceeded", param=param)
        if wanted is not None and wanted > self.max_tokens:
            message = f"max_tokens is {wanted}; this server writes at most {self.max_tokens} (--max-tokens)."
            raise ApiError(400, message, code="max_tokens_exceeded", param="max_tokens")
        return min(self.max_tokens, self.context - prompt)

    def body(self, size: int) -> None:
        if size > self.max_body:
            message = f"the body is larger than {self.max_body / 2**20:g} MiB (--max-body)."
            raise ApiError(413, message, code="body_too_large")

    def load(self, jobs: int) -> None:
        if jobs >= self.max_concurrent + self.max_queue:
            message = f"{jobs} requests are running or waiting, and no more are taken (--max-concurrent, --max-queue)."
            raise ApiError(429, message, code="server_busy")
