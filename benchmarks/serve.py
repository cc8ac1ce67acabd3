"""The bars of `linattn serve`, measured through HTTP against server processes of its own.

    python benchmarks/serve.py                                  all of it on SmolLM2-135M
    python benchmarks/serve.py --only first-question streams    some of it
    python benchmarks/serve.py --quick                          short documents, to see that it runs

On a shared machine wall time says little, so that the processor time of the server is given beside it; ratios are within a run.
"""

import argparse
import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from linattn.measure.machine import machine
from registry import Row

MODULES = (
    "argparse",
    "tarfile",
    "logging",
    "decimal",
    "fractions",
    "statistics",
    "unittest.case",
    "unittest.mock",
    "doctest",
)
MODULES += (
    "email.message",
    "http.client",
    "subprocess",
    "threading",
    "typing",
    "inspect",
    "random",
    "pathlib",
    "turtle",
)


def prose() -> str:
    """Sentences from the docstrings of Python's own library, about 60000 tokens."""
    found = []
    for name in MODULES:
        tree = ast.parse(inspect.getsource(importlib.import_module(name)))
        nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        found += [textwrap.dedent(doc) for n in nodes if (doc := ast.get_docstring(n))]
    return "\n\n".join(found)


class Server:
    """`linattn serve` in a process, and its clocks."""

    def __init__(self, words: list[str]):
        command = [sys.executable, "-m", "linattn", "serve", "--port", "0", *words]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"at (http://\S+)", line):
                self.url = found[1]
                break
        if not self.url:
            raise SystemExit("the server did not start.")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.http = httpx.Client(base_url=self.url, timeout=3600, limits=httpx.Limits(max_connections=None))

    def processor(self) -> float:
        """Seconds of processor time of the server so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/v1/status").json()
        return found

    def first_token(self, body: dict[str, Any]) -> "Timing":
        """Time from the request to the first piece of text, and to the end."""
        begun, used, first, tokens = time.perf_counter(), self.processor(), None, 0
        first_used = used
        with self.http.stream(
            "POST", "/v1/chat/completions", json={**body, "stream": True, "temperature": 0}
        ) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                if choice["delta"].get("content") or choice["finish_reason"]:
                    tokens += 1
                    if first is None:
                        first, first_used = time.perf_counter(), self.processor()
        assert first is not None
        return Timing(first - begun, first_used - used, time.perf_counter() - begun, self.processor() - used, tokens)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.http.close()


@dataclass(frozen=True)
class Timing:
    """Seconds to the first token and to the end, by the clock and of the server's processor time; pieces of text."""

    first: float
    first_used: float
    whole: float
    whole_used: float
    pieces: int


@contextmanager
def serving(args: argparse.Namespace, kernel: str, *words: str) -> Iterator[Server]:
    context = ["--context", "16384", "--timeout", "3600", "--threads", str(args.threads)]
    made = Server(["--model", args.model, "--kernel", kernel, *context, *words])
    try:
        yield made
    finally:
        made.stop()


def document(server: Server, tokens: int) -> str:
    """Prose of about so many tokens, found by asking the server for the size of a part."""
    text = prose()
    sample = text[: min(len(text), 4000)]
    answer = server.http.post("/v1/completions", json={"prompt": sample, "max_tokens": 1}).json()
    per_token = len(sample) / answer["usage"]["prompt_tokens"]
    return text[: int(tokens * per_token)]


def first_question(args: argparse.Namespace) -> Iterator[Row]:
    """A second question on a document of 8192 tokens starts at least 20x sooner than the first."""
    for kernel in ("nearfar", "softmax"):
        with serving(args, kernel) as server:
            text = document(server, 512 if args.quick else 8192)
            body = {"messages": [{"role": "user", "content": f"{text}\n\nWhat is this text about?"}], "max_tokens": 4}
            first = server.first_token(body)
            body["messages"][0]["content"] = f"{text}\n\nName one thing that it mentions."  # type: ignore[index]
            second = server.first_token(body)
            state = server.http.post("/v1/states", json={"text": text}).json()
            asked = {"messages": [{"role": "user", "content": "Who wrote it?"}], "state": state["id"], "max_tokens": 4}
            third = server.first_token(asked)
            name = f"{kernel}, {state['tokens']} tokens"
            for label, later in (("second question in full", second), ("question with a state id", third)):
                yield Row(f"{name}: first / {label}, wall", first.first / later.first, "x", 20)
                yield Row(f"{name}: first / {label}, processor", first.first_used / later.first_used, "x", 20)
            yield Row(f"{name}: first question starts after", first.first, "s")
            yield Row(f"{name}: second question starts after", second.first, "s")
            yield Row(f"{name}: its state", state["bytes"] / 2**20, "MiB")


