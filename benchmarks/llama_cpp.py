"""SmolLM2-135M by llama.cpp, by transformers and by transformers with near/far: tokens per second of processor time, memory.

    python benchmarks/texts.py out/texts                   the texts, from Debian packages
    python benchmarks/llama_cpp.py                         2048 and 8192 tokens, the longest this model reads
    python benchmarks/llama_cpp.py --lengths 2048 --only Q8_0 transformers near/far
    python benchmarks/llama_cpp.py --quick                 short texts, to see that everything runs

The first run makes an environment of its own, .venv-llama, and compiles llama-cpp-python from the package index for this
processor (a quarter of an hour of one core). The GGUF files are made of one set of weights by gguf's quantizers; those that
transformers reads are the same numbers in float32. Before anything is timed, llama.cpp must cut a text into the same tokens,
write the same continuation and have the same perplexity in F16 as transformers.

Everything runs on one thread, each in a process of its own. Clocks are the processor's, which other processes disturb little.
near/far is an approximation: its budgets are calibrated at each length, once, on another text than the one that is read.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from gguf_files import TYPES, file_of_type, shipped_file
from linattn import hf
from linattn.hf import weights
from linattn.measure.machine import machine

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".venv-llama"
PACKAGES = ("llama-cpp-python", "numpy")
# The library alone, for this processor.
CMAKE = "GGML_NATIVE=ON GGML_OPENMP=OFF LLAVA_BUILD=OFF LLAMA_BUILD_TOOLS=OFF LLAMA_BUILD_EXAMPLES=OFF LLAMA_BUILD_TESTS=OFF"
WORKER = Path(__file__).with_name("llama_cpp_worker.py")
MODEL = "smollm2"
CHUNK = 512  # tokens that are read at once
SLOTS = {2048: 216, 8192: 544}  # of near/far, per kv head on average: the budgets of docs/huggingface.md
TRANSFORMERS, NEARFAR = "transformers", "near/far"
CHECKED = 2048  # tokens whose perplexity is measured, or all where there are fewer
PROMPT, CONTINUED = 64, 24  # tokens of the prompt and of the continuation that must agree
TOLERANCE = 0.005  # relative difference of F16's perplexity from float32's


def environment(jobs: int) -> Path:
    """The interpreter that has llama.cpp; its environment is made on first use."""
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / "whole").exists():
        print(f"compiling llama-cpp-python in {ENVIRONMENT}", file=sys.stderr)
        venv.create(ENVIRONMENT, with_pip=True)
        arguments = " ".join(f"-D{word}" for word in CMAKE.split())
        settings = os.environ | {"CMAKE_ARGS": arguments, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
        subprocess.run(pip, check=True, env=settings)
        (ENVIRONMENT / "whole").touch()
    return python


def by_llama_cpp(python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Runs a job of the worker."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        done = subprocess.run([python, "-I", WORKER, file.name], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"llama.cpp ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def peak_mib() -> float:
    """The most memory this process had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@torch.inference_mode()
def by_transformers(job: dict[str, Any], results: Any) -> None:
    """A job as the worker has it; with `budgets`, a folder, near/far is attached."""
    torch.set_num_threads(1)
    model: Any = weights.load(MODEL)[0]
    cache: Any = DynamicCache(config=model.config)
    if job["budgets"]:
        hf.attach(model, hf.Calibration.load(job["budgets"]).kernels())
        cache = hf.StateCache(model)
    ids = torch.tensor([job["ids"]])
    if job["what"] == "check":
        logits = model(ids).logits[0, :-1].double()
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
        output = model.generate(ids[:, :PROMPT], max_new_tokens=CONTINUED, min_new_tokens=CONTINUED, do_sample=False)
        results.put({"perplexity": float(loss.exp()), "tokens": output[0, PROMPT:].tolist()})
        return
    model(ids[:, :16], logits_to_keep=1)
    begun = time.process_time()
    for chunk in ids.split(CHUNK, dim=1):
        logits = model(chunk, past_key_values=cache, logits_to_keep=1).logits
    read = time.process_time()
    tokens = []
    for _ in range(job["tokens"]):
        token = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(token))
        logits = model(token, past_key_values=cache, logits_to_keep=1).logits
    ended = time.process_time()
    results.put({"read": read - begun, "written": ended - read, "peak_mib": peak_mib(), "tokens": tokens})


def in_a_process(job: dict[str, Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=by_transformers, args=(job, results))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"transformers ended with code {process.exitcode}.")
    return results.get()


