"""Accuracy of a pretrained model with replaced attention: perplexity and embeddings."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import DynamicCache, PreTrainedModel

from ..kernels import Kernel, KernelName
from ..nearfar import NearFar
from .attach import attach, detach
from .cache import StateCache, own_tensors
from .calibrate import Measure, measure_layers
from .hybrids.layers import LIGHTNING, linear_layers
from .modules import ByLayer, Layer, attention_modules

CHUNK = 1024  # tokens that go through a language model at once

# A kernel, or one for each layer, and its budgets; without a kernel only linear layers change. None is the model as it is.
Choice = tuple[Kernel | KernelName | ByLayer[Kernel] | None, ByLayer[Sequence[int]] | None] | None


@dataclass
class Reading:
    """Result of reading a text with one kind of attention.

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
        """exp(-log_likelihood)."""
        return math.exp(-self.log_likelihood)


@contextmanager
def using(model: PreTrainedModel, choice: Choice) -> Iterator[None]:
    """Context: the model with a kernel attached."""
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
        cache = new_cache(model, choice)
        options = {"use_cache": False} if cache is None else {"past_key_values": cache}
        step = ids.shape[1] if cache is None else CHUNK
        total, start = 0.0, time.perf_counter()
        for i in range(0, ids.shape[1], step):
            logits = model(ids[:, i : i + step], **options).logits[0]
            following = ids[0, i + 1 : i + 1 + logits.shape[0]]
            total -= float(cross_entropy(logits[: len(following)].float(), following, reduction="sum"))
        seconds = time.perf_counter() - start
    held = sum(layer.state_bytes for layer in linear_layers(model)) if cache is None else cache_bytes(cache)
    return Reading(ids.shape[1], seconds, held, total / (ids.shape[1] - 1))


@torch.inference_mode()
def read_encoder(model: PreTrainedModel, ids: Tensor, choice: Choice) -> Reading:
    """The mean of an encoder's last hidden states on (1, tokens)."""
    with using(model, choice):
        start = time.perf_counter()
        hidden = model(ids).last_hidden_state
        return Reading(ids.shape[1], time.perf_counter() - start, embedding=hidden.mean(1)[0])


def cosine(a: Reading, b: Reading) -> float:
    """Cosine of two embeddings."""
    if a.embedding is None or b.embedding is None:
        raise ValueError("only readings of encoders have embeddings to compare.")
    return float(cosine_similarity(a.embedding, b.embedding, dim=0))


def new_cache(model: PreTrainedModel, choice: Choice) -> Any:
    """A StateCache, or a DynamicCache for exact attention; None for models that read a text in one call.

    Those have no softmax layer, by which transformers' caches count tokens, or a cache of a class of their own (MiniMax).
    """
    if choice is not None and choice[0] is not None:
        return StateCache(model)
    if not attention_modules(model) or any(layer.rule == LIGHTNING for layer in linear_layers(model)):
        return None
    return DynamicCache(config=model.config)


def cache_bytes(cache: Any) -> int:
    """Size of a cache in bytes."""
    if isinstance(cache, StateCache):
        return cache.nbytes
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in own_tensors(layer))


def layer_errors(model: PreTrainedModel, ids: Tensor, kernel: NearFar | ByLayer[NearFar]) -> list[float]:
    """Relative error of each attention layer's output, given exact inputs."""

    def error(layer: Layer, measure: Measure) -> Tensor:
        own = kernel if isinstance(kernel, NearFar) else cast(Mapping[Layer, NearFar], kernel)[layer]
        return measure(own, None)

    return [float(row.sum().sqrt()) for row in measure_layers(model, ids, error)]
