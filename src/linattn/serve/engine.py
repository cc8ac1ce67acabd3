"""The engine: one thread that calls the model, reading prompts in pieces between decode steps of all answers."""

import logging
import threading
import time
from collections import deque

import torch
from torch import Tensor

from . import caches
from .jobs import Answer, Delta, Event, Failed, Finished, Job, Progress
from .metrics import Metrics
from .model import ServedModel
from .prefix_store import PrefixStore
from .sampling import NotFiniteError
from .schedule import Schedule, Share, next_cut, shared_target
from .snapshots import Snapshot

logger = logging.getLogger("linattn.serve")


class Engine:
    """Runs jobs. Every answer has a cache of its own, so that none depends on what runs beside it.

    Args:
        schedule: sizes of pieces, and limits.
        reproducible: use stored states only where reading from the start would have been cut alike, so that answers do not
            depend on what was stored either.
    """

    def __init__(
        self,
        model: ServedModel,
        store: PrefixStore,
        schedule: Schedule,
        metrics: Metrics,
        *,
        reproducible: bool = False,
    ):
        self.model, self.store, self.schedule, self.metrics = model, store, schedule, metrics
        self.reproducible = reproducible
        self._arrived: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        self._reading: deque[Job] = deque()
        self._newcomer_next = True
        self._answers: list[Answer] = []
        self._share = Share(schedule.decode_share)
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="linattn-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends all jobs and the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def submit(self, job: Job) -> None:
        """From any thread."""
        with self._wake:
            self._arrived.append(job)
            self._wake.notify()

    @property
    def load(self) -> int:
        """Jobs that wait or run."""
        running = {id(answer.job) for answer in list(self._answers)}
        return len(self._arrived) + len(self._waiting) + len(self._reading) + len(running)

    # The loop ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode():
            while self._take_new():
                try:
                    self._turn()
                except Exception as error:  # a bug or a lack of memory ends these jobs, never the server
                    logger.exception("a step failed")
                    self._fail_all("error", f"the model failed: {type(error).__name__}")
        self._fail_all("stopped", "the server is shutting down.")

    def _take_new(self) -> bool:
        """Waits for work; False to stop."""
        self._report()
        with self._wake:
            while not (self._stopping or self._arrived or self._waiting or self._reading or self._answers):
                self._wake.wait()
            self._waiting += self._arrived
            self._arrived.clear()
            return not self._stopping

    def _turn(self) -> None:
        """Drops cancelled jobs, admits new ones, then reads one piece or makes one decode step."""
        self._drop_ended()
        rows = len(self._answers) + sum(max(1, job.answers) for job in self._reading)
        while self._waiting and (rows == 0 or rows + max(1, self._waiting[0].answers) <= self.schedule.rows):
            job = self._waiting.popleft()
            rows += max(1, job.answers)
            self._follow(job)
            self._reading.append(job)
        self._report()
        begun = time.perf_counter()
        if self._reading and (not self._answers or self._share.may_read):
            self._read_piece(self._next_reader())
            self._share.read(time.perf_counter() - begun)
        elif self._answers:
            self._step()
            self._share.decoded(time.perf_counter() - begun)

    def _report(self) -> None:
        self.metrics.load(len(self._waiting), len(self._reading), len(self._answers))

    def _drop_ended(self) -> None:
        now = time.monotonic()
        for job in {*self._waiting, *self._reading, *(answer.job for answer in self._answers)}:
            if job.cancelled:
                self.metrics.cancelled()
                self._remove(job)
            elif now > job.deadline:
                self._fail(job, "timeout", "the request took longer than the server allows.")

    def _remove(self, job: Job) -> None:
        for jobs in (self._waiting, self._reading):
            if job in jobs:
                jobs.remove(job)
        self._answers = [answer for answer in self._answers if answer.job is not job]
        job.cache = None

    def _fail(self, job: Job, kind: str, message: str) -> None:
        self._remove(job)
        _send(job, Failed(kind, message))

    def _fail_all(self, kind: str, message: str) -> None:
        with self._wake:
            self._waiting += self._arrived
            self._arrived.clear()
        for job in {*self._waiting, *self._reading, *(answer.job for answer in self._answers)}:
            self._fail(job, kind, message)

    # Reading ----------------------------------------------------------------------------------------------------------

    def _follow(self, job: Job) -> None:
        """Lets a job wait for another that is reading the same beginning already, instead of reading it twice."""
        for other in self._reading:
            target = shared_target(job.tokens, other.tokens, self.schedule.every)
            if target > job.target:
                job.leader, job.target = other, target

    def _next_reader(self) -> Job:
        """The job whose turn it is; it goes to the end of the line.

        A job that has read nothing yet comes before one that has, but never twice in a row if one of those waits. Jobs that
        wait for another, which reads the same, are passed over; the first in line never waits.
        """
        for job in self._reading:
            leader = job.leader
            if leader is not None and (leader not in self._reading or leader.position >= job.target):
                job.leader = None
        ready = [job for job in self._reading if job.leader is None]
        chosen = next((job for job in ready if (job.cache is None) == self._newcomer_next), ready[0])
        self._newcomer_next = chosen.cache is not None
        self._reading.remove(chosen)
        self._reading.append(chosen)
        return chosen

    def _read_piece(self, job: Job) -> None:
        """Reads a piece of a prompt: up to the next cut of the grid, or several cuts that are not longer together."""
        begun = job.position
        while True:
            logits = self._start_from_stored(job)
            if logits is None:
                logits = self._read_to_cut(job)
            _send(job, Progress(job.position, job.cached))
            if job.position == len(job.tokens):
                self._finish_reading(job, logits)
                return
            end = next_cut(job.position, len(job.tokens), job.boundaries, self.schedule).end
            if end - max(begun, job.cached) > self.schedule.piece:
                return

    def _read_to_cut(self, job: Job) -> Tensor:
        assert job.cache is not None
        cut = next_cut(job.position, len(job.tokens), job.boundaries, self.schedule)
        logits = self.model.read(job.cache, job.tokens[job.position : cut.end], job.position)
        self.metrics.read(cut.end - job.position)
        job.position = cut.end
        if cut.keep:
            self._keep(job, logits, anchor=cut.anchor, regular=cut.regular)
        return logits

    def _start_from_stored(self, job: Job) -> Tensor | None:
        """Continues from a longer stored prefix, if there is one; the logits if it is the whole prompt."""
        entry = self.store.find(job.tokens, longer_than=job.position, files=job.cache is None)
        stored = entry.cache if entry is not None else None  # another thread may take it from the entry meanwhile
        if entry is not None and stored is not None:
            job.cache, job.position, job.cached = caches.fork(stored), entry.length, entry.length
            self.store.adopt(entry, job.number)
        elif job.cache is None:
            job.cache = self.model.new_cache()
        if job.position == 0 or job.position < len(job.tokens):
            return None
        return entry.logits if entry is not None else None

    def _keep(self, job: Job, logits: Tensor, *, anchor: bool, regular: bool) -> None:
        assert job.cache is not None
        whole = job.position == len(job.tokens)
        if self.reproducible and not regular and not whole:
            return
        self.store.put(
            job.tokens[: job.position],
            caches.compact(job.cache),
            chain=job.number,
            anchor=anchor,
            logits=logits.clone() if whole and job.answers else None,
            whole_only=self.reproducible and not regular,
        )

    def _finish_reading(self, job: Job, logits: Tensor) -> None:
        self.metrics.prompt(len(job.tokens), job.cached)
        assert job.cache is not None
        if not job.answers:
            snapshot = Snapshot(job.tokens, caches.compact(job.cache))
            self._reading.remove(job)
            _send(job, Finished(snapshot))
            return
        forks = [job.cache, *(caches.fork(job.cache) for _ in range(job.answers - 1))]
        answers = [Answer(job, index, cache, self.model.tokenizer) for index, cache in enumerate(forks)]
        self._reading.remove(job)  # only now: a job that is in no list would never be told of a failure
        self._answers += answers
        job.cache = None
        for answer in answers:
            self._extend(answer, logits)
        self._remove_finished()

    # Writing ----------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One more token of every answer."""
        begun = time.perf_counter()
        logits = self.model.step(
            [answer.cache for answer in self._answers],
            [answer.tokens[-1] for answer in self._answers],
            [answer.position for answer in self._answers],
        )
        for answer, row in zip(self._answers, logits, strict=True):
            self._extend(answer, row)
        self.metrics.step(len(self._answers), time.perf_counter() - begun)
        self._remove_finished()

    def _extend(self, answer: Answer, logits: Tensor) -> None:
        """Chooses the next token of an answer and sends what can be shown."""
        job, options = answer.job, answer.job.options
        try:
            choice = answer.sampler.choose(logits)
        except NotFiniteError as error:
            self._fail(job, "error", str(error))
            return
        answer.tokens.append(choice.token)
        answer.written += 1
        job.written += 1
        if job.first_token is None:
            job.first_token = time.monotonic()
            self.metrics.first_token(job.first_token - job.created)
        finish = None
        if choice.token in self.model.eos:
            text, finish = answer.text.flush(), "stop"
        else:
            text = answer.text.push(choice.token)
            if answer.text.stopped:
                finish = "stop"
            elif answer.written >= options.max_tokens or len(answer.tokens) > self.model.context:
                text, finish = text + answer.text.flush(), "length"
        shown = (choice,) if choice.logprob is not None and choice.token not in self.model.eos else ()
        answer.finished = finish is not None
        answer.unsent += 1
        if text or shown or finish:
            _send(job, Delta(answer.index, text, shown, finish, answer.unsent))
            answer.unsent = 0

    def _remove_finished(self) -> None:
        ended = [answer for answer in self._answers if answer.finished]
        for answer in ended:
            self._store_end(answer)
        self._answers = [answer for answer in self._answers if not answer.finished]
        running = {id(answer.job) for answer in self._answers}
        for answer in ended:
            if id(answer.job) not in running:
                running.add(id(answer.job))
                _send(answer.job, Finished())

    def _store_end(self, answer: Answer) -> None:
        try:
            if not self.reproducible and self._comes_back(answer):
                self.store.put(answer.tokens[:-1], caches.compact(answer.cache), chain=answer.chain)
        except Exception:  # such as a lack of memory: the answer itself is whole
            logger.exception("the state after an answer was not stored")

    def _comes_back(self, answer: Answer) -> bool:
        """True if the text of an answer gives its tokens again, so that a client who sends it back can start from here."""
        written = answer.tokens[len(answer.job.tokens) : -1]
        text = self.model.tokenizer.decode(written, clean_up_tokenization_spaces=False)
        return list(self.model.tokenizer(text, add_special_tokens=False).input_ids) == written


def _send(job: Job, event: Event) -> None:
    try:
        job.send(event)
    except RuntimeError:  # the event loop of the client is closed
        job.cancel()
