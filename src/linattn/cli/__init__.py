"""The `linattn` command."""

import os
import signal

TYPE_CHECKING = False  # importing typing would keep Ctrl-C waiting for `main`
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: "Sequence[str] | None" = None) -> int:
    """Runs one command and returns its exit code; mistakes in the arguments raise SystemExit, as argparse does.

    argv: the words after `linattn`. None takes the process's own, and Ctrl-C then stops it quietly even while modules
    load: nothing needs to be cleaned up yet, and an exception inside an import may be swallowed or shown as another one.
    """
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
    from .run import run

    return run(argv)


def stop(*_: object) -> None:
    """Ends the process at once, as a signal handler."""
    os.write(2, b"linattn: stopped\n")
    os._exit(130)