class Contestants:
    """Whoever reads and writes: types of GGUF files, transformers alone, and transformers with near/far."""

    def __init__(self, args: argparse.Namespace):
        self.python = environment(args.jobs)
        self.folder, self.flash = args.folder, args.flash
        self.source = shipped_file(MODEL, args.folder)
        self.tokenizer = weights.load(MODEL)[1]
        self.calibration_text = args.calibration_text

    def run(self, name: str, what: str, ids: list[int], **more: Any) -> dict[str, Any]:
        job = {"what": what, "ids": ids, "tokens": CONTINUED, **more}
        if name in (TRANSFORMERS, NEARFAR):
            return in_a_process(job | {"budgets": str(self.budgets(len(ids))) if name == NEARFAR else None})
        file = str(file_of_type(self.source, name))
        context = len(ids) + job["tokens"]
        job |= {"model": file, "context": context, "chunk": CHUNK, "flash": self.flash, "prompt": PROMPT}
        return by_llama_cpp(self.python, job)

    def budgets(self, length: int) -> Path:
        """The folder of the budgets for this length, measured once."""
        folder = self.folder / f"budgets-{length}"
        if not (folder / "linattn-budgets.json").is_file():
            print(f"calibrating near/far at {length} tokens", file=sys.stderr)
            model = weights.load(MODEL)[0]
            ids = weights.encode(self.tokenizer, self.calibration_text, length)
            hf.calibrate(model, ids, SLOTS.get(length, length // 10), save=folder)
        return folder

    def check(self, names: list[str], ids: list[int]) -> dict[str, float]:
        """Perplexities; an error if llama.cpp does not have the model that transformers has."""
        text = self.tokenizer.decode(ids)
        found = {name: self.run(name, "check", ids, text=text) for name in dict.fromkeys([TRANSFORMERS, "F16", *names])}
        ours, theirs = found[TRANSFORMERS], found["F16"]
        if theirs["cut"] != self.tokenizer(text, add_special_tokens=False).input_ids:
            raise SystemExit("llama.cpp cuts the text into other tokens.")
        if abs(theirs["perplexity"] / ours["perplexity"] - 1) > TOLERANCE:
            raise SystemExit(f"perplexity {theirs['perplexity']:.3f} by F16, {ours['perplexity']:.3f} by transformers.")
        if theirs["tokens"] != ours["tokens"]:
            raise SystemExit(f"F16 writes {theirs['tokens']}, transformers {ours['tokens']}.")
        return {name: one["perplexity"] for name, one in found.items()}


def table(rows: list[dict[str, Any]], perplexities: dict[str, float]) -> str:
    """Markdown: a row for each contestant and length."""
    lines = ["| | tokens | read, per second | written, per second | a token written | peak memory | perplexity |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        read, written = row["length"] / row["read"], row["new"] / row["written"]
        took = f"{1000 / written:.0f} ms"
        lines.append(
            f"| {label(row['name'])} | {row['length']} | {read:.0f} | {written:.1f} | {took} | {row['peak_mib']:.0f} MiB | "
            f"{perplexities[row['name']]:.2f} |"
        )
    return "\n".join(lines)


def label(name: str) -> str:
    if name == TRANSFORMERS:
        return "transformers, float32"
    return "transformers, float32, near/far" if name == NEARFAR else f"llama.cpp, {name}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*TYPES, TRANSFORMERS, NEARFAR]
    usual = [name for name in names if name != "F32"]
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="tokens read (default 2048 8192)")
    parser.add_argument("--tokens", type=int, default=64, help="written after them (default %(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=usual, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--rounds", type=int, default=1, help="in turns; the best of each counts (default %(default)s)")
    parser.add_argument("--text", type=Path, default=Path("out/texts/fresh-prose.txt"), help="default %(default)s")
    parser.add_argument(
        "--calibration-text", type=Path, default=Path("out/texts/calibration.txt"), help="default %(default)s"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("out/llama"), help="of GGUF files and budgets (%(default)s)"
    )
    parser.add_argument("--flash", action="store_true", help="llama.cpp's flash attention")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at once (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="256 tokens, to see that everything runs")
    parser.add_argument("--json", type=Path, help="write all of it for machines")
    args = parser.parse_args()
    if args.quick:
        args.lengths, args.tokens = [256], 8
    for path in (args.text, args.calibration_text):
        if not path.is_file():
            parser.error(f"there is no {path}: run `python benchmarks/texts.py out/texts` first.")
    return args


def main() -> None:
    args = parse()
    found = Contestants(args)
    about = machine()
    print(
        f"{MODEL} on one thread; torch {about['torch']}, {about['processor']}; flash attention of llama.cpp: {args.flash}"
    )
    checked = weights.encode(found.tokenizer, args.text, min(*args.lengths, CHECKED))[0].tolist()
    perplexities = found.check(args.only, checked)
    print("llama.cpp has the same tokens, continuation and, in F16, perplexity as transformers", flush=True)
    rows = []
    for length in args.lengths:
        ids = weights.encode(found.tokenizer, args.text, length)[0].tolist()
        best: dict[str, dict[str, Any]] = {}
        for _ in range(args.rounds):
            for name in args.only:
                now = found.run(name, "time", ids, tokens=args.tokens)
                old = best.setdefault(name, now)
                for key in ("read", "written", "peak_mib"):
                    old[key] = min(old[key], now[key])
                print(
                    f"  {label(name)}, {length}: read {now['read']:.1f} s, written {now['written']:.1f} s",
                    file=sys.stderr,
                )
        rows += [{"name": name, "length": length, "new": args.tokens, **row} for name, row in best.items()]
    print(f"perplexity is that of the first {len(checked)} tokens\n\n" + table(rows, perplexities))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": about, "perplexity": perplexities, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
