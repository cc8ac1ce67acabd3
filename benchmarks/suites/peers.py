"""Other libraries, in a throw-away virtual environment (.venv-bench) that borrows this one's torch."""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from linattn.kernels import Custom, Positive
from registry import Row, Settings, case
from suites.feature_maps import attend, tokens
from timer import seconds

FOLDER = Path(__file__).resolve().parents[2] / ".venv-bench"
FAST_TRANSFORMERS = "pytorch-fast-transformers==0.4.0"
PERFORMER = ["performer-pytorch==1.1.4", "einops", "axial-positional-embedding", "local-attention", "hyper-connections"]
BUILD = ["ninja", "setuptools<81", "wheel"]
SCRIPT = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch
from performer_pytorch import FastAttention
length, threads = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(threads)
q, k, v = (torch.randn(1, 8, length, 64) for _ in range(3))
best = {}
with torch.no_grad():
    for name, causal in (("full", False), ("causal", True)):
        attention = FastAttention(dim_heads=64, nb_features=128, causal=causal)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            attention(q, k, v)
            times.append(time.perf_counter() - start)
        best[name] = min(times)
print(json.dumps(best))
"""


# Their causal product takes features; ours is measured on features too, and with the projections and exponentials.
PRODUCT_SCRIPT = """
import json, os, sys, time
import torch
from torch.utils.cpp_extension import load
source, length, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
product = load("causal_product_cpu", [source], extra_cflags=["-O3", "-fopenmp", "-ffast-math"]).causal_dot_product
q, k = (torch.rand(1, 8, length, 128) for _ in range(2))
v = torch.randn(1, 8, length, 64)
times = []
for _ in range(4):
    out = torch.zeros(1, 8, length, 64)
    start = time.perf_counter()
    product(q, k, v, out)
    times.append(time.perf_counter() - start)
print(json.dumps(min(times)))
"""


def _pip(*words: str) -> None:
    """In the environment; without a CUDA compiler in sight, which some set-ups would try to use."""
    folders = [f for f in os.environ["PATH"].split(os.pathsep) if not os.path.exists(os.path.join(f, "nvcc"))]
    command = [
        str(FOLDER / "bin" / "python"),
        "-m",
        "pip",
        *words,
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    subprocess.run(command, check=True, env={**os.environ, "PATH": os.pathsep.join(folders)})


def _python() -> Path:
    """The environment's interpreter; set up on first use."""
    python = FOLDER / "bin" / "python"
    if not python.exists():
        venv.create(FOLDER, with_pip=True)
        site = next((FOLDER / "lib").glob("python*")) / "site-packages"
        (site / "borrowed.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
        _pip("install", *PERFORMER, *BUILD)
    return python


def _causal_product() -> Path:
    """The one source file that is measured: building the whole of the package takes a quarter of an hour."""
    _python()
    found = FOLDER / "causal_product_cpu.cpp"
    if not found.exists():
        with tempfile.TemporaryDirectory() as folder:
            _pip("download", "--no-build-isolation", "--dest", folder, FAST_TRANSFORMERS)
            with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
                (name,) = [n for n in archive.getnames() if n.endswith("causal_product/causal_product_cpu.cpp")]
                member = archive.extractfile(name)
                assert member is not None
                found.write_bytes(member.read())
    return found


@case("fast-transformers", slow=True)
def fast_transformers(settings: Settings) -> Iterator[Row]:
    """Times faster than the causal product of pytorch-fast-transformers, r = 128."""
    length = 8192
    theirs = _measure("fast-transformers", PRODUCT_SCRIPT, _causal_product, length)
    if theirs is None:
        return
    kernel, x, given = Positive(64, features=128), tokens(length), Custom(lambda x: x)
    features = torch.rand(1, 8, length, 128), torch.rand(1, 8, length, 128), x[2]
    calls = {"given": lambda: attend(features, given, True), "whole": lambda: attend(x, kernel, True)}
    ours = seconds(calls, budget=settings.budget)
    name = "fast-transformers' causal product / native"
    yield Row(f"{name} on the same features, N = {length}", theirs / ours["given"], "times")
    yield Row(f"{name} from q and k, N = {length}", theirs / ours["whole"], "times", 5.0)


@case("performer-pytorch", slow=True)
def performer(settings: Settings) -> Iterator[Row]:
    """Times faster than performer-pytorch, r = 128."""
    length = 8192
    theirs = _measure("performer-pytorch", SCRIPT, None, length)
    if theirs is None:
        return
    kernel, x = Positive(64, features=128), tokens(length)
    for name, bar in (("full", 5.0), ("causal", 60.0)):
        calls = {"native": lambda c=name == "causal": attend(x, kernel, c)}
        ours = seconds(calls, budget=settings.budget)["native"]
        yield Row(f"performer-pytorch / native, {name}, N = {length}", theirs[name] / ours, "times", bar)


def _measure(name: str, script: str, source: Callable[[], Path] | None, length: int) -> Any:
    """What the script prints as JSON in the peer's environment; None, and a line on stderr, where it cannot run."""
    try:
        words = [] if source is None else [str(source())]
        command = [str(_python()), "-c", script, *words, str(length), str(torch.get_num_threads())]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        return json.loads(result.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{name} could not be measured: {getattr(error, 'stderr', None) or error}", file=sys.stderr)
        return None
