"""torch.compile without graph breaks, torch.func, and the memory of a training step."""

import shutil
import sys

import pytest
import torch
import torch._dynamo.testing

import linattn
import warm_python
from conftest import KERNELS, assert_close, qkv
from linattn.engines import checkpointing
from native_support import needs_native

COMPILED = [name for name in KERNELS if name not in ("positive-iid", "positive-hyperbolic", "trig-temperature")]
# Every kernel in one of the two forms, two of them in both.
FORMS = {(name, i % 2 == 0) for i, name in enumerate([*COMPILED, "named"])}
FORMS |= {(name, causal) for name in ("positive", "elu") for causal in (False, True)}


@pytest.mark.parametrize(("name", "is_causal"), sorted(FORMS))
def test_compile_has_no_graph_breaks(name, is_causal):
    torch._dynamo.reset()
    kernel = "positive" if name == "named" else KERNELS[name]()
    inputs = qkv(150, grad=True, dtype=torch.float32)

    def call(q, k, v):
        return linattn.attention(q, k, v, kernel=kernel, is_causal=is_causal, return_state=True)

    out, state = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)
    expected, eager = call(*inputs)
    assert_close(out, expected)
    assert_close(state.S, eager.S)
    for got, want in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected)), strict=False):
        assert_close(got, want)


@pytest.mark.parametrize("name", ["elu", "positive"])
def test_compile_of_one_token_with_a_named_kernel(name):
    torch._dynamo.reset()
    _, state = linattn.attention(*qkv(30, dtype=torch.float32), kernel=name, is_causal=True, return_state=True)
    token = qkv(1, dtype=torch.float32)

    def call(state, *inputs):
        return linattn.attention(*inputs, kernel=name, is_causal=True, state=state, return_state=True)

    (out, after), (expected, eager) = (
        torch.compile(call, fullgraph=True, backend="eager")(state, *token),
        call(state, *token),
    )
    assert_close(out, expected)
    assert_close(after.S, eager.S)


@pytest.mark.parametrize("is_causal", [True, False])
def test_compile_of_near_far_by_name(is_causal):
    torch._dynamo.reset()
    inputs = qkv(300, dtype=torch.float32)

    def call(q, k, v):
        return linattn.attention(q, k, v, kernel="nearfar", is_causal=is_causal)

    assert_close(torch.compile(call, fullgraph=True, backend="eager")(*inputs), call(*inputs), factor=10)


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="torch's compiler needs a C++ compiler"
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler, about torch itself
def test_compile_to_machine_code(monkeypatch):
    torch._dynamo.reset()
    # Vector instructions are those that the processor says it has: torch would try each in a process of its own.
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)
    inputs = qkv(100, dtype=torch.float32)
    call = torch.compile(lambda q, k, v: linattn.attention(q, k, v, kernel="elu", is_causal=True), fullgraph=True)
    assert_close(call(*inputs), linattn.attention(*inputs, kernel="elu", is_causal=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler, of itself
def test_compile_with_a_state_and_several_segments(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(checkpointing, "COMPILED_BUDGET", 2**13)
    kernel = KERNELS["positive"]()
    first, second = qkv(5, grad=True), qkv(70, grad=True)

    def call(state, *inputs):
        return linattn.attention(*inputs, kernel=kernel, is_causal=True, state=state, return_state=True)

    _, before = call(None, *first)
    results = [one(before, *second) for one in (torch.compile(call, fullgraph=True, backend="aot_eager"), call)]
    grads = []
    for out, after in results:
        total = out.square().sum() + after.S.square().sum()
        grads.append(torch.autograd.grad(total, (*first[1:], *second), retain_graph=True))
    for got, want in zip(
        *([out, after.S, *own] for (out, after), own in zip(results, grads, strict=True)), strict=True
    ):
        assert_close(got, want)


@needs_native
def test_one_compilation_serves_every_length():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def call(q, k, v):
        return linattn.attention(q, k, v, kernel="elu", is_causal=True)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for n in (70, 140, 300, 65, 64, 2):
        inputs = qkv(n, dtype=torch.float32)
        assert_close(compiled(*inputs), call(*inputs))
    assert counter.frame_count == 2  # for the first length, and for any


@pytest.mark.parametrize("name", [*COMPILED, "softmax"])
def test_vmap_and_grad(name, monkeypatch):
    monkeypatch.setattr(checkpointing, "BUDGET", 2**10)
    kernel = KERNELS[name]() if name in KERNELS else linattn.kernels.Softmax()
    inputs = qkv(150)

    def call(q, k, v):
        return linattn.attention(q, k, v, kernel=kernel, is_causal=True)

    assert_close(torch.func.vmap(call)(*inputs), call(*inputs))
    got = torch.func.grad(lambda *x: call(*x).square().sum(), argnums=(0, 1, 2))(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    want = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    for x, y in zip(got, want, strict=False):
        assert_close(x, y)
    each = torch.func.vmap(torch.func.grad(lambda *x: call(*x).square().sum()))(*inputs)
    assert_close(each, want[0])


def test_second_derivatives_of_a_single_segment():
    query, key, value = qkv(6, batch=(1,), heads=1, grad=True, value_dim=2)
    kernel = KERNELS["positive"]()
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: linattn.attention(q, k, v, kernel=kernel, is_causal=True), (query, key, value)
    )


MEMORY = """
import torch, linattn
from linattn.measure import peak_memory
kernel = linattn.kernels.Positive(64, 256)
q, k, v = (torch.randn(1, 8, {tokens}, 64, requires_grad=True) for _ in range(3))
def step():
    out = linattn.attention(q, k, v, kernel=kernel, is_causal=True, engine="{engine}")
    return out, torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
print(peak_memory(step))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from Linux's /proc")
def test_a_training_step_keeps_no_features():
    """N = 16384, 8 heads, D = M = 64, r = 256: features alone would be 128 MiB for queries and 128 MiB for keys."""
    script = MEMORY.format(tokens=16384, engine="torch")
    done = warm_python.run("-c", script, check=True)
    assert int(done.stdout) < 1.5 * 2**28
