"""Loading pretrained models for commands; failures are one-sentence errors."""

import argparse
import sys
from pathlib import Path
from typing import Any

from .._commandline import did_you_mean, require
from .names import MODELS

DTYPES = ["float32", "bfloat16", "float16", "auto"]
HELP = (
    f"a model folder (config.json, safetensors, tokenizer), a GGUF file, or one of {', '.join(MODELS)} (fetched once)"
)


def check_model(name: str) -> None:
    """Raises ValueError if there is no such model, before anything slow is imported."""
    if name not in MODELS and not (name and Path(name).exists()):
        hint = did_you_mean(name, MODELS) or f"; give a model folder, a GGUF file or one of {', '.join(MODELS)}"
        raise ValueError(f"there is no model {name!r}{hint}.")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """--dtype, for `load_model`."""
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of the weights; auto is the dtype they are stored in"
    )


def load_model(name: str, dtype: str = "float32") -> tuple[Any, Any]:
    """A model and its tokenizer; ValueError if the files are not those of a model."""
    check_model(name)
    require("transformers", "safetensors", "tqdm", requirement="'linattn[hf]'")
    from transformers.utils import logging

    from ..hf import weights

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    if name in MODELS:
        weights.fetch(name)  # a download that fails says why
    try:
        return weights.load(name, dtype)
    except Exception as error:  # whatever a damaged file makes of transformers, gguf, safetensors and tokenizers
        said = str(error).strip().split("\n")[0]
        raise ValueError(f"{name} cannot be read as a model: {said or type(error).__name__}") from error


def read_text(path: str) -> str:
    """A text file, bytes that are not UTF-8 replaced; ValueError if it holds nothing."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise ValueError(f"{path} is empty.")
    return text
