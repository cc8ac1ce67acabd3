"""How much of a pretrained model is left when its attention is replaced: perplexity, embeddings, needles."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import DynamicCache, PreTrainedModel

from ..kernels import Kernel
from ..nearfar import NearFar
from .attach import attach, detach
from .cache import StateCache
from .calibrate import measure_layers

CHUNK = 1024  # tokens that go through a language model at once

Choice = tuple[Kernel | str, Mapping[int, Sequence[int]] | None] | None  # a kernel and its budgets; None is exact


@dataclass
class Reading:
    """A text read with one kind of attention.

    Attributes:
        log_likelihood: mean over tokens, for a language model.
        state_bytes: of the cache after the last token; the KV cache for exact attention.
        seconds: for the whole text.
        embedding: (dim,), for an encoder.
    """

    tokens: int
    seconds: float
    state_bytes: int = 0
    log_likelihood: float = 0.0
    embedding: Tensor | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_likelihood)


@contextmanager
def using(model: PreTrainedModel, choice: Choice) -> Iterator[None]:
    """Attached for the time being."""
    if choice is None:
        yield
        return
    attach(model, choice[0], budgets=choice[1])
    try:
        yield
    finally:
        detach(model)


@torch.inference_mode()
def read_language(model: PreTrainedModel, ids: Tensor, choice: Choice) -> Reading:
    """Perplexity of a causal model on (1, tokens), chunk by chunk through its cache."""
    with using(model, choice):
        cache: Any = DynamicCache(config=model.config) if choice is None else StateCache(model)
        total, start = 0.0, time.perf_counter()
        for i in range(0, ids.shape[1], CHUNK):
            logits = model(ids[:, i : i + CHUNK], past_key_values=cache).logits[0]
            following = ids[0, i + 1 : i + 1 + logits.shape[0]]
            total -= float(cross_entropy(logits[: len(following)].float(), following, reduction="sum"))
        seconds = time.perf_counter() - start
    return Reading(ids.shape[1], seconds, cache_bytes(cache), total / (ids.shape[1] - 1))


@torch.inference_mode()
def read_encoder(model: PreTrainedModel, ids: Tensor, choice: Choice) -> Reading:
    """The mean of an encoder's last hidden states on (1, tokens)."""
    with using(model, choice):
        start = time.perf_counter()
        hidden = model(ids).last_hidden_state
        return Reading(ids.shape[1], time.perf_counter() - start, embedding=hidden.mean(1)[0])


def cosine(a: Reading, b: Reading) -> float:
    if a.embedding is None or b.embedding is None:
        raise ValueError("only readings of encoders have embeddings to compare.")
    return float(cosine_similarity(a.embedding, b.embedding, dim=0))


def cache_bytes(cache: Any) -> int:
    if isinstance(cache, StateCache):
        return cache.nbytes
    kept = [x for layer in cache.layers for x in (layer.keys, layer.values) if x is not None]
    return sum(x.numel() * x.element_size() for x in kept)


def layer_errors(
    model: PreTrainedModel, ids: Tensor, kernel: NearFar, budgets: Mapping[int, Sequence[int]] | None
) -> list[float]:
    """Relative error of each attention layer's output, given exact inputs."""

    def kernels(layer: int) -> list[NearFar]:
        return [kernel if budgets is None else kernel.with_slots(budgets[layer])]

    table = measure_layers(model, ids, kernels)
    return [float(row.sum().sqrt()) for row in table]


@torch.inference_mode()
def needle(
    model: PreTrainedModel,
    encode: Callable[[str], Sequence[int]],
    filler: Tensor,
    choice: Choice,
    *,
    length: int,
    depths: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
) -> tuple[float, float]:
    """A fact placed at each depth of a long text and asked for at its end.

    Returns the share of the answer's tokens that the model ranks first, and their mean log-likelihood.
    """
    hits, likelihoods = [], []
    codes = ("7 3 9 1 4", "2 8 5 0 6", "9 4 1 7 2", "3 6 8 2 5", "5 0 7 4 8")
    with using(model, choice):
        for depth, code in zip(depths, codes):
            fact, question = (encode(f"\nThe secret code of the old harbour is {x}") for x in (code + ".\n", ""))
            answer = encode(" " + code)
            room = length - len(fact) - len(question) - len(answer)
            place = int(depth * room)
            text = [*filler[0, :place].tolist(), *fact, *filler[0, place:room].tolist(), *question, *answer]
            ids = torch.tensor([text])
            cache: Any = DynamicCache(config=model.config) if choice is None else StateCache(model)
            for i in range(0, len(text), CHUNK):
                logits = model(ids[:, i : i + CHUNK], past_key_values=cache, logits_to_keep=len(answer) + 1).logits[0]
            predicted = logits[-len(answer) - 1 : -1].log_softmax(-1)
            target = torch.tensor(list(answer))
            hits.append(float((predicted.argmax(-1) == target).float().mean()))
            likelihoods.append(float(predicted.gather(1, target.unsqueeze(1)).mean()))
    return sum(hits) / len(hits), sum(likelihoods) / len(likelihoods)
