"""Modules with torch's names, arguments and state_dicts, and a kernel."""

from torch.nn import TransformerDecoder, TransformerEncoder

from .layers import TransformerDecoderLayer, TransformerEncoderLayer
from .multihead import MultiheadAttention
from .swap import swap

__all__ = [
    "MultiheadAttention",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "swap",
]