def conversations(args: argparse.Namespace) -> Iterator[Row]:
    """200 idle conversations of 4096 tokens in under 4 GiB with near/far; exact beside it.

    All are about one document, so that it is read once, but each has a state of its own: nothing of it is shared.
    """
    length, count = (256, 6) if args.quick else (4096, args.conversations)
    for kernel, wanted in (("nearfar", count), ("softmax", 3)):
        budget = 29 * count // 2 if kernel == "nearfar" else 64 * 1024  # MiB; a state takes 14.0
        with serving(args, kernel, "--state-memory", str(budget)) as server:
            base = server.status()["resident_bytes"]
            state = server.http.post("/v1/states", json={"text": document(server, length)}).json()
            histories = []
            for i in range(wanted):
                messages = [{"role": "user", "content": f"{i}. question: what is the {i}. word?"}]
                answer = _chat(server, state["id"], messages, 4)
                histories.append([*messages, answer["choices"][0]["message"]])
                print(f"    {kernel}: conversation {i + 1} of {wanted}", end="\r", flush=True)
            held, tokens = server.status()["resident_bytes"], answer["usage"]["total_tokens"]
            name = f"{kernel}, {wanted} conversations of {tokens} tokens"
            yield Row(f"{name}: states in memory", server.status()["state_bytes"] / 2**20, "MiB")
            yield Row(f"{name}: process without them", base / 2**20, "MiB")
            bar = 4 if kernel == "nearfar" else None
            if kernel == "nearfar":
                yield Row(f"{name}: process", held / 2**30, "GiB", bar, at_least=False)
            else:
                total = (base + (held - base) / wanted * count) / 2**30
                yield Row(f"{name}: process with {count} of them, extrapolated", total, "GiB")
            found = []
            for i in range(0, wanted, max(1, wanted // 20)):
                more = [*histories[i], {"role": "user", "content": "Go on."}]
                details = _chat(server, state["id"], more, 1)["usage"]["prompt_tokens_details"]
                found.append(details["cached_tokens"] > state["tokens"] + 8)
            yield Row(f"{name}: of {len(found)} that are continued, start from their state", sum(found), "", len(found))


def _chat(server: Server, state: str, messages: list[dict[str, str]], tokens: int) -> Any:
    body = {"state": state, "messages": messages, "max_tokens": tokens, "temperature": 0}
    response = server.http.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    return response.json()


def streams(args: argparse.Namespace) -> Iterator[Row]:
    """Tokens per second of 8 concurrent streams are at least 3x those of one."""
    tokens = 16 if args.quick else 64
    for kernel in ("nearfar", "softmax"):
        with serving(args, kernel) as server:
            text = document(server, 64 if args.quick else 400)
            bodies = [
                {"prompt": f"{i} {text}", "max_tokens": tokens, "temperature": 0, "stop": ["\u2603"]} for i in range(9)
            ]

            def write(body: dict[str, Any], server: Server = server) -> int:
                answer = server.http.post("/v1/completions", json=body).json()
                return int(answer["usage"]["completion_tokens"])

            for body in bodies:  # read the prompts first: only writing is measured
                write({**body, "max_tokens": 1})
            rates = {}
            for rows in (1, 8):
                begun, used = time.perf_counter(), server.processor()
                written = sum(_together([lambda body=body: write(body) for body in bodies[:rows]]))  # type: ignore[misc]
                rates[rows] = written / (time.perf_counter() - begun), written / (server.processor() - used)
            yield Row(f"{kernel}: one stream", rates[1][0], "tokens/s")
            yield Row(f"{kernel}: 8 streams", rates[8][0], "tokens/s")
            yield Row(f"{kernel}: 8 streams / one, wall", rates[8][0] / rates[1][0], "x", 3)
            yield Row(f"{kernel}: 8 streams / one, processor", rates[8][1] / rates[1][1], "x", 3)


def short_beside_long(args: argparse.Namespace) -> Iterator[Row]:
    """A short request while a long prompt is read has its first token less than 1 s later than alone."""
    for kernel in ("nearfar", "softmax"):
        with serving(args, kernel) as server:
            text = document(server, 1024 if args.quick else 8192)
            bodies = [
                {"messages": [{"role": "user", "content": f"What is {i} plus {i}?"}], "max_tokens": 2} for i in range(9)
            ]
            alone = [server.first_token(body) for body in bodies[:4]]

            def read(server: Server = server, text: str = text) -> None:
                with suppress(httpx.HTTPError):  # the server is stopped while it reads
                    server.http.post("/v1/states", json={"text": text})

            reading = threading.Thread(target=read, daemon=True)
            reading.start()
            while server.status()["reading"] == 0:
                time.sleep(0.02)
            beside = [server.first_token(body) for body in bodies[4:8]]
            still = server.status()["reading"] > 0
            more = _median([t.first for t in beside]) - _median([t.first for t in alone])
            used = _median([t.first_used for t in beside]) - _median([t.first_used for t in alone])
            note = "" if still else " (the long prompt was read before the end)"
            yield Row(f"{kernel}: first token alone, median of 4", _median([t.first for t in alone]), "s")
            yield Row(f"{kernel}: later beside a long prompt, wall{note}", more, "s", 1, at_least=False)
            yield Row(f"{kernel}: later beside a long prompt, processor{note}", used, "s", 1, at_least=False)


CASES: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "first-question": first_question,
    "streams": streams,
    "short-beside-long": short_beside_long,
    "conversations": conversations,
}


def _together(calls: list[Callable[[], int]]) -> list[int]:
    results: list[int] = []
    threads = [threading.Thread(target=lambda call=call: results.append(call())) for call in calls]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _median(numbers: list[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="short documents, to see that it runs")
    parser.add_argument("--conversations", type=int, default=200, help="idle conversations with near/far")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, default=Path("out/serve.json"))
    args = parser.parse_args()
    about = {**machine(), "threads": args.threads, "model": args.model, "load": os.getloadavg()[0]}
    for name, value in about.items():
        print(f"{name:15} {value}")
    record: dict[str, Any] = {"machine": about, "cases": {}}
    for name in args.only:
        print(f"\n{name}: {CASES[name].__doc__}", flush=True)
        rows = []
        for row in CASES[name](args):
            print(f"  {row}", flush=True)
            rows.append(row.record())
        record["cases"][name] = rows
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
