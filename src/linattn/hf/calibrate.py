"""Which heads need how many slots: measured on a text, handed out greedily, kept beside the model."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .._functional import attention
from ..nearfar import NearFar
from ..sums import _safetensors
from .attach import attention_modules, is_sliding, refuse_unsupported

STEM = "linattn-budgets"
_PROBE = "linattn_probe"


@dataclass
class Calibration:
    """Budgets per layer and kv head, and the errors they were chosen by.

    Attributes:
        kernel: the arguments of the NearFar kernel that was measured, slots aside.
        budgets: layer -> slots of each kv head.
        sizes: the numbers of slots that were tried.
        errors: (layers, kv heads, sizes), |W_o (approximate - exact)|^2 / |W_o exact|^2 of a layer's output.
    """

    kernel: dict[str, Any]
    budgets: dict[int, list[int]]
    sizes: list[int]
    errors: Tensor

    @property
    def mean_slots(self) -> float:
        heads = [m for row in self.budgets.values() for m in row]
        return sum(heads) / len(heads)

    def near_far(self) -> NearFar:
        return NearFar(**self.kernel)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes linattn-budgets.json and .safetensors into a folder, where `attach` finds them."""
        path = Path(folder)
        content = {**asdict(self), "budgets": {str(k): v for k, v in self.budgets.items()}}
        del content["errors"]
        _safetensors.save(path / f"{STEM}.safetensors", {"errors": self.errors}, {"format": STEM})
        temporary = path / f".{STEM}.{os.getpid()}"
        temporary.write_text(json.dumps(content, indent=1))
        os.replace(temporary, path / f"{STEM}.json")

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> "Calibration":
        path = Path(folder)
        try:
            content = json.loads((path / f"{STEM}.json").read_text())
            tensors, _ = _safetensors.load(path / f"{STEM}.safetensors")
            budgets = {int(k): [int(m) for m in v] for k, v in content["budgets"].items()}
            return Calibration(content["kernel"], budgets, content["sizes"], tensors["errors"])
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path / STEM}.json is not a calibration of linattn: {error!r}") from error

    @staticmethod
    def find(model: PreTrainedModel) -> "Calibration | None":
        """The calibration in the folder that a model was loaded from, if there is one."""
        folder = Path(getattr(model, "name_or_path", "") or "/nonexistent")
        return Calibration.load(folder) if (folder / f"{STEM}.json").is_file() else None

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draws budgets and errors per layer and head. Needs matplotlib."""
        from matplotlib.figure import Figure

        layers = sorted(self.budgets)
        chosen = torch.tensor([self.budgets[i] for i in layers]).T
        index = torch.tensor([[self.sizes.index(m) for m in self.budgets[i]] for i in layers])
        left = self.errors.gather(2, index.unsqueeze(-1)).squeeze(-1).T
        figure = Figure(figsize=(10, 5), layout="constrained")
        for axis, table, title in zip(figure.subplots(2, 1), (chosen, left), ("slots", "error that is left")):
            shown = axis.imshow(table.clamp_min(1e-9).log10(), aspect="auto", cmap="viridis")
            axis.set(title=f"{title} (log10)", xlabel="layer", ylabel="kv head")
            figure.colorbar(shown, ax=axis)
        figure.savefig(path)


def calibrate(
    model: PreTrainedModel,
    input_ids: Tensor,
    mean_slots: int = 192,
    *,
    kernel: NearFar | None = None,
    save: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Calibration:
    """Measures which heads need many slots and hands out `mean_slots` per kv head on average.

    The text is made to repeat itself, so that heads which copy from far back show; a head may get as many slots as there
    are tokens. About ten forward passes of the text; two thousand tokens of ordinary prose are enough.

    Args:
        model: a model that nothing is attached to.
        input_ids: (1, tokens) of a text.
        kernel: the NearFar whose window, sinks, block and alpha are used.
        save: a folder to write the result to; the model's own folder lets `attach` find it.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 256:
        raise ValueError(f"calibrate takes (1, tokens) of at least 256 tokens, got shape {tuple(input_ids.shape)}.")
    if getattr(model, "_linattn", None) is not None:
        raise ValueError("calibrate measures a model's own attention: call linattn.hf.detach(model) first.")
    kernel = kernel or NearFar()
    ids = repeating(input_ids)
    largest = ids.shape[1]
    sizes = [m for m in (8 * 2**i for i in range(32)) if m < largest] + [largest]
    found = [(n, m) for n, m in attention_modules(model) if not is_sliding(m)]
    for name, module in found:
        refuse_unsupported(name, module)
    order = {id(module): i for i, (_, module) in enumerate(found)}
    with tqdm(total=len(found), desc="calibrate", unit="layer", disable=not progress) as bar, _probing(model) as probe:
        rows: dict[int, Tensor] = {}

        def measure(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, exact: Tensor, scale: Any, causal: bool) -> None:
            if id(module) in order:
                rows[order[id(module)]] = _errors(kernel, sizes, module, query, key, value, exact, scale, causal)
                bar.update()

        probe.append(measure)
        with torch.inference_mode():
            model(ids, use_cache=False)
    errors = torch.stack([rows[i] for i in range(len(found))])
    layers = [int(module.layer_idx) for _, module in found]
    budgets = hand_out(errors, sizes, mean_slots)
    shape = {"window": kernel.window, "sinks": kernel.sinks, "block": kernel.block, "alpha": kernel.alpha}
    result = Calibration(shape, dict(zip(layers, budgets)), sizes, errors)
    if save is not None:
        result.save(save)
    return result


