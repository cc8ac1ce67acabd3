"""The example under torchrun: the losses of one process, also after kill -9 of a process."""

import json
import os
from pathlib import Path

import pytest

import warm_python

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "sequence_parallel.py")
OPTIONS = ["--steps", "7", "--length", "101", "--batch", "2", "--every", "3"]


def losses(path: Path) -> dict[int, float]:
    """Step -> loss; of a step that was done again, the last."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.slow
def test_a_killed_process_costs_no_more_than_the_steps_since_the_last_checkpoint(tmp_path):
    warm_python.run(EXAMPLE, *OPTIONS, "--losses", str(tmp_path / "one"), check=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    shared = [EXAMPLE, *OPTIONS, "--sequence", "2", "--losses", str(tmp_path / "two"), "--kill-at", "5"]
    shared += ["--checkpoint", str(tmp_path / "checkpoint")]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = warm_python.run(*torchrun, *shared, environment=environment, check=True)
    assert "going on after step 3" in done.stdout
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert list(one) == list(range(1, 8)) == sorted(two)
    assert [two[step] for step in one] == pytest.approx(list(one.values()), rel=1e-4)
