"""A model as the engine uses it: a piece of one prompt, or one token of several sequences, at a time."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..hf.nearfar_choice import NearFarChoice
from . import attention, reproducible
from .batching import BatchCache
from .caches import new_cache
from .fingerprint import fingerprint


@dataclass(frozen=True)
class ModelChoice:
    """Which model is served, and how. Everything that changes its states is part of their fingerprint.

    Attributes:
        model: a name of linattn.hf.weights.PACKAGES, a model folder or a GGUF file.
        kernel: "softmax" keeps the model's own attention; another name is attached.
        near_far: its window and slots, if that is the kernel.
        dtype: of weights and states.
    """

    model: str
    kernel: str = "softmax"
    near_far: NearFarChoice = field(default_factory=NearFarChoice)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.near_far != NearFarChoice() and self.kernel != "nearfar":
            raise ValueError(f"a window, slots and a calibration are for --kernel nearfar, not for {self.kernel}.")


class ServedModel:
    """A causal language model and its tokenizer. Not thread-safe: one thread calls it.

    Attributes:
        context: positions that a sequence may have.
        batches: False if sequences can only be decoded one after the other.
        fingerprint: of weights, tokenizer, kernel and calibration; states of another one are refused.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        choice: ModelChoice,
        *,
        context: int | None = None,
        reproducible_rows: bool = False,
    ):
        if not model.can_generate():
            raise ValueError(f"{choice.model} is an encoder and cannot generate text.")
        self.model, self.tokenizer, self.choice = model.eval(), tokenizer, choice
        self.fingerprint = fingerprint(model, tokenizer)
        self.batches = attention.install(model)
        text_config: Any = model.config.get_text_config(decoder=True)
        self.context = context or int(getattr(text_config, "max_position_embeddings", None) or 2**20)
        self.eos = _eos_ids(model, tokenizer)
        self.vocabulary = int(text_config.vocab_size)
        accepted = inspect.signature(type(model).forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in accepted else "cache_params"
        self._positions = "position_ids" in accepted
        self._keep = "logits_to_keep" in accepted
        self._batch: BatchCache | None = None
        if reproducible_rows:
            reproducible.pad_linears(model)
            reproducible.check(self._sample_step)

    def new_cache(self) -> Cache:
        return new_cache(self.model)

    @torch.inference_mode()
    def read(self, cache: Cache, ids: Sequence[int], position: int) -> Tensor:
        """Reads the next tokens of one sequence, which start at `position`; the logits (vocabulary,) after the last."""
        self._batch = None  # its rows may be about to change
        where = torch.arange(position, position + len(ids)).unsqueeze(0)
        return self._forward(torch.tensor([list(ids)]), where, cache)[0]

    @torch.inference_mode()
    def step(self, caches: list[Cache], ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One more token of each sequence; the logits (sequences, vocabulary) after them."""
        tokens, where = torch.tensor(ids).unsqueeze(1), torch.tensor(positions).unsqueeze(1)
        if len(caches) == 1 or not self.batches:
            self._batch = None
            rows = [self._forward(tokens[i : i + 1], where[i : i + 1], cache) for i, cache in enumerate(caches)]
            return torch.cat(rows)
        same = self._batch is not None and len(self._batch.rows) == len(caches)
        if not same or any(a is not b for a, b in zip(self._batch.rows, caches, strict=True)):  # type: ignore[union-attr]
            self._batch = BatchCache(list(caches))
        assert self._batch is not None
        return self._forward(tokens, where, self._batch)

    def _sample_step(self, rows: list[int]) -> Tensor:
        """The logits (rows, vocabulary) of a step after prompts of different lengths, for a check."""
        prompts = [[(7 * i + 3 * row) % self.vocabulary for i in range(5 + 6 * row)] for row in rows]
        made = [self.new_cache() for _ in rows]
        for cache, prompt in zip(made, prompts, strict=True):
            self.read(cache, prompt, 0)
        return self.step(made, [1] * len(rows), [len(prompt) for prompt in prompts])

    def _forward(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """(batch, vocabulary) after the last of tokens (batch, new)."""
        options: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if self._positions:
            options["position_ids"] = positions
        if self._keep:
            options["logits_to_keep"] = 1
        logits: Tensor = self.model(tokens, **options).logits[:, -1]
        return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)


def prepare(
    model: PreTrainedModel,
    tokenizer: Any,
    choice: ModelChoice,
    *,
    context: int | None = None,
    reproducible_rows: bool = False,
) -> ServedModel:
    """A loaded model with the kernel of the choice attached."""
    from .. import hf
    from ..hf.hybrids.layers import linear_layers

    model.to(getattr(torch, choice.dtype))
    if choice.kernel == "nearfar":
        hf.attach(model, choice.near_far.kernels(model))
    elif choice.kernel != "softmax":
        hf.attach(model, choice.kernel)  # type: ignore[arg-type]
    elif linear_layers(model):
        hf.attach(model)  # linear layers go to the engine; softmax layers keep their own attention
    return ServedModel(model, tokenizer, choice, context=context, reproducible_rows=reproducible_rows)


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer."""
    given = getattr(model.generation_config, "eos_token_id", None)
    found = set(given if isinstance(given, (list, tuple)) else [given])
    found |= {model.config.get_text_config(decoder=True).eos_token_id} if not found - {None} else set()
    found.add(tokenizer.eos_token_id)
    return frozenset(int(i) for i in found if i is not None)
