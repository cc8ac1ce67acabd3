"""One decode step of several sequences: a cache that is made of theirs.

Attention goes row by row, each on its own keys or state, so that rows of any lengths share a step and none sees another's
padding. Recurrent states have one size: they are gathered into a batch, and the rows become views of it.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer


class RowsLayer(CacheLayerMixin):
    """The attention layers of several sequences, one behind each row of the batch."""

    is_sliding = False

    def __init__(self, rows: list[Any]):
        super().__init__()
        self.rows = rows
        self.current: list[tuple[Tensor, Tensor]] = []  # what each row attends to in this step

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Gives each row its new key and value (rows, heads, 1, dim)."""
        pairs = zip(self.rows, key_states.split(1), value_states.split(1), strict=True)
        self.current = [row.update(key, value) for row, key, value in pairs]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return max(row.get_seq_length() for row in self.rows)

    def get_max_length(self) -> int:
        return -1


class GatheredLayer(LinearAttentionLayer):
    """The recurrent layers of several sequences, gathered into one batch; their own tensors become views of it."""

    def __init__(self, rows: list[Any]):
        first = rows[0]
        super().__init__(first.number_of_states)
        for name in ("conv_kernel_size", "device", "dtype", "record_past"):
            setattr(self, name, getattr(first, name))
        for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            setattr(self, name, dict(getattr(first, name)))
        for name in ("conv_states", "recurrent_states"):
            for i, x in getattr(first, name).items():
                if x is None:
                    continue
                batch = torch.cat([getattr(row, name)[i] for row in rows])
                getattr(self, name)[i] = batch
                for row, view in zip(rows, batch.split(1), strict=True):
                    getattr(row, name)[i] = view


class GatheredRowsLayer(GatheredLayer, RowsLayer):  # type: ignore[override]
    """Of layers that have both attention and a recurrent state."""

    def __init__(self, rows: list[Any]):
        RowsLayer.__init__(self, rows)
        GatheredLayer.__init__(self, rows)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if args:
            RowsLayer.lazy_initialization(self, *args)
        else:
            GatheredLayer.lazy_initialization(self, **kwargs)

    def get_max_length(self) -> int:
        return -1


class BatchCache(Cache):
    """The cache of one decode step. Rows are updated through it, so nothing has to be scattered afterwards."""

    def __init__(self, rows: list[Cache]):
        self.rows = rows
        super().__init__(layers=[_batched(list(layers)) for layers in zip(*(row.layers for row in rows), strict=True)])


def _batched(rows: list[Any]) -> Any:
    recurrent = isinstance(rows[0], LinearAttentionCacheLayerMixin)
    if recurrent and isinstance(rows[0], CacheLayerMixin):
        return GatheredRowsLayer(rows)
    return GatheredLayer(rows) if recurrent else RowsLayer(rows)
