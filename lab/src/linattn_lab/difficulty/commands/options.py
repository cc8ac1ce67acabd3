"""Options that train, measure and report have in common."""

import argparse
import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from linattn._files import parsing

from ...commandline import whole
from ...images.datasets import NAMES
from ...images.resnet import STEMS
from ...images.training import DEFAULTS
from ...training.config import TrainConfig, add_flags
from ..runs import SETTINGS, Probing, Run


def add_run(parser: argparse.ArgumentParser) -> None:
    """What is trained. Options that are not given are taken from the folder, if something was trained there."""
    unsaid: Any = argparse.SUPPRESS
    run = Run(Path())
    parser.add_argument(
        "--data", default=unsaid, help=f"{', '.join(NAMES)} or a folder of class/picture files (default {run.data})"
    )
    parser.add_argument(
        "--folder", type=Path, help="where networks and measurements are kept (default difficulty-DATA)"
    )
    parser.add_argument(
        "--pictures", type=whole(), default=unsaid, help="training pictures (default all; 30000 shapes, 50000 dsprites)"
    )
    parser.add_argument(
        "--test", type=whole(), default=unsaid, help="test pictures (default all; 6000 shapes, 10000 dsprites)"
    )
    parser.add_argument(
        "--side",
        type=whole(),
        default=unsaid,
        help=f"pixels that pictures of a folder are scaled to (default {run.side})",
    )
    parser.add_argument(
        "--seeds", type=whole(), default=unsaid, help=f"networks; each holds out another part (default {run.seeds})"
    )
    parser.add_argument(
        "--width", type=whole(), default=unsaid, help=f"channels of the first stage (default {run.width})"
    )
    parser.add_argument(
        "--stem", choices=STEMS, default=unsaid, help=f"imagenet is 16 times cheaper (default {run.stem})"
    )
    parser.add_argument("--augment", action="store_true", default=unsaid, help="move and mirror pictures in training")
    training = parser.add_argument_group("training")
    add_flags(training, DEFAULTS, suppress=True)


def add_probing(parser: argparse.ArgumentParser) -> None:
    """How depth is measured."""
    group = parser.add_argument_group("measuring")
    texts = {
        "k": "neighbours that vote",
        "references": "training pictures among which neighbours are sought",
        "queries": "test pictures measured",
        "held_out": "held-out training pictures measured, for each network",
    }
    for name, default in asdict(Probing()).items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=whole(), default=default, help=f"{texts[name]} (default {default})")


def run_from(args: argparse.Namespace) -> Run:
    """The run that the options name: defaults, then what the folder was made with, then what was said."""
    said = vars(args)
    folder = args.folder or Path(f"difficulty-{Path(said.get('data', Run.data)).name}")
    stored: dict[str, Any] = {}
    names = [field.name for field in fields(Run) if field.name not in ("folder", "config")]
    with parsing(folder / SETTINGS):
        if (folder / SETTINGS).is_file():
            stored = json.loads((folder / SETTINGS).read_text())
        config = replace(
            TrainConfig(**stored.pop("config", asdict(DEFAULTS))),
            **{field.name: said[field.name] for field in fields(TrainConfig) if field.name in said},
        )
        return Run(folder, **(stored | {name: said[name] for name in names if name in said}), config=config)


def probing_from(args: argparse.Namespace) -> Probing:
    return Probing(**{field.name: getattr(args, field.name) for field in fields(Probing)})


def watched() -> bool:
    """Whether someone sees a progress bar."""
    return sys.stderr.isatty()
