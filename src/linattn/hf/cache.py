"""The cache that `model.generate` carries along: one State per layer, of bounded size."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..sums.state import State


class StateLayer(CacheLayerMixin):
    """One layer's State. Attention gets the new keys and values alone; the past is in the state."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.seen = 0  # tokens, padding included: what the model calls the length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.seen, self.is_initialized = None, 0, False

    def offload(self) -> None:
        self.state = None if self.state is None else self.state.to("cpu")

    def prefetch(self) -> None:
        """States move to where they are used by `StateCache.to`."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.select(torch.arange(self.batch_size).repeat_interleave(repeats))

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else next(iter(self.state.tensors().values())).shape[0]

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens, all of them visible."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to forget, got {tokens_to_remove}.")
        if tokens_to_remove == 0 or self.state is None:
            return
        if not hasattr(self.state, "drop_last"):
            raise ValueError(f"a state of {self.state.kernel} is a sum: tokens cannot be taken out of it again.")
        self.state = self.state.drop_last(-tokens_to_remove)
        self.seen += tokens_to_remove


class StateCache(Cache):
    """A cache of bounded size for `model.generate(past_key_values=...)`, for a model that `attach` was called on.

    Layers that keep their own attention, such as sliding-window ones, keep their own cache too.
    """

    layers: list[Any]

    def __init__(self, model: PreTrainedModel):
        text_config = model.config.get_text_config(decoder=True)
        kept = getattr(model, "_linattn", None)
        if kept is None:
            raise ValueError("StateCache needs a model that linattn.hf.attach was called on.")
        super().__init__(layers=[_layer(text_config, i, kept.layers) for i in range(text_config.num_hidden_layers)])

    @property
    def states(self) -> list[State | None]:
        return [layer.state if isinstance(layer, StateLayer) else None for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all states, and of the keys and values of layers that keep their own cache."""
        total = sum(state.nbytes for state in self.states if state is not None)
        plain = [x for layer in self.layers for x in (layer.keys, layer.values) if x is not None]
        return total + sum(x.numel() * x.element_size() for x in plain)

    def clone(self) -> "StateCache":
        """An independent copy: snapshot a prompt once, go on from it many times."""
        new = object.__new__(StateCache)
        new.__dict__.update(self.__dict__)
        new.layers = [_clone(layer) for layer in self.layers]
        return new

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes one safetensors file per layer into a folder."""
        if not all(isinstance(layer, StateLayer) and layer.state is not None for layer in self.layers):
            raise ValueError("only a cache whose layers all hold a state can be saved.")
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        for i, layer in enumerate(self.layers):
            layer.state.save(path / f"layer-{i:03d}-{layer.seen}.safetensors")

    def load(self, folder: str | os.PathLike[str]) -> "StateCache":
        """Reads what `save` wrote into this cache, and returns it."""
        files = sorted(Path(folder).glob("layer-*.safetensors"))
        if len(files) != len(self.layers):
            raise ValueError(f"{os.fspath(folder)} holds {len(files)} layers; this model has {len(self.layers)}.")
        for layer, file in zip(self.layers, files):
            layer.state, layer.seen, layer.is_initialized = State.load(file), int(file.stem.split("-")[2]), True
        return self


def _layer(config: PreTrainedConfig, index: int, attached: set[int]) -> CacheLayerMixin:
    if index in attached:
        return StateLayer()
    types = getattr(config, "layer_types", None)
    if types is not None and "sliding" in types[index]:
        return DynamicSlidingWindowLayer(sliding_window=config.sliding_window)
    return DynamicLayer()


def _clone(layer: Any) -> Any:
    new = object.__new__(type(layer))
    new.__dict__.update(layer.__dict__)
    for name, x in layer.__dict__.items():
        if isinstance(x, (State, Tensor)):
            setattr(new, name, x.clone())
    return new
