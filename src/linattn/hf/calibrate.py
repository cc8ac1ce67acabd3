"""Calibration: measures how many slots each head needs and assigns them greedily."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from ..functional.attention import attention
from ..nearfar import NearFar
from .attention import PADDING
from .biases import LayerBiases, biases_of
from .budgets import MEASURED, RULE, Calibration, Option, compact
from .call import call_for, evaluating, refuse_other_inputs
from .exact import exact as exact_attention
from .exact import sdpa
from .importance import layer_weights, output_layer
from .learned_sinks import Tokens, as_a_token
from .modules import (
    Layer,
    attention_modules,
    configs_of,
    head_counts,
    head_dim,
    is_attached,
    is_sliding,
    layer_keys,
    refuse_unsupported,
    set_interface,
)
from .own_softmax import InterfaceForward, has_own_softmax
from .replaced import replace_forward
from .unfinished import Unfinished

_PROBE = "linattn_probe"
BESIDE_RECALL = (0, 32, 128)  # slots that are tried for heads with recall
RECALL_FROM = 0.005  # the part of their layer's output that heads lose without it, from which on recall is tried

# kernel, the kv heads to measure or None for all -> an error for each
Measure = Callable[[NearFar, Sequence[int] | None], Tensor]

# module, query, key, value, the exact output, the options of the call
Show = Callable[[Any, Tensor, Tensor, Tensor, Tensor, dict[str, Any]], None]

# By module, so that models can be calibrated side by side.
_shown_to: WeakKeyDictionary[nn.Module, Show] = WeakKeyDictionary()
_biases: WeakKeyDictionary[nn.Module, LayerBiases] = WeakKeyDictionary()


def _say(sentence: str) -> None:
    print(f"linattn: {sentence}", file=sys.stderr)


def calibrate(
    model: PreTrainedModel,
    input_ids: Tensor,
    mean_slots: int = 192,
    *,
    kernel: NearFar | None = None,
    recall: int = 0,
    recall_price: int | None = None,
    save: str | os.PathLike[str] | None = None,
    progress: bool = True,
    say: Callable[[str], None] | None = _say,
) -> Calibration:
    """Measures which heads need many slots and assigns `mean_slots` per kv head on average.

    The text is repeated, so that heads which copy from far back show. A head may get as many slots as there are tokens, or
    recall if that removes more error for its memory. Takes about twenty forward passes. Use a text as long as those to be
    read later: the number of slots a head needs depends on the length.

    Args:
        model: a model without an attached kernel.
        input_ids: (passages, tokens) of a text. Errors are means over passages: several give budgets that serve other texts
            better, and take as many times as long. Both halves of an encoder-decoder read them.
        kernel: the NearFar whose window, sinks, block, alpha, recall_bits and state_bits are used; if not given, one with
            8-bit states and recall.
        recall: blocks that a head may recall, see `NearFar`; 0 for no recall at all. Decoders only.
        recall_price: memory of a recalling head, in slots; by default what it needs for a text as long as this. A lower
            price gives recall to more heads.
        save: a folder to write the result to; the model's own folder lets `attach` find it. What is measured is kept there
            layer by layer: the same call goes on where an earlier one was stopped.
        say: is given a sentence if recall was asked for and no head got it; by default it goes to stderr.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] < 1 or input_ids.shape[1] < 256:
        raise ValueError(f"calibrate takes (passages, tokens) of at least 256 tokens, got {tuple(input_ids.shape)}.")
    if is_attached(model):
        raise ValueError("calibrate measures a model's own attention: call linattn.hf.detach(model) first.")
    refuse_other_inputs(model)
    if save is not None:  # a folder that cannot be made fails before the work
        Path(save).mkdir(parents=True, exist_ok=True)
    near_far = kernel or compact()
    ids = repeating(input_ids)
    found = measured_layers(model, biased=True)
    modules = [module for _, module in found]
    _refuse_unequal_heads(modules)
    if recall and not all(getattr(module, "is_causal", True) for module in modules):
        raise ValueError("recall serves causal attention alone, and this model has layers that are not: pass recall=0.")
    options = [Option(m, 0, m) for m in sizes_to_try(ids.shape[1])]
    if recall:
        dim = head_dim(modules[0])
        kept = near_far.recall_price(ids.shape[1], dim, dim) if recall_price is None else recall_price
        options += [Option(m, recall, m + kept) for m in BESIDE_RECALL]
    shape = {name: getattr(near_far, name) for name in MEASURED}
    done = Unfinished(None if save is None else Path(save), model, ids, RULE, shape, options)

    passages = ids.split(1)
    with tqdm(total=len(passages) * len(modules), desc="layers", disable=None if progress else True) as bar:

        def errors_of(number: int) -> Tensor:
            def visit(layer: Layer, measure: Measure) -> Tensor:
                name = f"{number}.{layer}"
                row = done.rows[name] if name in done.rows else done.add(name, _try(near_far, options, ids, measure))
                bar.update()
                return row

            return torch.stack(measure_layers(model, passages[number], visit))

        errors = torch.stack([errors_of(number) for number in range(len(passages))]).mean(0)
    weights = torch.stack([layer_weights(model, passage, modules) for passage in passages]).mean(0)
    chosen: dict[Layer, list[int]] = {layer: [] for layer in layer_keys(found)}
    result = Calibration(shape, options, errors, weights, chosen).with_mean(mean_slots)
    if save is not None:
        result.save(save)
        done.finish()
    if recall and say is not None and not any(any(row) for row in result.recall.values()):
        say(_why_no_recall(options, ids.shape[1], mean_slots))
    return result


