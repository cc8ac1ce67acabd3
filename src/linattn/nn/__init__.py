"""Modules with torch's names, arguments and state_dicts plus a kernel, and the layers of the update rules."""

from torch.nn import TransformerDecoder, TransformerEncoder

from .gated_delta_net import GatedDeltaNet
from .gated_linear_attention import GatedLinearAttention
from .kimi_delta_attention import KimiDeltaAttention
from .layers import TransformerDecoderLayer, TransformerEncoderLayer
from .lightning_attention import LightningAttention
from .mamba2 import Mamba2
from .multihead import MultiheadAttention
from .recurrent import MixerState
from .retention import Retention
from .swap import swap

__all__ = [
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LightningAttention",
    "Mamba2",
    "MixerState",
    "MultiheadAttention",
    "Retention",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "swap",
]
