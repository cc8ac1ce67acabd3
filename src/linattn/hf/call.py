"""The call by which a model reads a text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def call_for(model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
    """Keyword arguments of the call that reads (1, tokens) without a cache.

    The decoder of an encoder-decoder reads the same text after its start token. It leaves out the last token: with as many
    queries as keys, cross-attention would be taken for self-attention.
    """
    options: dict[str, Any] = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        options["decoder_input_ids"] = torch.cat([torch.full_like(ids[:, :1], _start(model)), ids[:, :-2]], 1)
    if model.can_generate():
        options["use_cache"] = False
    return options


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Context: the model without dropout and gradient checkpointing. Each module then trains or not as before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def refuse_other_inputs(model: PreTrainedModel) -> None:
    """Raises for models that do not read tokens, such as Whisper."""
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"budgets are measured on tokens, and {type(model).__name__} reads {model.main_input_name}: give all heads "
            "the same number of slots, as in attach(model, NearFar(slots=128))."
        )


def _start(model: PreTrainedModel) -> int:
    """The token that a decoder starts with."""
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    found = (getattr(config, name, None) for config in (model.config, model.generation_config) for name in names)
    return next((token for token in found if isinstance(token, int)), 0)
