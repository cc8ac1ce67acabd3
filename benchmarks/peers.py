"""Other libraries, in a throw-away virtual environment (.venv-bench) that borrows this one's torch."""

import json
import subprocess
import sys
import venv
from pathlib import Path

import torch

from cases import Row, attend, tokens
from clocks import seconds
from linattn.kernels import Positive

FOLDER = Path(__file__).resolve().parents[1] / ".venv-bench"
PACKAGES = ["performer-pytorch==1.1.4", "einops", "axial-positional-embedding", "local-attention", "hyper-connections"]
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


def _python() -> Path:
    """The environment's interpreter; set up on first use."""
    python = FOLDER / "bin" / "python"
    if not python.exists():
        venv.create(FOLDER, with_pip=True)
        site = next((FOLDER / "lib").glob("python*")) / "site-packages"
        (site / "borrowed.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            *PACKAGES,
        ]
        subprocess.run(command, check=True)
    return python


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
