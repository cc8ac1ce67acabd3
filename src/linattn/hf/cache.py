"""The cache for `model.generate`: one State per layer, of bounded size."""

import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    LinearAttentionLayer,
)

from .._files import write_json
from ..states.linear import State
from .modules import attention_modules, is_sliding

MANIFEST = "linattn-cache.json"  # names the folder of the newest whole save
VERSION = 1


UNFINISHED = (
    "the last tokens given to this cache never reached its states: the call failed halfway, or the model has no linattn "
    "attached. Go on from a clone() made before that call, or from a new StateCache."
)


class StateLayer(CacheLayerMixin):
    """The State of one layer. Attention receives only the new keys and values; the past is in the state."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.seen = 0  # tokens including padding: the length as the model counts it
        self.held = 0  # those of them that are in the state

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.held != self.seen:
            raise ValueError(UNFINISHED)
        self.seen += key_states.shape[-2]
        self.is_initialized = True
        if self.keys is None or len(self.keys) != len(key_states):
            # Cross-attention asks a cache for its keys from the second token on: there are no new ones.
            self.keys, self.values = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (key_states, value_states))
        return key_states, value_states

    def past(self) -> State | None:
        """The state before the tokens of the last update."""
        if self.state is None and self.held:
            raise ValueError("this cache has seen tokens, but holds no state of them.")
        return self.state

    def hold(self, state: State) -> None:
        """Stores the state after the tokens of the last update."""
        self.state, self.held = state, self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.seen, self.held, self.is_initialized = None, 0, 0, False

    def offload(self) -> None:
        self.state = None if self.state is None else self.state.to("cpu")

    def prefetch(self) -> None:
        """States stay on the device of the call that made them."""

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
        """Removes the last -tokens_to_remove tokens, which must all be visible."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to forget, got {tokens_to_remove}.")
        if tokens_to_remove == 0 or self.state is None:
            return
        if not hasattr(self.state, "drop_last"):
            raise ValueError(f"a state of {self.state.kernel} is a sum: tokens cannot be taken out of it again.")
        self.state = self.state.drop_last(-tokens_to_remove)
        self.seen += tokens_to_remove
        self.held = self.seen


