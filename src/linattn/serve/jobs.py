"""What the engine works on: jobs, their answers, and the events it sends back."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from transformers.cache_utils import Cache

from .sampling import Choice, Sampler, SamplingOptions
from .snapshots import Snapshot
from .text import TextStream

_numbers = itertools.count(1)
CONTEXT = 5  # tokens before an answer with which its first one is decoded


@dataclass(frozen=True)
class Progress:
    """Tokens of the prompt that are read so far, and those of them that came from a stored state."""

    read: int
    cached: int


@dataclass(frozen=True)
class Delta:
    """A piece of one answer. finish is "stop" or "length" in its last one; tokens: how many were written for it."""

    index: int
    text: str
    choices: tuple[Choice, ...] = ()
    finish: str | None = None
    tokens: int = 1


@dataclass(frozen=True)
class Finished:
    """The job is done. snapshot: for a job that only reads."""

    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class Failed:
    """The job ended early. kind: "timeout", "error" or "stopped"."""

    kind: str
    message: str


Event = Progress | Delta | Finished | Failed


@dataclass(eq=False)
class Job:
    """A prompt to read, and answers to write after it.

    Attributes:
        tokens: of the prompt.
        boundaries: positions in it where turns end.
        goes_on: the answers are more of the same text.
        answers: how many to write; 0 only reads.
        send: called with each event, from the engine's thread.
        deadline: on time.monotonic's clock.
    """

    tokens: list[int]
    boundaries: list[int]
    options: SamplingOptions
    answers: int
    send: Callable[[Event], None]
    deadline: float = float("inf")
    number: int = field(default_factory=lambda: next(_numbers))
    created: float = field(default_factory=time.monotonic)
    goes_on: bool = False
    cancelled: bool = False
    cached: int = 0
    written: int = 0
    first_token: float | None = None

    # While it reads:
    cache: Cache | None = None
    position: int = 0
    leader: "Job | None" = None  # reads the same beginning already
    target: int = 0  # the position up to which this job waits for it

    def cancel(self) -> None:
        """From any thread: the engine drops the job at its next step."""
        self.cancelled = True


class Answer:
    """One sequence that is being written: all of its tokens, the last of which the model has not been given yet."""

    def __init__(self, job: Job, index: int, cache: Cache, tokenizer: object):
        self.job, self.index, self.cache = job, index, cache
        self.tokens = list(job.tokens)
        self.sampler = Sampler(job.options, index)
        self.text = TextStream(tokenizer, job.options.stop, job.tokens[-CONTEXT:] if job.goes_on else ())
        self.written, self.unsent, self.finished = 0, 0, False
        self.chain = job.number if job.answers == 1 else next(_numbers)

    @property
    def position(self) -> int:
        """Of the last token, which is fed next."""
        return len(self.tokens) - 1
