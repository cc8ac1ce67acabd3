"""Runs one command: whatever goes wrong is one line on stderr and an exit code."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .._commandline import CommandError, check_outputs, import_failure
from . import stop
from .commands import COMMANDS
from .parser import build, one_line
from .plugins import resolve

# What bad input, a missing file or a missing package raises. Anything else is a bug in linattn.
EXPECTED = (CommandError, ValueError, OSError, ImportError, MemoryError, OverflowError)
LONGEST = 600  # characters of a message


def run(argv: Sequence[str] | None) -> int:
    """The exit code of the command that the words ask for."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        parser, leaf = build(words)
        args = parser.parse_words(words, leaf)
        check_outputs(args)
        with _interruptible():
            code = int(args.run(args) or 0)
        if sys.stdout is not None:  # it may have been closed by the shell
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("LINATTN_TRACEBACK"):
            raise
        code, message = explain(error, _distribution(words))
        print(f"{_command_name(words)}: {message}", file=sys.stderr)
        return code


def explain(error: BaseException, distribution: str | None = None) -> tuple[int, str]:
    """Exit code and one line: 2 for what the user can put right, 130 for Ctrl-C, 1 for anything unexpected.

    distribution: the one that provides the command; installing it brings the packages that it imports.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            return 130, "stopped"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error)):
        return 2, "not enough memory for this size."
    text = str(error)
    if isinstance(error, ImportError):
        text = import_failure(error, requirement=distribution)
    elif isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
    text = one_line(text) or type(error).__name__
    text = text if len(text) <= LONGEST else text[:LONGEST] + " ..."
    if isinstance(error, EXPECTED):
        return 2, text
    return 1, f"unexpected {type(error).__name__}: {text} (LINATTN_TRACEBACK=1 shows where)"


def _distribution(words: Sequence[str]) -> str | None:
    """What provides the command, if it is not linattn itself."""
    return COMMANDS[words[0]].distribution or None if words and words[0] in COMMANDS else None


def _command_name(words: Sequence[str]) -> str:
    """ "linattn lab faces" for ["lab", "faces", "--nonsense"]."""
    known, commands = ["linattn"], COMMANDS
    for word in words:
        if word not in commands:
            break
        known.append(word)
        try:
            commands = resolve(word, commands[word]).commands
        except ImportError:
            break
    return " ".join(known)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt inside, so that the command can clean up; a second one ends the process."""
    if signal.getsignal(signal.SIGINT) is not stop:  # `main` did not install it: a test, or a program that calls main
        yield
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, stop)
        raise KeyboardInterrupt

    def unraisable(info: "sys.UnraisableHookArgs") -> None:
        if isinstance(info.exc_value, KeyboardInterrupt):  # it hit a callback, which cannot raise
            stop()
        sys.__unraisablehook__(info)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, stop)
        sys.unraisablehook = sys.__unraisablehook__