def _refuse_unequal_heads(modules: Sequence[Any]) -> None:
    counts = sorted({head_counts(module)[1] for module in modules})
    if len(counts) > 1:
        raise ValueError(
            f"calibrate shares slots among layers with equally many kv heads, and this model's have {counts}: give all heads "
            "the same number of slots, as in attach(model, NearFar(slots=128)), or budgets of your own."
        )


def _why_no_recall(options: Sequence[Option], length: int, mean_slots: int) -> str:
    cheapest = min(option.price for option in options if option.recall)
    costs = f"no head got recall: it costs as much memory as {cheapest} slots at {length} tokens, and"
    if cheapest >= length:
        return f"{costs} {length} slots hold every token. Recall pays off with NearFar(state_bits=32) or a lower recall_price."
    return (
        f"{costs} {mean_slots} slots per head are worth more elsewhere. Allow more slots, or set a lower recall_price."
    )


def repeating(input_ids: Tensor) -> Tensor:
    """A text of the same length whose second half repeats segments of the first."""
    n = input_ids.shape[1]
    a, b, c = n // 10, n * 4 // 10, n * 6 // 10
    return torch.cat([input_ids[:, :c], input_ids[:, a:b], input_ids[:, c : n - (b - a)]], 1)


def sizes_to_try(largest: int) -> list[int]:
    """Numbers of slots, each a half or a third more than the one before: coarser steps waste slots."""
    steps = sorted(step << i for step in (8, 12) for i in range(largest.bit_length()))
    return [0, *(m for m in steps if largest // 256 <= m < largest), largest]


def _try(kernel: NearFar, options: Sequence[Option], ids: Tensor, measure: Measure) -> Tensor:
    """Errors (kv heads, options) of one layer; options with recall come last.

    Recall is slow to measure and is tried only where it may pay off; elsewhere it counts as the same slots without it.
    """
    plain: dict[int, Tensor] = {}
    for slots in sorted({option.slots for option in options}):
        whole = slots > 0 and slots + kernel.window + kernel.sinks >= ids.shape[1]
        plain[slots] = plain[0] * 0 if whole else measure(kernel.with_slots(slots, 0), None)
    columns = []
    for option in options:
        column = plain[option.slots].clone()
        copying = (plain[max(BESIDE_RECALL)] > RECALL_FROM).nonzero().flatten().tolist() if option.recall else []
        if copying:
            column[copying] = measure(kernel.with_slots(option.slots, option.recall), copying)
        columns.append(column)
    return torch.stack(columns, -1)


def measure_layers(model: PreTrainedModel, ids: Tensor, visit: Callable[[Layer, Measure], Tensor]) -> list[Tensor]:
    """The result of `visit(layer, errors)` for every global attention layer, given exact inputs.

    An error is |W_o (approximate - exact)|^2 / |W_o exact|^2, of one kv head's part in the numerator and of the whole layer
    in the denominator. Cross-attention is measured as `generate` runs it: by the state that the first query leaves.
    """
    modules = measured_layers(model, biased=True)
    biases = {module: biases_of(name, module, modules) for name, module in modules}
    keys = {module: key for key, (_, module) in zip(layer_keys(modules), modules, strict=True)}
    rows: dict[int, Tensor] = {}

    def show(module: Any, query: Tensor, key: Tensor, value: Tensor, exact: Tensor, options: dict[str, Any]) -> None:
        H, G = key.shape[1], query.shape[1] // key.shape[1]
        sinks = options.pop("sinks")
        attend = attention if options["is_causal"] or query.shape[2] == key.shape[2] else _cross_attention
        size_of = _sizes_by_head(module, H, G, value.shape[-1])
        total = size_of(exact, range(H)).sum()

        def measure(kernel: NearFar, heads: Sequence[int] | None) -> Tensor:
            heads = range(H) if heads is None else heads
            queries = [h * G + g for h in heads for g in range(G)]
            own = biases[module].given_to(kernel)
            own = own.of_heads(queries) if own.positions else own
            tokens = Tokens(query[:, queries], key[:, list(heads)], value[:, list(heads)], None)
            if sinks is not None:
                tokens = as_a_token(tokens, sinks[queries], options["scale"], True)
                own = own.changed(sinks=own.sinks + 1)
            out = attend(*tokens[:3], kernel=own, **options)[:, :, -query.shape[2] :]
            return size_of(out - exact[:, queries], heads) / total

        rows[id(module)] = visit(keys[module], measure)

    with show_attention(model, show, biased=True), torch.inference_mode():
        model(**call_for(model, ids))
    return [rows[id(module)] for _, module in modules]


def measured_layers(model: PreTrainedModel, *, biased: bool = False) -> list[tuple[str, Any]]:
    """The global layers. biased: also those that cap or bias their scores, or have learned sinks."""
    found = [(name, module) for name, module in attention_modules(model) if not is_sliding(module)]
    for name, module in found:
        refuse_unsupported(name, module, near_far=biased)
    return found


def _cross_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """By the state of the keys that a call with the first query returns."""
    _, state = attention(query[:, :, :1], key, value, return_state=True, **options)
    out, _ = attention(query, key[:, :, :0], value[:, :, :0], state=state, return_state=True, **options)
    return out


def _sizes_by_head(module: nn.Module, H: int, G: int, M: int) -> Callable[[Tensor, Sequence[int]], Tensor]:
    """|W_o x|^2 of each kv head's part, as a function of x (B, h G, L, M) and the h kv heads that it belongs to."""
    weight = _output_weight(module)
    if weight is None:
        gram = torch.eye(G * M).expand(H, -1, -1)
    else:
        parts = weight.reshape(-1, H, G * M).transpose(0, 1)  # (H, hidden, G M)
        gram = parts.mT @ parts

    def size_of(x: Tensor, heads: Sequence[int]) -> Tensor:
        rows = x.float().unflatten(1, (-1, G)).transpose(2, 3).flatten(3).transpose(0, 1).flatten(1, 2)  # (h, B L, G M)
        return ((rows @ gram[list(heads)]) * rows).sum((1, 2))

    return size_of


def _output_weight(module: Any) -> Tensor | None:
    """(hidden, heads * dim): the matrix that mixes the heads, where the module has it."""
    layer = output_layer(module)
    if layer is None:
        return None
    weight: Tensor = layer.weight.detach().float()
    return weight if isinstance(layer, nn.Linear) else weight.T  # GPT-2's Conv1D is the other way round


@contextmanager
def show_attention(model: PreTrainedModel, show: Show, *, biased: bool = False) -> Iterator[None]:
    """Runs the model's attention exactly, and shows each global layer's tensors to a function.

    biased: also of layers that cap or bias their scores, or have learned sinks; the options then have the entry "sinks".
    """
    configs = configs_of(model)
    before = [config._attn_implementation for config in configs]
    modules, replaced = measured_layers(model, biased=biased), []
    for _, module in modules:
        _shown_to[module] = show
    if any(has_own_softmax(module) for _, module in modules):
        replaced = [replace_forward(module, InterfaceForward(module, _probe, "cache")) for _, module in modules]
        for config in configs:
            config._attn_implementation_internal = PADDING
    else:
        set_interface(model, _PROBE)
    found = attention_modules(model)
    for name, module in found if biased else []:
        _biases[module] = biases_of(name, module, found)
    try:
        with evaluating(model):
            yield
    finally:
        for one in replaced:
            one.restore()
        for config, implementation in zip(configs, before, strict=False):
            config._attn_implementation_internal = implementation
        for _, module in found:
            _shown_to.pop(module, None)
            _biases.pop(module, None)


def _probe(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    biases, sinks, scale = _biases.get(module), kwargs.get("s_aux"), kwargs.get("scaling")
    if biases is not None:
        biases.check_cap(module, kwargs.get("softcap"))
    given = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if given is None else given)
    if sinks is None and (biases is None or not biases.any):
        out, weights = sdpa(module, query, key, value, mask, **kwargs)
    else:
        scale, weights = query.shape[-1] ** -0.5 if scale is None else scale, None
        if mask is None and causal:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
        cap, bias = (None, None) if biases is None else (biases.cap, biases.exact(query, key, None))
        out = exact_attention(query, key, value, mask, scale, sinks=sinks, cap=cap, bias=bias).transpose(1, 2)
    if (show := _shown_to.get(module)) is not None:
        options = {"is_causal": causal, "scale": scale, "enable_gqa": True}
        show(module, query, key, value, out.transpose(1, 2), options | ({} if biases is None else {"sinks": sinks}))
    return out, weights


AttentionInterface.register(_PROBE, _probe)
AttentionMaskInterface.register(_PROBE, sdpa_mask)