def repeating(input_ids: Tensor) -> Tensor:
    """The same number of tokens, of which the second half takes up stretches of the first again."""
    n = input_ids.shape[1]
    a, b, c = n // 10, n * 4 // 10, n * 6 // 10
    return torch.cat([input_ids[:, :c], input_ids[:, a:b], input_ids[:, c : n - (b - a)]], 1)


def hand_out(errors: Tensor, sizes: Sequence[int], mean_slots: int) -> list[list[int]]:
    """Greedy: the step that removes most error per slot goes first, until the mean is reached."""
    layers, heads, _ = errors.shape
    best = errors.cummin(-1).values.tolist()  # more slots never count as worse
    level = [[0] * heads for _ in range(layers)]
    left = mean_slots * layers * heads - sizes[0] * layers * heads
    while True:
        steps = [
            ((best[i][h][level[i][h]] - best[i][h][to]) / (sizes[to] - sizes[level[i][h]]), i, h, to)
            for i in range(layers)
            for h in range(heads)
            for to in range(level[i][h] + 1, len(sizes))
            if sizes[to] - sizes[level[i][h]] <= left
        ]
        gain, i, h, to = max(steps, default=(0.0, 0, 0, 0))
        if gain <= 0:
            return [[sizes[m] for m in row] for row in level]
        left -= sizes[to] - sizes[level[i][h]]
        level[i][h] = to


def _errors(
    kernel: NearFar,
    sizes: Sequence[int],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    exact: Tensor,
    scale: float | None,
    causal: bool,
) -> Tensor:
    """(kv heads, sizes) of one layer; query, key, value as in linattn.attention, exact (B, H, L, M)."""
    H, M = key.shape[1], value.shape[-1]
    G = query.shape[1] // H
    weight = _output_weight(module)
    if weight is None:
        gram = torch.eye(G * M).expand(H, -1, -1)
    else:
        parts = weight.reshape(-1, H, G * M).transpose(0, 1)  # (H, hidden, G M)
        gram = parts.mT @ parts

    def size_of(x: Tensor) -> Tensor:
        rows = x.unflatten(1, (H, G)).transpose(2, 3).flatten(3).transpose(0, 1).flatten(1, 2)  # (H, B L, G M)
        return ((rows @ gram) * rows).sum((1, 2))

    total = size_of(exact).sum()
    table = []
    for m in sizes:
        out = attention(query, key, value, kernel=kernel.with_slots(m), is_causal=causal, scale=scale, enable_gqa=True)
        table.append(size_of(out - exact) / total)
    return torch.stack(table, -1)


def _output_weight(module: Any) -> Tensor | None:
    """(hidden, heads * dim): the matrix that mixes the heads, where the module has it."""
    for name in ("o_proj", "out_proj", "dense", "c_proj"):
        layer = getattr(module, name, None)
        if layer is not None and hasattr(layer, "weight"):
            weight = layer.weight.detach().float()
            return weight if isinstance(layer, nn.Linear) else weight.T  # GPT-2's Conv1D is the other way round
    return None


@contextmanager
def _probing(model: PreTrainedModel) -> Iterator[list[Any]]:
    """Runs the model's attention exactly, and shows each layer's tensors to the functions in the list."""
    seen: list[Any] = []

    def probe(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        out, weights = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        given = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if given is None else given
        for show in seen:
            show(module, query, key, value, out.transpose(1, 2), kwargs.get("scaling"), bool(causal))
        return out, weights

    AttentionInterface.register(_PROBE, probe)
    AttentionMaskInterface.register(_PROBE, sdpa_mask)
    configs = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
    before = [config._attn_implementation for config in configs]
    model.set_attn_implementation(_PROBE)
    try:
        yield seen
    finally:
        for config, implementation in zip(configs, before):
            config._attn_implementation_internal = implementation
