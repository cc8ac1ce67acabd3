"""linattn lab summarize run: one line for each document."""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...commandline import add_common, add_output, describe, progress, real, require, whole, write_json
from ..documents import STANDARD_INPUT, Document, find_files, read_document
from ..kinds import KINDS
from ..project_readme import read_project
from .evaluate import add_model_arguments

HELP = """
Summarizes documents of any length in one line each. Files, folders (every text file in them) or standard input;
Markdown and reStructuredText are read without code, tables, badges, HTML and marks, of a manual page the DESCRIPTION. One
document gives its line alone, several give `name: line`. --projects takes READMEs of Python projects: out of the
metadata that is installed, or of the wheel that pip downloads (into the cache; nothing is installed).

The included weights were trained on descriptions of Debian packages, manual pages, docstrings and READMEs: English text
about software. A document is read as a README or a manual page if it looks like one, otherwise like a package's
description; --kind says it instead. For other texts, prepare your own pairs and train.

--show-attention shows what the decoder attended to for each word: an interactive page (.html) or a plot (.png).

examples:
  linattn lab summarize run README.md
  linattn lab summarize run docs --json lines.json
  linattn lab summarize run /usr/share/man/man1/ls.1.gz
  linattn lab summarize run --projects numpy flask
  apt-cache show screen | linattn lab summarize run
  linattn lab summarize run README.md --show-attention looked.html
  linattn lab summarize run notes.txt --kernel softmax --beam 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(parser, HELP)
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="files or folders; - is stdin, and what is read without any"
    )
    parser.add_argument("--projects", nargs="+", default=[], metavar="NAME", help="READMEs of these Python projects")
    parser.add_argument(
        "--kind",
        choices=["auto", *KINDS],
        default="auto",
        help="what to read documents as (default auto: what they look like)",
    )
    add_model_arguments(parser)
    parser.add_argument("--max-tokens", type=whole(), default=40, help="longest summary (default %(default)s)")
    parser.add_argument("--temperature", type=real(above=0), help="draw words by chance (by --seed), instead of --beam")
    add_output(parser, "--show-attention", "draw what it looked at: .html or .png", suffixes=(".html", ".png"))
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    drawing = args.show_attention
    require("tokenizers", "safetensors", *(["matplotlib"] if drawing else []))
    documents, failed = read_all(args.files, args.projects)
    if args.kind != "auto":
        documents = [replace(document, kind=args.kind) for document in documents]
    if drawing and len(documents) != 1:
        raise ValueError(f"--show-attention draws one document, got {len(documents)}.")

    import torch

    from .. import decoding as decode
    from ..attention_page import draw
    from ..decoding import BEAM
    from ..summarizer import Summarizer

    summarizer = Summarizer.load(args.model, args.kernel)
    pick = None
    if args.temperature is not None:
        pick = decode.by_chance(args.temperature, generator=torch.Generator().manual_seed(args.seed))
    how = {"beam": BEAM if args.beam is None else args.beam, "max_tokens": args.max_tokens, "pick": pick}
    texts = [summarizer.marked(document.text, document.kind) for document in documents]
    if drawing:
        explanation = summarizer.explain(texts[0], **how)
        lines = [explanation.summary]
        draw(explanation, replace(documents[0], text=texts[0]), drawing)
    else:
        lines = summarizer.summarize(texts, progress=lambda groups: progress(groups, desc="summaries"), **how)
    lines = [" ".join(line.split()) for line in lines]  # the model may copy the end of a paragraph
    for document, line in zip(documents, lines, strict=True):
        print(line if len(documents) == 1 and not failed else f"{document.name}: {line}")
    if drawing:
        print(f"wrote {drawing}", file=sys.stderr)
    if args.json:
        write_json(args.json, {document.name: line for document, line in zip(documents, lines, strict=True)})
    return 1 if failed else 0


def read_all(files: list[Path], projects: list[str]) -> tuple[list[Document], int]:
    """The documents, and how many could not be read: each is named, and the others go on."""
    paths = find_files(files) if files or projects else [STANDARD_INPUT]
    readers = [partial(read_document, path) for path in paths] + [partial(read_project, name) for name in projects]
    found, failed = [], 0
    for read in readers:
        try:
            found.append(read())
        except ValueError as error:
            if len(readers) == 1:
                raise
            print(f"linattn: {error}", file=sys.stderr)
            failed += 1
    if not found:
        raise ValueError(f"none of {failed} documents could be read.")
    return found, failed
