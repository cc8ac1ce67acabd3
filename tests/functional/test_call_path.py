"""A warm call passes few files; benchmarks/call_path.py prints the same for more of them."""

import importlib.util
from pathlib import Path

import pytest

from native_support import needs_native

pytestmark = needs_native
FILE = Path(__file__).parents[2] / "benchmarks" / "call_path.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("call_path", FILE)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("positive, native, forward", 5),
        ("positive, native, causal forward", 5),
        ("positive, native, prefill from no state", 5),
        ("positive, native, prefill with state", 5),
        ("positive, native, decode", 5),
        ("near/far, native, forward", 5),
        ("near/far, native, causal forward", 5),
        ("near/far, native, prefill from no state", 6),
        ("near/far, native, prefill with state", 8),
        ("near/far, native, decode", 8),
        ("delta rule, forward", 5),
        ("delta rule, decode", 5),
    ],
)
def test_few_files_and_few_changes_of_file(script, name, most):
    call = script.cases()[name]
    for _ in range(3):
        call()
    path = script.call_path(call)
    assert path[0] == path[-1]
    assert path[0].startswith("functional/")
    assert len(set(path)) <= most, path
    assert (len(path) - 1) // 2 <= most, path
