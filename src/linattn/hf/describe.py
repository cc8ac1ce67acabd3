"""What `attach` did to a model, layer by layer."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..engines import native
from ..kernels import Kernel
from ..measure import cost
from ..nearfar import NearFar
from ..nearfar.native import kernel_refusal
from .hybrids.layers import linear_layers
from .modules import attention_modules, head_counts, head_dim, is_sliding


@dataclass(frozen=True)
class LayerReport:
    """One layer of an attached model.

    Attributes:
        layer: the name of its module.
        does: the rule or kernel that it computes.
        engine: "native" or "torch"; "transformers" where the model's own code is left in place.
        state_bytes: of one sequence, in float32; None if they grow with the tokens.
    """

    layer: str
    does: str
    engine: str
    state_bytes: int | None


@dataclass(frozen=True)
class Description:
    """Every layer with attention or a linear state. `print` shows a table."""

    layers: tuple[LayerReport, ...]

    @property
    def state_bytes(self) -> int:
        """Of all layers with a state of bounded size, for one sequence."""
        return sum(row.state_bytes or 0 for row in self.layers)

    def __str__(self) -> str:
        head = ("layer", "rule or kernel", "engine", "state")
        rows = [head, *((x.layer, x.does, x.engine, _size(x.state_bytes)) for x in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join([*(x.ljust(w) for x, w in zip(row, widths, strict=False)), row[3]]) for row in rows)

    __repr__ = __str__


def describe(model: PreTrainedModel) -> Description:
    """The layers of an attached model: what each computes, on which engine, with how large a state.

    >>> import transformers, linattn
    >>> config = transformers.LlamaConfig(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    >>> model = transformers.AutoModelForCausalLM.from_config(config)
    >>> print(linattn.hf.describe(linattn.hf.attach(model, "elu")))
    layer                     rule or kernel  engine  state
    model.layers.0.self_attn  Elu             native  256 B
    """
    attached: Any = getattr(model, "_linattn", None)
    if attached is None:
        raise ValueError("this model has no linattn attached: call linattn.hf.attach(model) first.")
    served = {id(replaced.module) for replaced in attached.replaced}
    engine = "native" if native.available() else "torch"
    rows = {}
    for layer in linear_layers(model):
        rows[layer.name] = LayerReport(
            layer.name, layer.rule, engine if id(layer.module) in served else "transformers", layer.state_bytes
        )
    for name, module in attention_modules(model):
        if name not in rows:
            rows[name] = _attention(name, module, engine)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return Description(tuple(sorted(rows.values(), key=lambda row: order[row.layer])))


def _attention(name: str, module: Any, engine: str) -> LayerReport:
    kernel = getattr(module, "linattn_kernel", None)
    if kernel is None:
        return LayerReport(name, "softmax, sliding window" if is_sliding(module) else "softmax", "transformers", None)
    if isinstance(kernel, NearFar) and kernel_refusal(kernel) is not None:
        engine = "torch"
    return LayerReport(name, _words(module, kernel), engine, _kernel_bytes(module, kernel))


def _words(module: Any, kernel: Kernel) -> str:
    """The kernel, and what it keeps of the layer's own softmax."""
    words = [type(kernel).__name__]
    if isinstance(kernel, NearFar):
        words += ["logit cap"] if kernel.logit_cap is not None else []
        words += ["ALiBi"] if kernel.alibi_slopes is not None else []
        words += ["position bias"] if kernel.position_bias is not None else []
        words += ["learned sink"] if hasattr(module, "sinks") else []
    return ", ".join(words)


def _kernel_bytes(module: Any, kernel: Kernel) -> int | None:
    _, heads = head_counts(module)
    dim = head_dim(module)
    if isinstance(kernel, NearFar) and any(kernel.recalls(heads)):
        return None  # recalled tokens are kept, in fewer bits
    return heads * cost(kernel, 2**20, dim, dim, True).state_bytes


def _size(state_bytes: int | None) -> str:
    if state_bytes is None:
        return "grows with the tokens"
    unit = next(i for i in (2, 1, 0) if state_bytes >= 1024**i or i == 0)
    number = state_bytes / 1024**unit
    return f"{number:.0f} {('B', 'KiB', 'MiB')[unit]}" if unit == 0 else f"{number:.1f} {('B', 'KiB', 'MiB')[unit]}"
