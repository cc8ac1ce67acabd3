"""Queries, keys and values of a pretrained model's heads, as its attention sees them (after rotary positions)."""

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .calibrate import measured_layers, show_attention
from .modules import layer_keys


@torch.inference_mode()
def read_heads(
    model: PreTrainedModel, input_ids: Tensor, layers: Sequence[int] | None = None
) -> dict[int, tuple[Tensor, Tensor, Tensor, bool]]:
    """Layer -> queries (heads, tokens, dim), keys and values (kv heads, tokens, dim), and whether the layer is causal.

    Queries are scaled so that the logits are q.k / sqrt(dim), whatever factor the model uses.

    Args:
        input_ids: (1, tokens).
        layers: which layers; None for all with global attention.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"read_heads takes one text, (1, tokens), got shape {tuple(input_ids.shape)}.")
    layer_numbers(model)  # raises where a number is not enough
    found: dict[int, tuple[Tensor, Tensor, Tensor, bool]] = {}

    def show(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Tensor, options: dict[str, Any]) -> None:
        layer = int(module.layer_idx)
        if layers is not None and layer not in layers:
            return
        dim = query.shape[-1]
        scale = options["scale"]
        factor = 1.0 if scale is None else scale * dim**0.5
        found[layer] = (query[0] * factor, key[0].clone(), value[0].clone(), options["is_causal"])

    with show_attention(model, show):
        model(input_ids, **({"use_cache": False} if model.can_generate() else {}))
    missing = sorted(set(layers or ()) - set(found))
    if missing:
        raise ValueError(f"the model has no layer {missing[0]} with global attention: choose from {sorted(found)}.")
    return found


def capture_heads(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    layers: Sequence[int],
    *,
    tokens: int = 2048,
    name: str = "",
    dtype: str = "float32",
) -> dict[str, Any]:
    """Heads of some layers on a text, as plain data for the explorer.

    Args:
        tokens: at most so many of the text are read.
        name: of the model, for the page.
        dtype: "float32" or "float16", of the numbers in the result.
    """
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] == 0:
        raise ValueError("the text has no tokens.")
    read = read_heads(model, ids, layers)
    first = next(iter(read.values()))
    return {
        "model": name,
        "text": text,
        "tokens": [tokenizer.decode([i]) for i in ids[0].tolist()],
        "dim": first[0].shape[-1],
        "causal": first[3],
        "dtype": dtype,
        "layers": {str(layer): _as_data(*read[layer][:3], dtype) for layer in sorted(read)},
        "available": layer_numbers(model),
    }


def layer_numbers(model: PreTrainedModel) -> list[int]:
    """The layers with global attention, one in each."""
    keys = layer_keys(measured_layers(model))
    numbers = [key for key in keys if isinstance(key, int)]
    if len(numbers) < len(keys):
        raise ValueError(
            f"{type(model).__name__} has several attentions of the same number, such as {keys[0]!r} and {keys[-1]!r}: heads "
            "are read from models with one in each layer."
        )
    return numbers


def _as_data(query: Tensor, key: Tensor, value: Tensor, dtype: str) -> dict[str, Any]:
    def encode(x: Tensor) -> str:
        numbers = x.detach().to(getattr(torch, dtype)).contiguous().numpy()
        return base64.b64encode(numbers.tobytes()).decode()

    return {
        "q": encode(query),
        "k": encode(key),
        "v": encode(value),
        "heads": query.shape[0],
        "kv_heads": key.shape[0],
    }
