"""How much memory of freed outputs is kept: limits, growth, and what users see of it."""

import json
import os
import sys

import pytest

import warm_python
from linattn.cli import main
from linattn.engines import release
from linattn.engines.native import output_pool as memory
from linattn.engines.native.ffi import Library, _memory_limit, library
from linattn.measure import peak_memory
from native_support import needs_native

pytestmark = [needs_native, pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps memory")]

MIB = 2**20


def run_alone(code: str, keep: str) -> str:
    done = warm_python.run("-c", code, environment={**os.environ, "LINATTN_KEEP_MB": keep}, check=True)
    assert done.stderr == ""
    return done.stdout.strip()


KEPT = """
from linattn.engines.native import output_pool as memory
from linattn.engines.native.ffi import library
most, held = 0, []
for i in range(30):
    held.append(memory.empty(1, 1 + i % 3, 2**19).fill_(i))
    if i % 4 == 3:
        held.clear()
    most = max(most, memory.kept())
print(library.memory_limit, most)
"""


@pytest.mark.parametrize(("keep", "most"), [("0", 0), ("9", 8), ("1000", 24)])
def test_the_environment_limits_what_is_kept(keep, most):
    limit, seen = map(int, run_alone(KEPT, keep).split())
    assert limit == int(keep) * MIB
    assert seen == most * MIB


def test_without_it_an_eighth_of_the_machine_s_memory_is_the_limit(monkeypatch):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setenv("LINATTN_KEEP_MB", "")
    assert _memory_limit() == machine // 8


@pytest.mark.parametrize("keep", ["much", "-1", "1.5"])
def test_a_limit_that_is_no_number_is_named(keep, monkeypatch):
    monkeypatch.setenv("LINATTN_KEEP_MB", keep)
    assert f"LINATTN_KEEP_MB is {keep!r}" in Library().why_not


GROWTH = """
import torch, linattn
def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith("VmRSS"))
kernel, tokens = linattn.kernels.Elu(), torch.randn(1, 4, 5000, 64)
def call(i):
    x = tokens[:, :, : 2500 + {step} * i].clone().requires_grad_(i % 2 == 0)
    out = linattn.attention(x, x, x, kernel=kernel, engine="native", is_causal=True)
    if i % 2 == 0:
        out.sum().backward()
for i in range(10):
    call(i)
before = resident()
for i in range(70):
    call(3 * i)
print(resident() - before)
"""


@pytest.mark.parametrize(("step", "keep", "most"), [(0, "1000", 16), (12, "40", 64)])
def test_memory_does_not_grow(step, keep, most):
    """Of equal calls not at all; of calls of ever new lengths up to the limit, and some for what malloc does."""
    assert int(run_alone(GROWTH.format(step=step), keep)) < most


def test_info_says_how_much_is_kept(capsys):
    release()
    memory.empty(4 * MIB // 4)
    assert main(["info"]) == 0
    line = f"kept memory     4 MiB of freed outputs, at most {library.memory_limit / MIB:.0f} "
    assert line in capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"] == {"kept": 4 * MIB, "limit": library.memory_limit}


def test_what_is_kept_does_not_hide_what_a_call_takes():
    for _ in range(2):
        assert peak_memory(lambda: memory.empty(32 * MIB // 4).fill_(1)) >= 32 * MIB
