"""linattn lab summarize train: trains a summarizer on pairs of document and summary."""

import argparse
import dataclasses
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ...commandline import describe, real, require, whole, write_json
from ..kinds import marked
from ..long_documents import lengthened
from ..mixture import mixture, share
from ..model import CONFIGS, ModelConfig, Seq2Seq
from ..pairs import data_folder, read_split

if TYPE_CHECKING:
    from ...training.trainer import Trainer
    from ..tokenizer import Tokens

SHOWN = 4  # samples in TensorBoard
HELP = """
Trains a summarizer on what `linattn lab summarize prepare` made, with any kernel in place of softmax. A run that was
killed continues from its last checkpoint when the same command is given again. Writes into the --out folder:
model.safetensors (weights, configuration and vocabulary in one file: what `run` and `evaluate` take), log.json (the
command, both loss curves, the time) and TensorBoard's files with samples. Under torchrun the processes share each batch.

examples:
  linattn lab summarize train --out elu
  linattn lab summarize train --out softmax --kernel softmax --steps 1000
  linattn lab summarize train --out long --start elu/model.safetensors --lengthen 0.25 --lr 3e-4 --steps 800
  linattn lab summarize train --out all --data mixture --shares packages=0.5 manuals=0.2 docstrings=0.1 readmes=0.2
  torchrun --nproc-per-node 2 -m linattn lab summarize train --out both
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    require("safetensors", "tokenizers", "tqdm")
    from ...training.config import add_flags
    from ..examples import DEFAULTS

    describe(parser, HELP)
    parser.add_argument(
        "--data", metavar="FOLDER", type=Path, help="the prepared pairs (default: where prepare puts them)"
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="for the model, the log, TensorBoard")
    parser.add_argument("--config", choices=list(CONFIGS), default="default", help="named shape of the model")
    parser.add_argument("--kernel", help=f"of every attention (default {ModelConfig.kernel}, or that of --start)")
    for name, spec in ModelConfig.__dataclass_fields__.items():
        if "help" in spec.metadata:
            about = f"{spec.metadata['help']} (default: of --config)"
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                type=whole() if isinstance(spec.default, int) else real(0, most=1),
                help=about,
            )
    parser.add_argument(
        "--longest", type=whole(), default=128, help="tokens of a document read in training (default %(default)s)"
    )
    parser.add_argument(
        "--lengthen",
        type=real(0, most=1),
        default=0.0,
        help="share of documents followed by others (default %(default)s)",
    )
    parser.add_argument(
        "--lengthen-to", type=whole(), default=2048, help="tokens that these have at most (default %(default)s)"
    )
    parser.add_argument(
        "--start", metavar="FILE", type=Path, help="weights to begin with: model.safetensors of `train`"
    )
    parser.add_argument(
        "--shares",
        type=share,
        nargs="+",
        metavar="KIND=SHARE",
        help="of the kinds of pairs (default: as many as there are)",
    )
    add_flags(parser, DEFAULTS)


def model_config(args: argparse.Namespace, vocabulary: int) -> ModelConfig:
    """The named configuration, with what flags change in it."""
    given = {name: getattr(args, name, None) for name in ModelConfig.__dataclass_fields__}
    chosen = CONFIGS[args.config] | {name: value for name, value in given.items() if value is not None}
    return ModelConfig(**{**chosen, "vocabulary": vocabulary})


def run(args: argparse.Namespace) -> int:
    require("tensorboard", "scipy", "sklearn")
    from ...training.lock import training_lock

    shared = "WORLD_SIZE" in os.environ and not dist.is_initialized()
    if shared:
        dist.init_process_group("gloo")
    with training_lock(args.out):
        train(args)
    if shared:
        dist.barrier()  # no process leaves while another still sends
        dist.destroy_process_group()
    return 0


def train(args: argparse.Namespace) -> None:
    """Trains and writes the model, alone or as one of several processes."""
    from ...training.config import config_from
    from ...training.trainer import Trainer
    from ..examples import examples, initialise, loss, paragraph, size
    from ..summarizer import Summarizer
    from ..tokenizer import Tokens

    first = not dist.is_initialized() or dist.get_rank() == 0
    config = config_from(args)
    folder: Path = args.data or data_folder()
    pairs = {part: read_split(folder, part) for part in ("train", "validation")}
    tokens = Tokens.load(folder / "tokens.json")
    long = {"share": args.lengthen, "longest": args.lengthen_to, "between": paragraph(tokens), "seed": config.seed}
    learnt, validation = (examples(part, tokens, args.longest) for part in pairs.values())
    if args.shares:
        places = mixture([pair.kind for pair in pairs["train"]], dict(args.shares), config.seed)
        learnt = [learnt[place] for place in places]
    learnt, validation = (lengthened(part, **long) for part in (learnt, validation))
    torch.manual_seed(config.seed)
    if args.start is not None:
        start = Summarizer.load(args.start, args.kernel)
        if start.tokens.to_json() != tokens.to_json():
            raise ValueError(f"{args.start} has another vocabulary than {folder / 'tokens.json'}.")
        model = start.model
    else:
        model = Seq2Seq(model_config(args, tokens.size))
        if not (args.out / "checkpoint.safetensors").exists():
            initialise(model, learnt, config.seed)
    about = {"model": dataclasses.asdict(model.config), "longest": args.longest, "pairs": len(learnt)}
    kinds = sorted(dict(args.shares) if args.shares else {pair.kind for pair in pairs["train"]} - {""})
    about |= {"kinds": kinds} if kinds else {}
    about |= {"shares": dict(args.shares)} if args.shares else {}
    about |= {"lengthen": args.lengthen, "lengthen_to": args.lengthen_to} if args.lengthen else {}
    shown = [marked(pair.document, pair.kind) for pair in pairs["validation"][:SHOWN]]

    def sample(_: nn.Module) -> str:
        written = Summarizer(model, tokens, about).summarize(shown, beam=1)
        return "\n\n".join(f"{text}\n\n> {document[:300]}" for text, document in zip(written, shown, strict=True))

    options: Any = {"size": size, "about": about, "sample": sample}
    trainer = Trainer(model, loss, learnt, sorted(validation, key=size), config, args.out, **options)
    if first:
        count = sum(p.numel() for p in model.parameters())
        print(f"{len(learnt)} pairs, {count / 1e6:.1f} million weights, kernel {model.config.kernel}", flush=True)
    began = time.time(), time.process_time()
    trainer.run()
    if first:
        finish(trainer, model, tokens, args.out, (time.time() - began[0], time.process_time() - began[1]))


def finish(trainer: "Trainer", model: Seq2Seq, tokens: "Tokens", out: Path, seconds: tuple[float, float]) -> None:
    """The best weights in one file, and the log beside them."""
    from ...training.tensor_files import read_tensors
    from ..summarizer import Summarizer

    model.load_state_dict(read_tensors(out / "best.safetensors")[0])
    facts = trainer.about | {"steps": trainer.step, "validation": trainer.best}
    Summarizer(model.eval(), tokens, facts).save(out / "model.safetensors")
    log = {
        "command": shlex.join(["linattn", *sys.argv[1:]]),
        "facts": facts,
        "trainer": dataclasses.asdict(trainer.config),
        "seconds": dict(zip(("wall", "cpu"), seconds, strict=True)),
        "torch": torch.__version__,
        "history": trainer.history,
    }
    write_json(out / "log.json", log)
    print(f"validation loss {trainer.best:.4f}; wrote {out / 'model.safetensors'}")
