"""linattn lab summarize train: trains a summarizer on pairs of document and summary."""

import argparse
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._commandline import command, describe, write_json
from ..trainer import TrainConfig, Trainer, add_flags, config_from, read_tensors
from .model import CONFIGS, END, PAD, START, ModelConfig, Seq2Seq, padded
from .pairs import Pair, data_folder, read_split
from .summarizer import Summarizer
from .tokens import Tokens

Example = tuple[list[int], list[int]]  # the document's tokens and the summary's
LONGEST_SUMMARY = 32
SHOWN = 4  # samples in TensorBoard
DEFAULTS = TrainConfig(
    steps=3000,
    batch_size=32,
    lr=1e-3,
    warmup=150,
    final_lr=0.02,
    validate_every=250,
    checkpoint_every=100,
)
HELP = """
Trains a summarizer on what `linattn lab summarize prepare` made, with any kernel in place of softmax. A run that was
killed goes on from its last checkpoint when the same command is given again. Writes into the --out folder:
model.safetensors (weights, configuration and vocabulary in one file: what `run` and `evaluate` take), log.json (the
command, both loss curves, the time) and TensorBoard's files with samples. Under torchrun the processes share each batch.

examples:
  linattn lab summarize train --out elu
  linattn lab summarize train --out exact --kernel exact --steps 1000
  torchrun --nproc-per-node 2 -m linattn lab summarize train --out both
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    parser.add_argument(
        "--data", metavar="FOLDER", type=Path, help="the prepared pairs (default: where prepare puts them)"
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="for the model, the log, TensorBoard")
    parser.add_argument("--config", choices=list(CONFIGS), default="default", help="shape of the model")
    parser.add_argument("--kernel", default="elu", help="of every attention (default %(default)s)")
    for name, spec in ModelConfig.__dataclass_fields__.items():
        if "help" in spec.metadata:
            kind: Any = (lambda text: text == "True") if isinstance(spec.default, bool) else type(spec.default)
            about = f"{spec.metadata['help']} (default: of --config)"
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=about)
    parser.add_argument(
        "--longest", type=int, default=128, help="tokens of a document read in training (default %(default)s)"
    )
    add_flags(parser, DEFAULTS)


def model_config(args: argparse.Namespace, vocabulary: int) -> ModelConfig:
    """The named configuration, with what flags change in it."""
    given = {
        name: getattr(args, name, None) for name, spec in ModelConfig.__dataclass_fields__.items() if spec.metadata
    }
    chosen = CONFIGS[args.config] | {name: value for name, value in given.items() if value is not None}
    return ModelConfig(vocabulary=vocabulary, kernel=args.kernel, **chosen)


def examples(pairs: Sequence[Pair], tokens: Tokens, longest: int) -> list[Example]:
    documents = tokens.encode_many([pair.document for pair in pairs])
    summaries = tokens.encode_many([pair.summary for pair in pairs])
    return [(d[:longest], s[:LONGEST_SUMMARY]) for d, s in zip(documents, summaries) if d and s]


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
    from .embeddings import from_company, log_frequency

    vocabulary, dim = model.embedding.weight.shape
    with torch.no_grad():
        texts = [text for example in train for text in example]
        model.embedding.weight.copy_(from_company(texts, vocabulary, min(dim, vocabulary - 1), seed))
        model.output_bias.copy_(log_frequency([[*summary, END] for _, summary in train], vocabulary))


@command
def run(args: argparse.Namespace) -> int:
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    config = config_from(args)
    folder: Path = args.data or data_folder()
    pairs = {part: read_split(folder, part) for part in ("train", "validation")}
    tokens = Tokens.load(folder / "tokens.json")
    train, validation = (examples(pairs[part], tokens, args.longest) for part in ("train", "validation"))
    shape = model_config(args, tokens.size)
    torch.manual_seed(config.seed)
    model = Seq2Seq(shape)
    if not (args.out / "checkpoint.safetensors").exists():
        initialise(model, train, config.seed)
    if first:
        count = sum(p.numel() for p in model.parameters())
        print(f"{len(train)} pairs, {count / 1e6:.1f} million weights, kernel {shape.kernel}", flush=True)
    about = {"model": dataclasses.asdict(shape), "longest": args.longest, "pairs": len(train)}
    shown = [pair.document for pair in pairs["validation"][:SHOWN]]

    def sample(trained: nn.Module) -> str:
        written = Summarizer(model, tokens, about).summarize(shown, beam=1)
        return "\n\n".join(f"{text}\n\n> {document[:300]}" for text, document in zip(written, shown))

    options: Any = {"size": size, "about": about, "sample": sample}
    trainer = Trainer(model, loss, train, validation, config, args.out, **options)
    wall, cpu = time.time(), time.process_time()
    history = trainer.run()
    if first:
        weights, _ = read_tensors(args.out / "best.safetensors")
        model.load_state_dict(weights)
        about |= {"steps": trainer.step, "validation": trainer.best}
        Summarizer(model.eval(), tokens, about).save(args.out / "model.safetensors")
        log = {
            "command": shlex.join(["linattn", *sys.argv[1:]]),
            "facts": about,
            "trainer": dataclasses.asdict(config),
            "seconds": {"wall": time.time() - wall, "cpu": time.process_time() - cpu},
            "torch": torch.__version__,
            "history": history,
        }
        write_json(args.out / "log.json", log)
        print(f"validation loss {trainer.best:.4f}; wrote {args.out / 'model.safetensors'}")
    return 0
