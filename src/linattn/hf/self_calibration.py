"""Budgets without a text: `attach(model, kernel="nearfar", mean_slots=192)` measures the model on a text of its own.

A language model writes the text: eight samples side by side, which `calibrate` makes repeat each other, so that heads that copy
show. Encoders and encoder-decoders are measured on random tokens. The result is kept in the cache folder, so that a model is
measured once. A calibration on a text (`linattn.hf.calibrate`) takes precedence where it was saved beside the model.
"""

import hashlib
import re
import sys
import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .._files import cache_folder
from ..nearfar import NearFar
from .budgets import RULE, Calibration, compact
from .calibrate import calibrate
from .call import evaluating, refuse_other_inputs
from .fingerprint import weights_digest
from .modules import attention_modules, head_counts, head_dim, is_sliding

LENGTH = 2048  # tokens to measure on
SAMPLES = 8  # that are written side by side: decoding a batch costs little more than decoding one
RECALL = 64  # blocks that a head may recall where memory alone is given
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def find_or_calibrate(
    model: PreTrainedModel,
    kernel: NearFar | None = None,
    *,
    mean_slots: int | None = None,
    memory: int | str | None = None,
    length: int = LENGTH,
) -> Calibration:
    """Budgets of a model: saved beside it, kept in the cache folder, or measured now, which one line says.

    Args:
        kernel: its window, sinks, block, alpha, recall, recall_bits and state_bits are used; budgets that were saved for
            others are not. Without one, those of the saved calibration, or the defaults.
        mean_slots: slots of a kv head on average.
        memory: instead, the size of all near/far states of one sequence, in bytes or as "64MiB"; then recall is given to
            heads that are worth it, unless slots for all tokens take less memory, as in states of 8 bits. The far tokens of
            heads with recall are counted for texts of `length` tokens.
        length: tokens of the text to measure on, if nothing is saved: about as many as will be read.
    """
    if (mean_slots is None) == (memory is None):
        raise ValueError("give either mean_slots or memory, not both.")
    found = Calibration.find(model)
    if found is not None and kernel is not None and not found.measured(kernel):
        found = None
    if kernel is None:
        kernel = compact() if found is None else found.near_far()
    recall = max(kernel.recalls(1)) if isinstance(kernel.recall, int) else max(kernel.recall)
    if memory is not None:
        mean_slots = slots_within(model, kernel, parse_bytes(memory))
        recall = recall or (RECALL if recall_pays(model, kernel, length) else 0)
    assert mean_slots is not None
    recall = recall if _decoder(model) else 0
    if found is None:
        found = _kept_or_measured(model, kernel.with_slots(0, 0), recall, length)
    return found.with_mean(mean_slots, recall=recall > 0)


def parse_bytes(size: int | str) -> int:
    """Bytes of "64MiB", "1.5 GB" or a plain number."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"memory must be a number of bytes or a size such as '64MiB', got {size!r}.")
    return int(float(match[1]) * UNITS[match[2].upper()])


def slots_within(model: PreTrainedModel, kernel: NearFar, memory: int) -> int:
    """Slots of a kv head on average, if the near/far states of one sequence may take `memory` bytes."""
    fixed, each = 0, 0
    for _, module in attention_modules(model):
        if is_sliding(module):
            continue
        dim, (heads, kv_heads) = head_dim(module), head_counts(module)
        fixed += kv_heads * kernel.state_bytes(0, dim, dim, heads // kv_heads)
        each += kv_heads * (kernel.state_bytes(1, dim, dim, 1) - kernel.state_bytes(0, dim, dim, 1))
    if memory < fixed:
        raise ValueError(
            f"a window of {kernel.window} tokens alone takes {fixed / 2**20:.1f} MiB in this model, more than memory="
            f"{memory / 2**20:.1f} MiB: allow more, or pass a NearFar with a smaller window."
        )
    return (memory - fixed) // max(1, each)


def recall_pays(model: PreTrainedModel, kernel: NearFar, length: int) -> bool:
    """Whether a head with recall takes less memory for a text than slots for all of its tokens, which are exact."""
    dims = [head_dim(module) for _, module in attention_modules(model) if not is_sliding(module)]
    return any(kernel.recall_price(length, dim, dim) < length for dim in dims)


@torch.inference_mode()
def own_text(model: PreTrainedModel, length: int = LENGTH) -> Tensor:
    """(1, length) tokens that a language model writes by itself: `SAMPLES` samples one after the other, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    ids = random_tokens(model, SAMPLES).T
    if _start_token(model) is not None:
        ids = ids[:1].expand(SAMPLES, 1)
    cache = DynamicCache(config=model.config)
    written = [ids]
    with evaluating(model):
        for _ in range(-(-length // SAMPLES) - 1):
            logits = model(written[-1], past_key_values=cache, logits_to_keep=1).logits[:, -1].float().cpu()
            written.append(torch.multinomial(logits.softmax(-1), 1, generator=generator).to(ids.device))
    return torch.cat(written, 1).reshape(1, -1)[:, :length]


def random_tokens(model: PreTrainedModel, length: int = LENGTH) -> Tensor:
    """(1, length) random tokens of a model's vocabulary, its start token first if it has one; always the same."""
    config: Any = model.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size // 50, config.vocab_size, (1, length), generator=generator)
    start = _start_token(model)
    if start is not None:
        ids[0, 0] = start
    return ids.to(next(model.parameters()).device)


def _start_token(model: PreTrainedModel) -> int | None:
    config: Any = model.config.get_text_config(decoder=True)
    start = getattr(config, "bos_token_id", None)
    return start if isinstance(start, int) and 0 <= start < config.vocab_size else None


def _kept_or_measured(model: PreTrainedModel, kernel: NearFar, recall: int, length: int) -> Calibration:
    refuse_other_inputs(model)
    length = min(length, _longest(model) or length)
    folder = cache_folder() / "budgets" / _fingerprint(model, kernel, recall, length)
    if (folder / "linattn-budgets.json").is_file():
        return Calibration.load(folder)
    start = time.perf_counter()
    writes = model.can_generate() and not model.config.is_encoder_decoder
    kind, text = ("a text that the model wrote", own_text) if writes else ("random tokens", random_tokens)
    ids = text(model, length)
    found = calibrate(model, ids, 192, kernel=kernel, recall=recall, save=folder, say=None)
    print(
        f"linattn: measured which heads need slots, on {kind} ({time.perf_counter() - start:.0f} s), "
        f"kept in {folder}; linattn.hf.calibrate measures on a text of yours.",
        file=sys.stderr,
    )
    return found


def _longest(model: PreTrainedModel) -> int | None:
    """Tokens that a model has positions for; None: any number. RoBERTa's count from behind that of the padding token."""
    config: Any = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    unused = max((1 + m.padding_idx for m in tables if getattr(m, "padding_idx", None) is not None), default=0)
    return longest and longest - unused


def _fingerprint(model: PreTrainedModel, kernel: NearFar, recall: int, length: int) -> str:
    """Of what the budgets depend on: configuration, some of the weights, and the kernel."""
    digest = hashlib.sha256(f"{RULE} {length} {recall} {kernel.extra_repr()} {kernel.recall_bits}".encode())
    config = model.config.to_dict()
    digest.update(repr(sorted((k, str(v)) for k, v in config.items() if not k.startswith("_"))).encode())
    digest.update(weights_digest(model))
    return digest.hexdigest()[:24]


def _decoder(model: PreTrainedModel) -> bool:
    modules = [module for _, module in attention_modules(model) if not is_sliding(module)]
    return all(getattr(module, "is_causal", True) for module in modules)
