"""Reading and asking without a server: `linattn read` and `linattn ask`."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict

from ..hf.nearfar_choice import NearFarChoice
from . import caches, snapshots
from .model import ModelChoice, ServedModel
from .prompts import Prompt, Prompts
from .sampling import Sampler, SamplingOptions
from .schedule import Schedule
from .snapshots import Snapshot
from .text import TextStream


def read_document(model: ServedModel, text: str, on_read: Callable[[int, int], None] = lambda *_: None) -> Snapshot:
    """The state after a document, to which questions are put later. on_read: called with the tokens read, and all."""
    tokens, piece = Prompts(model.tokenizer).document(text).tokens, 4 * Schedule().piece
    if len(tokens) >= model.context:
        raise ValueError(f"the document has {len(tokens)} tokens; the model takes {model.context} (--context).")
    cache = model.new_cache()
    for start in range(0, len(tokens), piece):
        model.read(cache, tokens[start : start + piece], start)
        on_read(min(start + piece, len(tokens)), len(tokens))
    about = {"kind": "document", "choice": asdict(model.choice), "context": model.context}
    return Snapshot(tokens, caches.compact(cache), about)


def saved_choice(path: str | os.PathLike[str]) -> tuple[ModelChoice, int]:
    """The model that a saved document was read with, and its context. ValueError if the file is something else."""
    _, about = snapshots.read_about(path)
    try:
        choice = dict(about["choice"])
        choice["near_far"] = NearFarChoice(**choice["near_far"])
        return ModelChoice(**choice), int(about["context"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{os.fspath(path)} was not written by `linattn read`: it names no model.") from error


def answer(model: ServedModel, snapshot: Snapshot, question: str, options: SamplingOptions) -> Iterator[str]:
    """The answer to a question about a document that was read, piece by piece."""
    tail: Prompt = Prompts(model.tokenizer).continue_document([{"role": "user", "content": question}])
    cache, position = caches.fork(snapshot.cache), len(snapshot.tokens)
    if position + len(tail.tokens) >= model.context:
        raise ValueError(f"document and question fill the {model.context} positions of the model (--context).")
    logits = model.read(cache, tail.tokens, position)
    position += len(tail.tokens)
    sampler, text = Sampler(options), TextStream(model.tokenizer, options.stop)
    for _ in range(min(options.max_tokens, model.context - position)):
        token = sampler.choose(logits).token
        if token in model.eos:
            break
        yield text.push(token)
        if text.stopped:
            return
        logits = model.step([cache], [token], [position])[0]
        position += 1
    yield text.flush()
