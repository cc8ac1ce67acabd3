"""Everything behind the HTTP routes: prompts are prepared here, handed to the engine, and their events passed back."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from . import jobs
from .engine import Engine
from .errors import ApiError
from .jobs import Event, Job
from .limits import Limits
from .metrics import Metrics
from .model import ServedModel
from .prefix_store import Entry, PrefixStore
from .prompts import Prompt, PromptError, Prompts
from .sampling import SamplingOptions
from .saved_states import ID, SavedState, SavedStates
from .schedule import Schedule
from .schemas import ChatMessage
from .snapshots import Snapshot
from .state_folder import StateFolder

logger = logging.getLogger("linattn.serve")


class Service:
    """A served model with its engine and stored states.

    Args:
        memory: bytes of stored states in memory.
        folder: where states are saved; None keeps them in memory only.
        disk: bytes of spilled prefixes in that folder.
        log_text: write prompts and answers to the log.
    """

    def __init__(
        self,
        model: ServedModel,
        limits: Limits,
        *,
        schedule: Schedule | None = None,
        memory: int = 2**30,
        folder: Path | None = None,
        disk: int = 8 * 2**30,
        reproducible: bool = False,
        log_text: bool = False,
    ):
        self.model, self.limits, self.metrics, self.log_text = model, limits, Metrics(), log_text
        self.name = os.path.basename(os.path.abspath(model.choice.model)).removesuffix(".gguf")  # of "." too
        self.prompts = Prompts(model.tokenizer)
        self.folder = StateFolder(folder, model.fingerprint, model.new_cache, disk) if folder else None
        schedule = schedule or Schedule(rows=limits.max_concurrent)
        files = self.folder
        self.store = PrefixStore(memory, schedule.every, files.load if files else None, files.spill if files else None)
        if files is not None:
            files.on_written = self._written
            for key, length, path in files.spilled_files():
                self.store.register(key, length, path, keep=False)
        self.saved = SavedStates(self.store, self.folder)
        self.engine = Engine(model, self.store, schedule, self.metrics, reproducible=reproducible)

    def start(self) -> None:
        self.engine.start()

    def stop(self) -> None:
        self.engine.stop()
        if self.folder is not None:
            self.folder.close()

    def _written(self, entry: Entry, path: Path | None) -> None:
        self.store.set_file(entry, path)
        if path is None or self.store.get(entry.key) is not entry:
            self.store.forget([entry])
            if path is not None:
                path.unlink(missing_ok=True)

    # Prompts ----------------------------------------------------------------------------------------------------------

    def chat_prompt(self, messages: Sequence[ChatMessage], state: str | None) -> Prompt:
        """The tokens of a conversation, behind those of a saved state."""
        plain = [message.plain() for message in messages]
        try:
            if state is None:
                return self.prompts.chat(plain)
            saved = self.state(state)
            kind = saved.about.get("kind")
            if kind == "messages":
                tail = self.prompts.continue_messages(saved.about["messages"], plain)
            elif kind == "document":
                tail = self.prompts.continue_document(plain)
            else:
                tail = self.prompts.chat(plain)
            return self._behind(saved, tail)
        except PromptError as error:
            raise ApiError(400, str(error), code="invalid_messages", param="messages") from error

    def text_prompt(self, prompt: str | list[int], state: str | None) -> Prompt:
        """The tokens of a plain text, or tokens as they are, behind those of a saved state."""
        if isinstance(prompt, list):
            if not all(0 <= i < self.model.vocabulary for i in prompt):
                raise ApiError(400, f"tokens must lie between 0 and {self.model.vocabulary - 1}.", param="prompt")
            found = Prompt(prompt, goes_on=True)
        else:
            found = self.prompts.text(prompt) if state is None else self.prompts.tail(prompt)
        if not found.tokens:
            raise ApiError(400, "the prompt has no tokens.", code="empty_prompt", param="prompt")
        return found if state is None else self._behind(self.state(state), found)

    def _behind(self, saved: SavedState, tail: Prompt) -> Prompt:
        try:
            before = self.saved.tokens_of(saved)
        except (ValueError, OSError) as error:
            raise ApiError(409, f"{saved.id} cannot be used: {error}", code="state_unusable", param="state") from error
        boundaries = [len(before), *(len(before) + i for i in tail.boundaries)]
        return Prompt([*before, *tail.tokens], boundaries, tail.goes_on)

    def state(self, name: str) -> SavedState:
        """A saved state by its id; ApiError if there is none, or it is another model's."""
        saved = self.saved.get(name) if ID.fullmatch(name) else None
        if saved is None:
            raise ApiError(404, "there is no state of this id.", code="state_not_found", param="state")
        if not saved.usable:
            message = f"{name} is a state of another model, kernel or calibration: read the document again."
            raise ApiError(409, message, code="state_mismatch", param="state")
        return saved

    # Jobs -------------------------------------------------------------------------------------------------------------

    async def run(
        self, prompts: Sequence[Prompt], options: SamplingOptions, answers: int
    ) -> AsyncGenerator[tuple[int, Event], None]:
        """Runs one job for each prompt together; yields the number of the prompt with each event, to the last Finished.

        Closing the iterator cancels the jobs. ApiError if one of them fails.
        """
        for prompt in prompts:  # states that are only in files are read outside of the engine's thread
            await asyncio.to_thread(self.store.find, prompt.tokens)
        self.limits.load(self.engine.load)
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()
        deadline = time.monotonic() + self.limits.timeout
        running = []
        for i, prompt in enumerate(prompts):

            def send(event: Event, i: int = i) -> None:
                loop.call_soon_threadsafe(events.put_nowait, (i, event))

            job = Job(prompt.tokens, prompt.boundaries, options, answers, send, deadline, goes_on=prompt.goes_on)
            running.append(job)
            if self.log_text:
                logger.info("prompt %d: %r", job.number, self.model.tokenizer.decode(prompt.tokens))
            self.engine.submit(job)
        left = len(running)
        try:
            while left:
                i, event = await events.get()
                if isinstance(event, jobs.Failed):
                    raise _failure(event)
                left -= isinstance(event, jobs.Finished)
                if self.log_text and isinstance(event, jobs.Delta):
                    logger.info("answer %d: %r", running[i].number, event.text)
                yield i, event
        finally:
            for job in running:
                job.cancel()
            self.metrics.states(len(self.store), self.store.memory)

    async def keep(self, snapshot: Snapshot) -> SavedState:
        """Saves a snapshot as a state."""
        if self.folder is None and self.store.memory > 2 * self.store.budget:
            message = "the saved states fill the memory for states: delete some, or start the server with --state-dir."
            raise ApiError(507, message, code="state_memory_full")
        try:
            return await asyncio.to_thread(self.saved.add, snapshot)
        except OSError as error:
            logger.warning("could not save a state: %s", error)
            message = f"the state cannot be saved: {error.strerror or type(error).__name__} (--state-dir)."
            raise ApiError(507, message, code="state_not_saved") from error


def _failure(event: jobs.Failed) -> ApiError:
    if event.kind == "timeout":
        return ApiError(504, f"{event.message} (--timeout)", code="timeout")
    return ApiError(503 if event.kind == "stopped" else 500, event.message, code=event.kind)
