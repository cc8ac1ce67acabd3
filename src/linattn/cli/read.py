"""`linattn read`: reads a document once and saves the state after it."""

import argparse
import sys
import time

from .._commandline import add_output
from .model_options import add_model_options, load_served
from .models import check_model, read_text
from .names import MODELS

EXAMPLES = """examples:
  linattn read book.txt --model smollm2 --kernel nearfar --save book.state
  linattn read notes.md --model ./model-folder
  linattn ask book.state "Who is the main character?"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("document", metavar="FILE", help="a text file")
    add_model_options(parser)
    add_output(parser, "--save", "the file for the state (default: the document's name with .state)")


def run(args: argparse.Namespace) -> int:
    check_model(args.model)
    text = read_text(args.document)
    from pathlib import Path

    from .._commandline import check_writable

    target = args.save or Path(args.document).with_suffix(".state")
    if Path(target).resolve() == Path(args.document).resolve():
        raise ValueError(f"the state would replace {args.document}: name another file by --save.")
    check_writable(target)
    if args.model not in MODELS:  # `ask` may be called in another folder
        args.model = str(Path(args.model).absolute())
    model = load_served(args)
    from tqdm import tqdm

    from ..serve import snapshots
    from ..serve.local import read_document

    begun = time.perf_counter()
    with tqdm(unit=" tokens", file=sys.stderr, disable=None, leave=False) as bar:

        def on_read(read: int, total: int) -> None:
            bar.total = total
            bar.update(read - bar.n)

        snapshot = read_document(model, text, on_read)
    seconds = time.perf_counter() - begun
    snapshots.save(target, snapshot, model.fingerprint)
    if not Path(target).is_file():  # a pipe or a device, which holds the state and nothing else
        return 0
    size = Path(target).stat().st_size / 2**20
    print(f"{target}: {len(snapshot.tokens)} tokens read in {seconds:.1f} s, {size:.1f} MiB")
    return 0
