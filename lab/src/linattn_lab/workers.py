"""Worker processes. Imports nothing slow, so that Ctrl-C ends a starting worker without a traceback."""

import signal


def start_worker(threads: int) -> None:
    """The initializer of a worker: Ctrl-C ends it without a traceback; the parent process reports it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch

    torch.set_num_threads(threads)
