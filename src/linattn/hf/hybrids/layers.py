"""Finds the linear layers of a model, hands them to the engine, and gives them back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..replaced import Replaced, replace_forward
from . import delta_net, kimi, mamba2, minimax
from .forward import EngineForward, ScanForward, functions_called
from .norms import NormForward, options_of

# Which function tells a rule, in the order in which they are asked for.
RULES = {
    "torch_chunk_gated_delta_rule": "gated delta rule",
    "chunk_kimi_delta_attention": "Kimi delta attention",
    "mamba2_chunk_scan": "Mamba-2 scan",
    "mamba_selective_scan": "Mamba-1 scan",
    "causal_conv1d_fn": "short convolution",
}
LIGHTNING = "lightning attention"
UNSERVED = ("RwkvSelfAttention", "xLSTMBlock", "RecurrentGemmaRecurrentBlock")  # linear states of other rules


@dataclass(frozen=True)
class LinearLayer:
    """A module with a linear state. rule: one of RULES, or lightning attention."""

    name: str
    module: Any
    rule: str

    @property
    def index(self) -> int | None:
        return getattr(self.module, "layer_idx", None)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence: of the rule, in float32, and of the convolution, in the dtype of its weights."""
        return 4 * _rule_numbers(self.rule, self.module) + _conv_bytes(self.module)


def linear_layers(model: nn.Module) -> list[LinearLayer]:
    """The layers that call one of the functions of transformers' linear layers, and those of MiniMax."""
    found = []
    for name, module in model.named_modules():
        called = functions_called(type(module))
        rule = next((rule for function, rule in RULES.items() if function in called), None)
        rule = LIGHTNING if type(module).__name__ == minimax.CLASS else rule
        if rule is not None:
            found.append(LinearLayer(name, module, rule))
    return found


def unserved_layer(model: nn.Module) -> str | None:
    """The class of a layer with a linear state that no rule here computes, if the model has one."""
    return next((name for module in model.modules() if (name := type(module).__name__) in UNSERVED), None)


def serve(layer: LinearLayer) -> list[Replaced]:
    """Puts our forward on the module, and on its gated norm."""
    replaced = [replace_forward(layer.module, _forward_kind(layer)(layer.module))]
    for child in layer.module.children():
        if options_of(child) is not None:
            replaced.append(replace_forward(child, NormForward(child)))
    return replaced


def _forward_kind(layer: LinearLayer) -> Any:
    name = type(layer.module).__name__
    if name in delta_net.CLASSES:
        return delta_net.DeltaNetForward
    if name in kimi.CLASSES:
        return kimi.KimiDeltaForward
    if name in mamba2.CLASSES:
        return mamba2.Mamba2Forward
    return {LIGHTNING: minimax.LightningForward, "Mamba-1 scan": ScanForward}.get(layer.rule, EngineForward)


def _rule_numbers(rule: str, module: Any) -> int:
    """Numbers in the state of a rule for one sequence; the modules name their sizes alike."""
    if rule == "gated delta rule":
        return int(module.num_v_heads * module.head_k_dim * module.head_v_dim)
    if rule == "Kimi delta attention":
        return int(module.num_heads * module.head_dim**2)
    if rule == LIGHTNING:
        return int(module.num_attention_heads * module.head_dim**2)
    if rule == "Mamba-2 scan":
        return int(module.num_heads * module.head_dim * module.ssm_state_size)
    return int(module.intermediate_size * module.ssm_state_size) if rule == "Mamba-1 scan" else 0


def _conv_bytes(module: nn.Module) -> int:
    convs = [x for x in module.modules() if isinstance(x, nn.Conv1d) and x.groups == x.in_channels]
    return sum(x.in_channels * x.kernel_size[0] * torch.finfo(x.weight.dtype).bits // 8 for x in convs)
