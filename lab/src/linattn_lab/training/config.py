"""Settings of a training, as options of a command; the order of the examples and the learning rate that follow from them."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..commandline import real, seed, whole


@dataclass
class TrainConfig:
    """How to train. Every field can be a flag of a command: see `add_flags`."""

    steps: int = field(default=1000, metadata={"help": "optimizer steps in all"})
    batch_size: int = field(default=32, metadata={"help": "examples in a step, over all processes"})
    lr: float = field(default=3e-4, metadata={"help": "highest learning rate"})
    warmup: int = field(
        default=100, metadata={"help": "steps until the learning rate is at its highest", "type": whole(0)}
    )
    final_lr: float = field(
        default=0.1, metadata={"help": "share of the learning rate left at the end", "type": real(0, most=1)}
    )
    weight_decay: float = field(
        default=0.01, metadata={"help": "of matrices; biases and norms have none", "type": real(0)}
    )
    clip: float = field(default=1.0, metadata={"help": "largest norm of the gradient"})
    validate_every: int = field(default=200, metadata={"help": "steps between validations"})
    checkpoint_every: int = field(default=200, metadata={"help": "steps between checkpoints"})
    patience: int = field(
        default=0, metadata={"help": "stop after this many validations without gain; 0 never", "type": whole(0)}
    )
    bucket: int = field(default=50, metadata={"help": "batches among which examples are sorted by size"})
    seed: int = field(default=0, metadata={"help": "of everything random", "type": seed})


def add_flags(parser: argparse._ActionsContainer, defaults: TrainConfig, *, suppress: bool = False) -> None:
    """Adds an option for every field, --batch-size for batch_size.

    suppress: options that are not given are not in the namespace, instead of their defaults.
    """
    for name, spec in TrainConfig.__dataclass_fields__.items():
        default = getattr(defaults, name)
        text = f"{spec.metadata.get('help', name)} (default {default:g})"
        kind = spec.metadata.get("type") or (whole() if isinstance(default, int) else real(above=0))
        shown = argparse.SUPPRESS if suppress else default
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=shown, help=text)


def config_from(args: argparse.Namespace) -> TrainConfig:
    return TrainConfig(**{name: getattr(args, name) for name in TrainConfig.__dataclass_fields__})


def batches(sizes: Sequence[int], config: TrainConfig, epoch: int) -> list[list[int]]:
    """An epoch's batches: examples shuffled, sorted by size within buckets of batches, the batches shuffled again."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + epoch)
    order = torch.randperm(len(sizes), generator=generator).tolist()
    width = config.batch_size * max(1, config.bucket)
    found = []
    for start in range(0, len(order), width):
        pool = sorted(order[start : start + width], key=lambda i: sizes[i])
        found += [pool[i : i + config.batch_size] for i in range(0, len(pool), config.batch_size)]
    return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]


def schedule(step: int, config: TrainConfig) -> float:
    """Share of the highest learning rate: a straight rise, then a cosine down to `final_lr`."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    share = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * min(1.0, share))) / 2
