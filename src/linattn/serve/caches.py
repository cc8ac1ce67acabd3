"""The cache of one sequence: what its layers are, and how it is forked, compacted and measured.

A cache is one of transformers' with a batch of one. Layers of full attention are replaced by a KeyValueLayer; sliding windows,
the states of `linattn.hf.attach` and the recurrent states of hybrid models keep their own layers.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin

from ..hf import StateCache
from ..nearfar.state import NearFarState
from ..states import State
from . import region

GROWTH = 1.125  # of a full buffer of keys and values
LEAST_ROOM = 128  # tokens that a grown buffer has room for, at least


class KeyValueBuffer:
    """Keys and values (1, heads, room, dim) that are only ever appended to; `used` tokens of them are written."""

    def __init__(self, key: Tensor, value: Tensor, used: int):
        self.key, self.value, self.used = key, value, used


class KeyValueLayer(CacheLayerMixin):
    """The keys and values of full attention. Forks share one buffer until one of them has to write where another did.

    Attributes:
        length: tokens of the buffer that belong to this sequence.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.buffer: KeyValueBuffer | None = None
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Appends keys and values (1, heads, new, dim); returns all of them."""
        self.is_initialized = True
        end = self.length + key_states.shape[-2]
        buffer = self.buffer
        if buffer is None or buffer.used != self.length or buffer.key.shape[-2] < end:
            buffer = self._grown(key_states, value_states, end)
        buffer.key[:, :, self.length : end] = key_states
        buffer.value[:, :, self.length : end] = value_states
        buffer.used, self.buffer, self.length = end, buffer, end
        return buffer.key[:, :, :end], buffer.value[:, :, :end]

    def _grown(self, key: Tensor, value: Tensor, end: int) -> KeyValueBuffer:
        room = max(end + LEAST_ROOM, int(end * GROWTH))
        keys, values = (x.new_empty(*x.shape[:-2], room, x.shape[-1]) for x in (key, value))
        if self.buffer is not None:
            keys[:, :, : self.length] = self.buffer.key[:, :, : self.length]
            values[:, :, : self.length] = self.buffer.value[:, :, : self.length]
        return KeyValueBuffer(keys, values, self.length)

    def tensors(self) -> dict[str, Tensor]:
        """The written keys and values."""
        if self.buffer is None:
            return {}
        return {"key": self.buffer.key[:, :, : self.length], "value": self.buffer.value[:, :, : self.length]}

    def restore(self, key: Tensor, value: Tensor) -> None:
        """Takes keys and values (1, heads, tokens, dim) as its own."""
        self.buffer, self.length, self.is_initialized = KeyValueBuffer(key, value, key.shape[-2]), key.shape[-2], True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens."""
        self.length = max(0, self.length - abs(tokens_to_remove))


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache for one sequence of this model."""
    if getattr(model, "_linattn", None) is not None:
        cache: Any = StateCache(model)
    else:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [KeyValueLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def fork(cache: Cache) -> Cache:
    """An independent copy. Tensors that a layer never changes in place are shared."""
    new: Any = copy.copy(cache)
    new.layers = [_fork_layer(layer) for layer in cache.layers]
    return new


def _fork_layer(layer: Any) -> Any:
    new = copy.copy(layer)
    new.__dict__.update({name: dict(x) for name, x in layer.__dict__.items() if isinstance(x, dict)})
    if isinstance(layer, LinearAttentionCacheLayerMixin):  # transformers overwrites these states in place
        for states in (new.conv_states, new.recurrent_states):
            states.update({i: None if x is None else x.clone() for i, x in states.items()})
    return new


def compact(cache: Cache) -> Cache:
    """A fork to keep: in a region of its own without spare room, except for keys and values that a buffer shares."""
    new = fork(cache)
    states = {(layer, name): _without_spare(x) for layer, name, x in _attributes(new) if isinstance(x, State)}
    others = {(layer, name): x for layer, name, x in _attributes(new) if isinstance(x, Tensor) and _spare(x)}
    found = [*(x for state in states.values() for x in state.tensors().values()), *others.values()]
    if any(not x.is_cpu for x in found):
        made = iter([x.clone() for x in found])
    else:
        made = iter(region.copies(found))
    for (layer, name), state in states.items():
        new.layers[layer].__dict__[name] = state.map(lambda _, _x: next(made))
    for layer, name in others:
        new.layers[layer].__dict__[name] = next(made)
    return new


def _attributes(cache: Cache) -> Iterator[tuple[int, str, Any]]:
    for i, layer in enumerate(cache.layers):
        yield from ((i, name, x) for name, x in layer.__dict__.items())


def _spare(x: Tensor) -> bool:
    """True if a tensor is part of a larger storage."""
    return x.untyped_storage().nbytes() > x.numel() * x.element_size()


def _without_spare(state: State) -> State:
    """A copy, without near tokens that are in slots already. The state itself stays packed."""
    new = state.clone()
    if not isinstance(new, NearFarState):
        return new
    spare = new.near.shape[-2] - int((new.tokens - new.merged).max())
    return replace(new, near=new.near[..., spare:, :]) if spare > 0 else new


def tensors_of(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one layer that make up its state, by name."""
    if isinstance(layer, KeyValueLayer):
        yield from layer.tensors().items()
        return
    for name, x in layer.__dict__.items():
        if name.startswith("_"):
            continue
        if isinstance(x, Tensor):
            yield name, x
        elif isinstance(x, State):
            yield from ((f"{name}.{field}", y) for field, y in x.tensors().items())
        elif isinstance(x, dict):
            yield from ((f"{name}.{key}", y) for key, y in x.items() if isinstance(y, Tensor))


def storages(cache: Cache) -> dict[int, int]:
    """Address -> bytes of every storage that a cache holds; forks share some of them."""
    found = {}
    for layer in cache.layers:
        buffer = getattr(layer, "buffer", None)
        held = [buffer.key, buffer.value] if isinstance(buffer, KeyValueBuffer) else [x for _, x in tensors_of(layer)]
        for x in held:
            storage = x.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)  # of empty tensors
    return found


def nbytes(cache: Cache) -> int:
    """Bytes of the tensors that make up a cache."""
    return sum(x.numel() * x.element_size() for layer in cache.layers for _, x in tensors_of(layer))


def share_buffers(short: Cache, long: Cache) -> None:
    """Lets a cache of a prefix use the buffers of a longer cache of the same sequence, so that its own are freed."""
    for mine, theirs in zip(short.layers, long.layers, strict=True):
        if isinstance(mine, KeyValueLayer) and isinstance(theirs, KeyValueLayer) and mine.length <= theirs.length:
            mine.buffer = theirs.buffer
