"""A short soak of a running server; benchmarks/serve.py has the one that takes minutes."""

import pytest

pytest.importorskip("openai")

import importlib.util
from pathlib import Path


def test_answers_stay_equal_and_memory_flat(server):
    path = Path(__file__).parents[2] / "benchmarks" / "serve_soak.py"
    spec = importlib.util.spec_from_file_location("serve_soak", path)
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    found = soak.run(server.url, key="secret", model="tiny", clients=16, seconds=3.0, seed=0, max_tokens=8)
    assert found.wrong == []
    assert found.equal > 10
    assert found.cancelled > 2
    assert found.refused > 2
    assert found.running_after == 0
    assert found.memory_after - found.memory_middle < 30 * 2**20
