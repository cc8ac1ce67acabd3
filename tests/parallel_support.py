"""A pool of four gloo processes for all tests of linattn.parallel, forked from one server so that torch is imported once.

Cases are functions of a Members of linattn.parallel in parallel_cases.py and parallel_model_cases.py; the processes of a group
of 2, 3 or 4 run one together. They end by os._exit: a gloo process that ends the usual way may abort while its threads
still hold work.
"""

import contextlib
import importlib
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

SIZES = (2, 3, 4)
MODULES = ("parallel_cases", "parallel_model_cases")


class Pool:
    """Processes that wait for cases. timeout: of the process group, in seconds."""

    def __init__(self, world: int = 4, timeout: float = 30.0):
        self.world, self.timeout = world, timeout
        self._open()

    def _open(self) -> None:
        world, timeout = self.world, self.timeout
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers", *MODULES])
        folder = tempfile.mkdtemp()
        self.processes, self.pipes = [], []
        for rank in range(world):
            own, other = context.Pipe()
            process = context.Process(target=_work, args=(rank, world, f"{folder}/store", timeout, other), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(own)

    def start(self, size: int, case: str, *args: Any) -> None:
        """Starts "module.function"(who, *args) on the first `size` processes."""
        for pipe in self.pipes[:size]:
            pipe.send((size, case, args))

    def finish(self, size: int, seconds: float = 90.0) -> list[Any]:
        """What each process returned; the text of an exception that it raised, or None for a process that is gone."""
        found = []
        for rank, pipe in enumerate(self.pipes[:size]):
            try:
                found.append(pipe.recv() if pipe.poll(seconds) else ("hangs", f"process {rank} does not answer"))
            except EOFError:
                found.append(("gone", None))
        return found

    def run(self, size: int, case: str, *args: Any) -> list[Any]:
        """Runs a case and fails if any process did."""
        self.start(size, case, *args)
        found = self.finish(size)
        wrong = [f"process {rank}: {text}" for rank, (kind, text) in enumerate(found) if kind != "done"]
        if wrong:  # what the processes have told each other no longer fits together
            self.close()
            self._open()
        assert not wrong, "\n".join(wrong)
        return [result for _, result in found]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with contextlib.suppress(OSError):  # it is gone already
                pipe.send(None)
            process.join(2)
            if process.is_alive():
                process.kill()


def _work(rank: int, world: int, store: str, timeout: float, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from linattn.parallel.groups import members

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    limit = timedelta(seconds=timeout)  # a new group does not take over that of the first
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in SIZES if size <= world}
    while (task := pipe.recv()) is not None:
        size, case, args = task
        module, name = case.split(".")
        try:
            result = getattr(importlib.import_module(module), name)(members(groups[size]), *args)
            pipe.send(("done", result))
        except BaseException:
            pipe.send(("raised", traceback.format_exc()))
    os._exit(0)
