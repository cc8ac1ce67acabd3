"""Python processes that have imported torch already, for tests that need a process of their own.

A fresh Python imports torch for a second or more. Each test worker starts one server that does it once; a process is a
fork of the server, which then runs a script as `python` would. Only torch is there: linattn and everything else is
imported by the script, under its own environment. What must see torch itself being imported starts a fresh Python.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from typing import IO, Any

# Runs in the server. A request is a JSON object with four file descriptors: stdin, stdout, stderr, and a socket that gets
# the process's id and, when it has ended, its exit code. The process between server and script waits for the script.
SERVER = """
import contextlib, json, os, runpy, socket, sys, types
import torch
requests = socket.socket(fileno=0)
while True:
    text, given, _, _ = socket.recv_fds(requests, 2**16, 4)
    while text and not text.endswith(b"\\n"):
        text += requests.recv(2**16)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0 if not text else os.WNOHANG)[0]:
            pass
    if not text:
        os._exit(0)
    if os.fork():
        for one in given:
            os.close(one)
        continue
    report = given.pop()
    requests.detach()
    script = os.fork()
    if script:
        for one in given:
            os.close(one)
        os.write(report, b"%d\\n" % script)
        code = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
        os.write(report, b"%d\\n" % code)
        os._exit(0)
    break
os.close(report)
for number, one in enumerate(given):
    os.dup2(one, number)
    os.close(one)
asked = json.loads(text)
os.environ.clear()
os.environ.update(asked["environment"])
os.chdir(asked["folder"])
kind, *sys.argv = asked["words"]
if kind == "-c":
    code, sys.argv[0] = sys.argv[0], "-c"
    server, main = sys.modules["__main__"], types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(code, "<string>", "exec"), main.__dict__)
elif kind == "-m":
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.argv.insert(0, kind)
    sys.path[0] = os.path.dirname(kind)
    runpy.run_path(kind, run_name="__main__")
"""


@cache
def _server() -> socket.socket:
    """Where requests are sent; starts the server."""
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=theirs, env=environment)
    theirs.close()

    def stop() -> None:
        ours.close()
        process.wait()

    atexit.register(stop)
    return ours


class Process:
    """A script in a process of its own: the words after `python`, which begin with -c, -m or a path. Text pipes.

    Leaving a `with` kills it. `environment` replaces that of this process.
    """

    def __init__(self, *words: str, environment: Mapping[str, str] | None = None):
        pipes = [os.pipe() for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        self.stdin: IO[str] = os.fdopen(pipes[0][1], "w")
        self.stdout, self.stderr = (os.fdopen(pipe[0]) for pipe in pipes[1:])
        report, other = socket.socketpair()
        asked = {"words": words, "environment": dict(environment or os.environ), "folder": os.getcwd()}
        socket.send_fds(_server(), [json.dumps(asked).encode() + b"\n"], [*theirs, other.fileno()])
        for one in theirs:
            os.close(one)
        other.close()
        with report:
            self._report = report.makefile()
        self.pid = int(self._report.readline())
        self.returncode: int | None = None
        self._waiting = threading.Thread(target=self._wait, daemon=True)
        self._waiting.start()

    def _wait(self) -> None:
        with self._report:
            self.returncode = int(self._report.readline())

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        """The exit code; that of a signal is negative, as in subprocess."""
        self._waiting.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """All that it writes to stdout and stderr, once it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reader.start()
        with self.stdout, self.stderr:
            found = self.stdout.read()
            reader.join()
        self.wait(timeout)
        return found, errors[0]

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()
        self.wait()
        for pipe in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def run_ranks(count: int, *words: str) -> list[subprocess.CompletedProcess[str]]:
    """Runs a script in several processes at once, with the variables that torchrun would give them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    shared["LOCAL_WORLD_SIZE"] = shared["WORLD_SIZE"]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    processes = [Process(*words, environment={**os.environ, **shared, **rank}) for rank in ranks]
    texts = [process.communicate() for process in processes]
    return [subprocess.CompletedProcess(words, p.wait(), *text) for p, text in zip(processes, texts, strict=True)]


def run(
    *words: str, environment: Mapping[str, str] | None = None, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a script to its end: the words after `python`. With `check`, an exit code other than 0 is an error."""
    process = Process(*words, environment=environment)
    out, errors = process.communicate()
    done = subprocess.CompletedProcess(words, process.wait(), out, errors)
    if check:
        assert done.returncode == 0, errors
    return done
