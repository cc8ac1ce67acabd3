"""What the trainer needs to know of summaries: examples, their loss, their size, and a good start for the weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..training.config import TrainConfig
from .kinds import marked
from .long_documents import Example
from .model import END, PAD, START, Seq2Seq, padded
from .pairs import Pair
from .tokenizer import Tokens

LONGEST_SUMMARY = 32
LONGEST_TOKEN = 12  # characters: a text of long words alone would have fewer tokens than asked for
DEFAULTS = TrainConfig(
    steps=3000,
    batch_size=32,
    lr=1e-3,
    warmup=150,
    final_lr=0.02,
    validate_every=250,
    checkpoint_every=100,
)


def examples(pairs: Sequence[Pair], tokens: Tokens, longest: int) -> list[Example]:
    """The tokens of each pair, at most `longest` of the document, its mark included."""
    beyond = LONGEST_TOKEN * longest  # longer texts are cut before they are split into tokens
    documents = tokens.encode_many([marked(pair.document, pair.kind)[:beyond] for pair in pairs])
    summaries = tokens.encode_many([pair.summary for pair in pairs])
    return [(d[:longest], s[:LONGEST_SUMMARY]) for d, s in zip(documents, summaries, strict=True)]


def paragraph(tokens: Tokens) -> list[int]:
    """The tokens between two paragraphs."""
    return tokens.encode("a\n\na")[1:-1]


def loss(model: nn.Module, batch: list[Example]) -> tuple[Tensor, float]:
    """Summed cross-entropy of the summaries' tokens and the end, and how many they are."""
    source = padded([document for document, _ in batch])
    given = padded([[START, *summary] for _, summary in batch])
    target = padded([[*summary, END] for _, summary in batch])
    return -model(source, given, target).sum(), float((target != PAD).sum())


def size(example: Example) -> int:
    """Examples of like length are batched: documents of about the same, and among them summaries of the same."""
    document, summary = example
    return len(document) // 16 * (LONGEST_SUMMARY + 1) + len(summary)


def initialise(model: Seq2Seq, train: Sequence[Example], seed: int) -> None:
    """Embeddings from the company that tokens keep in the training texts, the output's bias from their frequency."""
    from .initial_embeddings import from_company, log_frequency

    vocabulary, dim = model.embedding.weight.shape
    with torch.no_grad():
        texts = [text for example in train for text in example]
        model.embedding.weight.copy_(from_company(texts, vocabulary, min(dim, vocabulary - 1), seed))
        model.output_bias.copy_(log_frequency([[*summary, END] for _, summary in train], vocabulary))
