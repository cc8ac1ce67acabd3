"""Attached models under linattn.parallel.sequence_parallel: positions, labels and losses of shards."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import routing
from .attention import NAME
from .hybrids.layers import linear_layers
from .modules import attention_modules, is_sliding

IGNORED = -100  # labels that do not count, in transformers


class ShardInputs:
    """A forward pre-hook and a forward hook of an attached model, which do nothing outside of sequence_parallel.

    Before a call: position_ids of the whole sequence, labels moved across the borders of shards. After it: the loss is the
    mean over the tokens of all processes.
    """

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        router = routing.current()
        if router is None:
            return None
        parameters = list(inspect.signature(type(model).forward).parameters)[1:]
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        _refuse(model, given)
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if not isinstance(tokens, Tensor):
            return None
        B, T = tokens.shape[:2]
        start, empty = router.start_of(T)
        if empty:
            raise ValueError("a process has no tokens, which transformers' models do not take: give each of them some.")
        if "position_ids" in parameters and given.get("position_ids") is None:
            given["position_ids"] = torch.arange(start, start + T, device=tokens.device).expand(B, T)
        if "use_cache" in parameters and given.get("use_cache") is None:
            given["use_cache"] = False
        if isinstance(given.get("labels"), Tensor):
            given["shift_labels"] = router.next_labels(given["labels"], IGNORED)
            given["num_items_in_batch"] = torch.ones((), device=tokens.device)  # the sum; `after` divides
        return (), given

    def after(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        router = routing.current()
        if router is None or kwargs.get("shift_labels") is None or getattr(output, "loss", None) is None:
            return None
        counted = (kwargs["shift_labels"] != IGNORED).sum()
        output["loss"] = router.mean_loss(output.loss, counted)
        return output


def _refuse(model: Any, given: dict[str, Any]) -> None:
    """Raises for what would silently act on one shard alone."""
    cache = given.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise ValueError("a cache holds the tokens of one process: under sequence_parallel call the model without one.")
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    layers = attention_modules(model)
    if any(is_sliding(module) for _, module in layers):
        raise ValueError(f"{type(model).__name__} has layers with a sliding window, which have no form over shards.")
    if layers and model.config._attn_implementation != NAME:
        raise ValueError(
            f"the softmax layers of {type(model).__name__} keep their own attention and would see one shard only: attach it "
            'with kernel="softmax", "nearfar" or another one.'
        )
    if isinstance(tokens, Tensor) and not tokens.is_cpu and linear_layers(model):
        raise ValueError(f"the linear layers of {type(model).__name__} have a form over shards on CPUs only.")