class LinearAndStateLayer(LinearAttentionLayer, StateLayer):  # type: ignore[override]
    """For layers with both a linear state, which transformers keeps, and attention of ours (Falcon-H1, Zamba)."""

    is_compileable = False

    def __init__(self, number_of_states: int = 1) -> None:
        StateLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        kind = StateLayer if args else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        StateLayer.reset(self)

    def offload(self) -> None:
        LinearAttentionLayer.offload(self)
        StateLayer.offload(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        StateLayer.batch_select_indices(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError("this layer has a linear state, which tokens cannot be taken out of again.")


class StateCache(Cache):
    """A cache of bounded size for `model.generate(past_key_values=...)` of an attached model.

    Layers that keep their own attention, such as sliding-window ones, keep their own cache too.
    """

    layers: list[Any]

    def __init__(self, model: PreTrainedModel):
        attached = getattr(model, "_linattn", None)
        if attached is None:
            raise ValueError("StateCache needs a model that linattn.hf.attach was called on.")
        config = model.config.get_text_config(decoder=True)
        layers: list[Any] = DynamicCache(config=config).layers
        _refuse_mixed_sharing(model, attached.layers)
        if getattr(config, "num_kv_shared_layers", None):  # these have no layer in transformers' caches
            layers += [DynamicLayer() for _ in range(config.num_hidden_layers - len(layers))]
        super().__init__(layers=[_state_layer(x) if i in attached.layers else x for i, x in enumerate(layers)])
        self.first = next((i for i, x in enumerate(self.layers) if isinstance(x, StateLayer)), -1)

    def __repr__(self) -> str:
        return f"StateCache(layers={len(self.layers)}, tokens={self.get_seq_length()}, nbytes={self.nbytes})"

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Called by transformers: the new keys and values of one layer."""
        layer = self.layers[layer_idx]
        if not isinstance(layer, StateLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        new = layer.update(key_states, value_states)
        if layer.seen != self.layers[self.first].seen:
            raise ValueError(UNFINISHED)
        return new

    @property
    def states(self) -> list[State | None]:
        """The State of each layer; None for layers that keep their own cache."""
        return [layer.state if isinstance(layer, StateLayer) else None for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all states, and of what layers with their own cache keep: keys and values, or linear states."""
        total = sum(state.nbytes for state in self.states if state is not None)
        return total + sum(x.numel() * x.element_size() for layer in self.layers for x in own_tensors(layer))

    def clone(self) -> "StateCache":
        """An independent copy, to fork a prompt."""
        new = object.__new__(StateCache)
        new.__dict__.update(self.__dict__)
        new.layers = [_clone(layer) for layer in self.layers]
        return new

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes one safetensors file per layer into a folder; an earlier save is replaced once all files are written."""
        if not all(isinstance(layer, StateLayer) and layer.state is not None for layer in self.layers):
            raise ValueError("only a cache whose layers all hold a state can be saved.")
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        old = _manifest(path)
        new = path / f"save-{secrets.token_hex(8)}"
        try:
            new.mkdir()
            for i, layer in enumerate(self.layers):
                layer.state.save(new / _file_name(i))
            tokens = [layer.seen for layer in self.layers]
            write_json(path / MANIFEST, {"version": VERSION, "folder": new.name, "tokens": tokens})
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        if old is not None:
            shutil.rmtree(path / old["folder"], ignore_errors=True)

    def load(self, folder: str | os.PathLike[str]) -> "StateCache":
        """Loads a folder written by `save` into this cache, and returns it."""
        path = Path(folder)
        found = _manifest(path)
        if found is None:
            raise ValueError(f"{path} holds no cache: {MANIFEST}, which StateCache.save writes, is missing.")
        try:
            states = [State.load(path / found["folder"] / _file_name(i)) for i in range(len(found["tokens"]))]
        except FileNotFoundError:
            if _manifest(path) == found:
                raise
            return self.load(folder)  # replaced by a newer save meanwhile
        if len(states) != len(self.layers) or not all(isinstance(layer, StateLayer) for layer in self.layers):
            kept = sum(isinstance(layer, StateLayer) for layer in self.layers)
            raise ValueError(f"{path} holds {len(states)} layers of states; this model has {kept}.")
        for layer, state, tokens in zip(self.layers, states, found["tokens"], strict=False):
            layer.state, layer.seen, layer.held, layer.is_initialized = state, tokens, tokens, True
        return self


def refuse_unused_cache(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of attached models: with caches off, `generate` gives the whole text at every step, and a StateCache
    would read it again and again. MPT's configuration turns caches off."""
    if kwargs.get("use_cache") is not False:
        return
    given: Any = kwargs.get("past_key_values")
    caches: tuple[Any, ...] = (given,)
    if isinstance(given, EncoderDecoderCache):
        caches = (given.self_attention_cache, given.cross_attention_cache)
    if any(isinstance(cache, StateCache) for cache in caches):
        raise ValueError("this call has a StateCache, but use_cache is off: pass use_cache=True.")


def own_tensors(layer: Any) -> list[Tensor]:
    """What a cache layer of transformers holds: keys and values, states of convolutions and rules."""
    held = [getattr(layer, name, None) for name in ("keys", "values")]
    for name in ("conv_states", "recurrent_states"):
        held += getattr(layer, name, {}).values()
    return [x for x in held if isinstance(x, Tensor)]


def _state_layer(layer: Any) -> StateLayer:
    if isinstance(layer, LinearAttentionLayer):
        return LinearAndStateLayer(layer.number_of_states)
    return StateLayer()


def _file_name(layer: int) -> str:
    return f"layer-{layer:03d}.safetensors"


def _manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of the newest save in a folder, or None."""
    try:
        found = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path / MANIFEST} is damaged: {error}") from error
    whole = isinstance(found, dict) and isinstance(found.get("folder"), str) and isinstance(found.get("tokens"), list)
    if not whole or not all(type(n) is int and n >= 0 for n in found["tokens"]):
        raise ValueError(f"{path / MANIFEST} is damaged: it must name a folder and the tokens of each layer.")
    if not re.fullmatch(r"save-[0-9a-f]{16}", found["folder"]):
        raise ValueError(f"{path / MANIFEST} is damaged: {found['folder']!r} is not the name of a save.")
    if found.get("version") != VERSION:
        raise ValueError(f"{path / MANIFEST} has version {found.get('version')}; this linattn reads version {VERSION}.")
    return found


def _refuse_mixed_sharing(model: PreTrainedModel, attached: set[int]) -> None:
    """Layers that share keys need the same kind of cache: states receive only new keys, other layers all of them."""
    modules = [module for _, module in attention_modules(model) if not is_sliding(module)]
    sharing = any(getattr(module, "is_kv_shared_layer", False) for module in modules)
    if sharing and any(module.layer_idx not in attached for module in modules):
        raise ValueError(
            "layers of this model share keys and values: StateCache needs a kernel in all of its global layers. "
            "Attach one to each, or use a DynamicCache."
        )


def _clone(layer: Any) -> Any:
    new = object.__new__(type(layer))
    new.__dict__.update({name: _cloned(x) for name, x in layer.__dict__.items()})
    return new


def _cloned(x: Any) -> Any:
    if isinstance(x, (State, Tensor)):
        return x.clone()
    if isinstance(x, dict):
        return {key: _cloned(value) for key, value in x.items()}
    return x
