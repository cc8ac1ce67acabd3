"""Caches that drop keys (`eviction.py`) in a model, with the memory of near/far: which head keeps how many keys.

As published, all heads of a layer keep equally many. Three ways differ: PyramidKV's budgets fall from the first layer to the
last, DuoAttention's few retrieval heads keep every key, and `calibrated` gives any rule near/far's budgets by head.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ..nearfar import NearFar
from .budgets import Calibration
from .eviction import RULES, Eviction, rotary_frequencies
from .modules import Layer, attention_modules, head_counts, head_dim, is_sliding

NAMES = (*RULES[:4], "pyramidkv", *RULES[4:], "duo")
LEAST = 64  # keys that a layer keeps under PyramidKV, at least
RECENT = 128  # keys that a head without far keys keeps under DuoAttention, at least


def baselines_for(
    model: PreTrainedModel,
    names: Sequence[str],
    kernel: NearFar,
    mean_slots: float,
    *,
    found: Calibration | None = None,
    length: int = 0,
    calibrated: bool = False,
) -> dict[str, dict[Layer, Eviction]]:
    """Name -> the kernels of a model's global layers, for `attach`; all that can be made if no name is given.

    Each has the memory of near/far with `mean_slots` slots of `kernel` in a kv head on average, at its peak.

    Args:
        found: near/far's budgets by head, which DuoAttention and `calibrated` need.
        length: of the texts, all of which DuoAttention's retrieval heads keep.
        calibrated: also each rule with near/far's budgets, named "<rule>, calibrated".
    """
    modules = [module for _, module in attention_modules(model) if not is_sliding(module)]
    dim, (heads, kv_heads) = head_dim(modules[0]), head_counts(modules[0])
    entries = kernel.state_bytes(round(mean_slots), dim, dim, heads // kv_heads) // kernel.entry_bytes(dim, dim)
    keys, layers = entries - kernel.block, len(modules)  # a block more is held until its end
    frequencies = rotary_frequencies(modules[0].config)
    options: dict[str, Any] = {"block": kernel.block, "bits": kernel.state_bits, "frequencies": frequencies}
    if found is None and (calibrated or "duo" in names):
        raise ValueError("DuoAttention and calibrated baselines need budgets by head: calibrate the model first.")
    lacking = {"expected": frequencies is None, "duo": found is None}
    made: dict[str, list[Eviction]] = {}
    for name in names or [name for name in NAMES if not lacking.get(name)]:
        if name == "pyramidkv":
            made[name] = pyramidkv(layers, keys, **options)
        elif name == "duo":
            assert found is not None
            made[name] = duo(found, keys, length, **options)
        else:
            made[name] = [Eviction(name, keys, **options) for _ in range(layers)]
            if calibrated and found is not None:
                made[f"{name}, calibrated"] = with_budgets(name, found, keys, **options)
    names_of_layers = [module.layer_idx for module in modules]
    return {name: dict(zip(names_of_layers, kernels, strict=True)) for name, kernels in made.items()}


def pyramidkv(layers: int, keys: int, **options: Any) -> list[Eviction]:
    """SnapKV's rule with `keys` in a layer on average, more in the first layers and fewer in the last (Cai et al. 2024)."""
    least = min(LEAST, keys)
    most = 2 * keys - least
    steps = [round(most - i * (most - least) / max(1, layers - 1)) for i in range(layers)]
    return [Eviction("snapkv", count, **options) for count in steps]


def with_budgets(rule: str, found: Calibration, keys: int, **options: Any) -> list[Eviction]:
    """Near/far's budgets, `keys` on average: a head keeps as many keys more than another as near/far has slots more there."""
    beside = keys - round(found.mean_slots)
    prices = [[found.options[i].price for i in row] for row in found.chosen.values()]
    return [Eviction(rule, [price + beside for price in row], **options) for row in prices]


def duo(found: Calibration, keys: int, length: int, **options: Any) -> list[Eviction]:
    """Retrieval heads keep all of `length` tokens, the others the first and the last ones (DuoAttention, Xiao et al. 2024).

    As many are retrieval heads as `keys` per head on average allow. The paper trains gates to find them; here they are the
    heads that lose most without far keys, by the errors that calibration measured.
    """
    lost = found.errors[..., 0] * found.weights[:, None]  # without a slot: the cheapest option comes first
    layers, heads = lost.shape
    total, few = keys * layers * heads, min(keys, options.get("sinks", 4) + RECENT)
    count = min(layers * heads, (total - few * layers * heads) // max(1, length - few))
    retrieval = set(lost.flatten().topk(count).indices.tolist())
    rest = min(length, (total - count * length) // max(1, layers * heads - count))
    budgets = [[length if i * heads + h in retrieval else rest for h in range(heads)] for i in range(layers)]
    return [Eviction("streaming", row, **options) for row in budgets]
