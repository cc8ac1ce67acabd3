"""Shared by all commands: checked numbers, output files, suggestions, missing extras. Imports nothing slow."""

import argparse
import difflib
import errno
import importlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

# Import name -> what to `pip install`.
REQUIREMENTS = {
    **dict.fromkeys(("accelerate", "gguf", "transformers", "tokenizers", "platformdirs"), "'linattn[hf]'"),
    **dict.fromkeys(("matplotlib", "jinja2"), "'linattn[pages]'"),
    **dict.fromkeys(("starlette", "uvicorn", "pydantic", "prometheus_client", "python_multipart"), "'linattn[serve]'"),
    "shtab": "'linattn[completion]'",
}
LARGEST = 2**31 - 1  # of any count; more overflows somewhere below
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


class CommandError(RuntimeError):
    """Something the user can put right; the message says how. A command shows it as one line and exits with 2."""


class MissingExtra(ImportError):
    """A package of one of linattn's extras is not installed."""


def require(*modules: str, requirement: str | None = None) -> None:
    """Imports the modules; raises MissingExtra with the pip command if one is not installed.

    requirement: what to install instead of the entry in REQUIREMENTS.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingExtra(import_failure(error, name, requirement)) from error


def import_failure(error: ImportError, name: str | None = None, requirement: str | None = None) -> str:
    """One sentence about a failed import, with the pip command if the module belongs to an extra."""
    module = (name or error.name or "").split(".")[0]
    requirement = requirement or REQUIREMENTS.get(module)
    if isinstance(error, MissingExtra) or requirement is None:
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == module:
        return f"{module} is not installed: pip install {requirement}"
    return f"{module} cannot be imported ({error}): pip install {requirement}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'positive'?" for a name close to a known one, otherwise nothing."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def whole(least: int = 1, most: int = LARGEST) -> Callable[[str], int]:
    """An argparse type: a whole number in [least, most]."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text[:40]!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text[:40]}")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {text[:40]}")
        return value

    return convert


def real(
    least: float | None = None, *, above: float | None = None, most: float | None = None
) -> Callable[[str], float]:
    """An argparse type: a finite number, at least `least`, above `above`, at most `most`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"must be a finite number, got {text[:40]!r}")
        if least is not None and value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least:g}, got {value:g}")
        if above is not None and value <= above:
            raise argparse.ArgumentTypeError(f"must be above {above:g}, got {value:g}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most:g}, got {value:g}")
        return value

    return convert


seed = whole(0, 2**32 - 1)  # what torch, numpy and scikit-learn all accept


def words(given: str) -> str:
    """An argparse type: a text to read. Bytes that are not UTF-8 arrive as characters that cannot be encoded."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"must be a text in UTF-8, got {given[:40]!r}") from None
    return given


def add_output(
    parser: argparse.ArgumentParser,
    flag: str,
    text: str,
    *,
    suffixes: tuple[str, ...] = (),
    default: Path | None = None,
) -> None:
    """An option that names a file to write. `check_outputs` refuses a path that cannot be written before any work.

    suffixes: those that name a format the command can write; none for any.
    """
    action = parser.add_argument(flag, metavar="FILE", type=Path, default=default, help=text)
    known = parser.get_default("outputs") or {}
    parser.set_defaults(outputs={**known, action.dest: (flag, suffixes)})


def check_outputs(args: argparse.Namespace) -> None:
    """Raises ValueError if a file of `add_output` cannot be written as asked; makes the folders of the files to come."""
    seen: dict[Path, str] = {}
    for dest, (flag, suffixes) in getattr(args, "outputs", {}).items():
        path: Path | None = getattr(args, dest)
        if path is None:
            continue
        if suffixes and path.suffix.lower() not in suffixes:
            raise ValueError(f"{flag} writes {', '.join(suffixes)}, got {os.fspath(path)!r}.")
        check_writable(path)
        if path.absolute() in seen and not _is_device(path):
            raise ValueError(f"{seen[path.absolute()]} and {flag} both name {path}: choose two files.")
        seen[path.absolute()] = flag


def check_writable(path: str | os.PathLike[str]) -> None:
    """Makes the folder of a file to come; raises ValueError if the file could not be written there."""
    target = Path(path)
    try:
        if target.is_dir():
            raise ValueError(f"{target} is a folder; name a file.")
        if _is_device(target):
            if not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".linattn-")
        os.close(handle)
        os.unlink(name)
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror}.") from None


def _is_device(path: Path) -> bool:
    """True for what is written to in place, such as /dev/stdout and named pipes."""
    return path.exists() and not path.is_file() and not path.is_dir()
