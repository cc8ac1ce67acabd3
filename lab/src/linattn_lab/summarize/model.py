"""The summarizer's model: an encoder-decoder transformer whose every attention takes any kernel, and a pointer."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from linattn.nn import TransformerEncoderLayer

from .layers import DecoderLayer, LayerState, LogPositions, Neighbours
from .pointer import MATCHES, Page, Pointer, log_likelihood, log_mixture

PAD, START, END = 0, 1, 2
NO_TOKEN = -2  # before the first token there is nothing that a place of the document could match
AROUND = 2  # tokens on each side that an encoder layer mixes in


@dataclass
class ModelConfig:
    """The shape of a model. Fields with a help can be flags of the train command."""

    vocabulary: int = 8192
    kernel: str = "elu"
    dim: int = field(default=256, metadata={"help": "width of the model"})
    heads: int = field(default=8, metadata={"help": "of every attention"})
    ffn: int = field(default=768, metadata={"help": "width inside the feed-forward layers"})
    encoder_layers: int = field(default=2, metadata={"help": "layers that read"})
    decoder_layers: int = field(default=2, metadata={"help": "layers that write"})
    dropout: float = field(default=0.1, metadata={"help": "of embeddings and in the decoder"})
    norm_first: bool = True  # post-norm wants a low learning rate and a long warm-up


CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {"dim": 32, "heads": 4, "ffn": 64},
    "default": {},
    # a course's model: post-norm, as in the first transformer
    "course": {"dim": 512, "heads": 8, "ffn": 2048, "encoder_layers": 4, "decoder_layers": 4, "norm_first": False},
}


@dataclass
class Writing:
    """A summary being written: the document, compressed once for every layer, and the tokens so far.

    Attributes:
        page: the document as the pointer sees it.
        layers: a state for each decoder layer.
        recent: (B, MATCHES) ids of the last tokens, newest first.
        written: (B, N), places of the document whose token was written.
        tail: (B, before, dim) embeddings of the last tokens, for their neighbours to come.
        length: tokens so far.
    """

    page: Page
    layers: list[LayerState]
    recent: Tensor
    written: Tensor
    tail: Tensor
    length: int = 0

    def select(self, batch_index: Tensor) -> "Writing":
        """The given batch entries, in that order, repeats allowed: beam search reorders with this."""
        layers = [state.select(batch_index) for state in self.layers]
        recent, written, tail = (x[batch_index] for x in (self.recent, self.written, self.tail))
        return Writing(self.page.select(batch_index), layers, recent, written, tail, self.length)


@dataclass
class Step:
    """What one step says of the next token: log_probs (B, V), where it looked (B, N), share that is copied (B,)."""

    log_probs: Tensor
    weights: Tensor
    copy: Tensor


class Seq2Seq(nn.Module):
    """Reads token ids (B, N), writes token ids.

    One embedding serves encoder, decoder and output. Length is not capped: positions enter by their logarithm and by
    the neighbours of each token.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        dim = config.dim
        self.embedding = nn.Embedding(config.vocabulary, dim)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.output_bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.source_positions, self.target_positions = LogPositions(dim), LogPositions(dim)
        options: dict[str, Any] = {
            "d_model": dim,
            "nhead": config.heads,
            "dim_feedforward": config.ffn,
            "batch_first": True,
            "norm_first": config.norm_first,
            "kernel": config.kernel,
        }
        self.around = nn.ModuleList(Neighbours(dim, AROUND, AROUND) for _ in range(config.encoder_layers))
        # Dropout in the encoder would cost more than it brings: it reads ten times as many tokens as are written.
        self.encoder = nn.ModuleList(
            TransformerEncoderLayer(**options, dropout=0.0) for _ in range(config.encoder_layers)
        )
        self.before = Neighbours(dim, AROUND)
        self.decoder = nn.ModuleList(
            DecoderLayer(**options, dropout=config.dropout) for _ in range(config.decoder_layers)
        )
        self.encoder_norm = nn.LayerNorm(dim) if config.norm_first else nn.Identity()
        self.decoder_norm = nn.LayerNorm(dim) if config.norm_first else nn.Identity()
        self.pointer = Pointer(dim, dim // 2)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, source: Tensor, given: Tensor, target: Tensor) -> Tensor:
        """log p of each target token (B, T), given the document (B, N) and the tokens before (B, T), START first.

        0 where the target is PAD.
        """
        page = self.encode(source)
        x = self.before(self._embed(given)) + self.target_positions(0, given.shape[1])
        x = self.drop(x)
        mask = page.mask
        for layer in self.decoder:
            x = layer(x, page.memory, tgt_is_causal=True, memory_key_padding_mask=mask)
        x = self.decoder_norm(x)
        earlier = [nn.functional.pad(given, (back, 0), value=NO_TOKEN)[:, : given.shape[1]] for back in range(MATCHES)]
        written = (given[:, :, None] == source[:, None, :]).cumsum(1) > 0
        weights, gate = self.pointer(x, torch.stack(earlier, -1), written, page)
        counted = target != PAD
        chosen = -nn.functional.cross_entropy(self._logits(x[counted]), target[counted], reduction="none")
        chosen = torch.zeros_like(gate).masked_scatter(counted, chosen)
        return log_likelihood(chosen, weights, gate, page.source, target).masked_fill(~counted, 0.0)

    def encode(self, source: Tensor) -> Page:
        """The document (B, N), padded with PAD: one pass of every encoder layer."""
        padding = source == PAD
        seen = ~padding[..., None]
        mask = padding if bool(padding.any()) else None  # exact softmax with a mask would form it for every query
        x = self.drop(self._embed(source) + self.source_positions(0, source.shape[1]))
        for around, layer in zip(self.around, self.encoder, strict=True):
            x = layer(around(x * seen), src_key_padding_mask=mask)  # a padded token is no neighbour
        return self.pointer.page(source, padding, self.encoder_norm(x))

    def start(self, page: Page) -> Writing:
        """An empty summary of an encoded document."""
        batch = page.source.shape[0]
        return Writing(
            page,
            [layer.start(page.memory, page.mask) for layer in self._decoder_layers()],
            page.source.new_full((batch, MATCHES), NO_TOKEN),
            torch.zeros_like(page.padding),
            page.memory.new_zeros(batch, AROUND, self.config.dim),
        )

    def step(self, token: Tensor, writing: Writing) -> tuple[Step, Writing]:
        """The next token's distribution after one more token (B,): the numbers of `forward`, at a cost that does not grow
        with the tokens written (for linear kernels), nor with the document's length but for the pointer."""
        tail = torch.cat([writing.tail, self._embed(token[:, None])], 1)
        x = self.before(tail)[:, -1:] + self.target_positions(writing.length, 1)
        layers = []
        for layer, before in zip(self._decoder_layers(), writing.layers, strict=True):
            x, after = layer.step(x, before)
            layers.append(after)
        x = self.decoder_norm(x)
        recent = torch.cat([token[:, None], writing.recent[:, :-1]], 1)
        written = writing.written | (writing.page.source == token[:, None])
        weights, gate = self.pointer(x, recent[:, None], written[:, None], writing.page)
        log_probs = log_mixture(self._logits(x), weights, gate, writing.page.source)
        said = Step(log_probs.squeeze(1), weights.squeeze(1), (-gate).sigmoid().squeeze(1))
        return said, Writing(writing.page, layers, recent, written, tail[:, 1:], writing.length + 1)

    def _decoder_layers(self) -> Iterator[DecoderLayer]:
        return (layer for layer in self.decoder if isinstance(layer, DecoderLayer))

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * self.config.dim**0.5

    def _logits(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.embedding.weight, self.output_bias)


def padded(rows: list[list[int]]) -> Tensor:
    """Token ids of different lengths as one tensor, PAD at the end."""
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
