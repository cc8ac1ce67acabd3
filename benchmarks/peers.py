"""Other libraries, in a throw-away virtual environment (.venv-bench) that borrows this one's torch."""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

import torch

from cases import Row, attend, tokens
from clocks import seconds
from linattn.kernels import Custom, Positive

FOLDER = Path(__file__).resolve().parents[1] / ".venv-bench"
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


def fast_transformers(length: int, budget: float) -> list[Row]:
    """Times faster than the causal product of pytorch-fast-transformers, r = 128."""
    try:
        words = ["-c", PRODUCT_SCRIPT, str(_causal_product()), str(length), str(torch.get_num_threads())]
        result = subprocess.run([str(_python()), *words], check=True, capture_output=True, text=True)
        theirs = json.loads(result.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"fast-transformers could not be measured: {getattr(error, 'stderr', None) or error}", file=sys.stderr)
        return []
    kernel, x, given = Positive(64, features=128), tokens(length), Custom(lambda x: x)
    features = [torch.rand(1, 8, length, 128), torch.rand(1, 8, length, 128), x[2]]
    calls = {"given": lambda: attend(features, given, True), "whole": lambda: attend(x, kernel, True)}
    ours = seconds(calls, budget=budget)
    name = "fast-transformers' causal product / native"
    return [
        Row(f"{name} on the same features, N = {length}", theirs / ours["given"], "times"),
        Row(f"{name} from q and k, N = {length}", theirs / ours["whole"], "times", 5.0),
    ]


def performer(length: int, budget: float) -> list[Row]:
    """Times faster than performer-pytorch, r = 128."""
    try:
        command = [str(_python()), "-c", SCRIPT, str(length), str(torch.get_num_threads())]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        theirs = json.loads(result.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"performer-pytorch could not be measured: {getattr(error, 'stderr', None) or error}", file=sys.stderr)
        return []
    kernel, x, rows = Positive(64, features=128), tokens(length), []
    for name, bar in (("full", 5.0), ("causal", 60.0)):
        ours = seconds({"native": lambda c=name == "causal": attend(x, kernel, c)}, budget=budget)["native"]
        rows.append(Row(f"performer-pytorch / native, {name}, N = {length}", theirs[name] / ours, "times", bar))
    return rows
