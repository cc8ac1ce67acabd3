"""Memory of large outputs: freed blocks are used again, live ones never, whoever holds them; threads and forks."""

import io
import itertools
import os
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import linattn
from linattn import NearFar
from linattn.engines import release
from linattn.engines.native import output_pool as memory
from linattn.engines.native.ffi import library
from linattn.kernels import Elu, Positive
from native_support import needs_native, side_by_side, tokens

pytestmark = [needs_native, pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps memory")]

MIB = 2**20
SHAPE = (1, 4, 2500, 64)  # 2.4 MiB: a block of 4


@pytest.fixture(autouse=True)
def nothing_kept():
    release()
    yield
    release()


def attend(seed: int = 0, **options):
    q, k, v = (tokens(*SHAPE, seed=3 * seed + i) for i in range(3))
    return linattn.attention(q, k, v, kernel=Elu(), engine="native", **options)


def poison(count: int = 12) -> None:
    """Leaves blocks full of NaN to be used next."""
    held = [memory.empty(*SHAPE).fill_(torch.nan) for _ in range(count)]
    assert memory.kept() == 0
    del held
    assert memory.kept() == 4 * MIB * count


def _forward(q, k, v, **options):
    return [linattn.attention(q, k, v, engine="native", **options)]


def _backward(q, k, v, **options):
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = linattn.attention(*inputs, engine="native", **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


MASK = tokens(1, SHAPE[2], seed=9) > -1
CALLS = {
    "full": (_forward, {"kernel": Elu()}),
    "full, with a state": (lambda *x, **o: [_forward(*x, return_state=True, **o)[0][0]], {"kernel": Elu()}),
    "causal": (_forward, {"kernel": Elu(), "is_causal": True}),
    "masked": (_forward, {"kernel": Elu(), "key_mask": MASK}),
    "near/far": (_forward, {"kernel": NearFar(window=64, slots=8, block=64), "is_causal": True}),
    "near/far, masked": (
        _forward,
        {"kernel": NearFar(window=64, slots=8, block=64), "is_causal": True, "key_mask": MASK},
    ),
    "trained": (_backward, {"kernel": Positive(64, features=16)}),
    "trained, causal": (_backward, {"kernel": Positive(64, features=16), "is_causal": True, "key_mask": MASK}),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_change(name, monkeypatch):
    run, options = CALLS[name]
    inputs = [tokens(*SHAPE, seed=i) for i in range(3)]
    poison()
    before = memory.kept()
    got = run(*inputs, **options)
    if name != "near/far, masked":  # which starts from zeros
        assert memory.kept() < before
    monkeypatch.setattr(memory, "LARGE", sys.maxsize)
    for x, y in zip(got, run(*inputs, **options), strict=True):
        assert x.isfinite().all()
        assert torch.equal(x, y)


def test_a_freed_output_is_used_again_and_a_live_one_never():
    outputs = [attend(seed) for seed in range(6)]
    copies = [out.clone() for out in outputs]
    starts = sorted(out.data_ptr() for out in outputs)
    assert all(b - a >= outputs[0].nbytes for a, b in itertools.pairwise(starts))
    freed = outputs.pop(3).data_ptr()
    copies.pop(3)
    assert memory.kept() == 4 * MIB
    again = attend(9)
    assert again.data_ptr() == freed
    assert all(torch.equal(out, copy) for out, copy in zip(outputs, copies, strict=False))
    assert memory.kept() == 0


KEEPERS = {
    "view": lambda out: out[:, 1:, ::2],
    "reshaped": lambda out: out.transpose(1, 2).unflatten(-1, (8, 8)),
    "numpy": lambda out: out.numpy()[0],
    "detached": lambda out: out.detach(),
    "storage": lambda out: out.untyped_storage(),
    "another library": lambda out: torch.from_dlpack(out.numpy()),
    "graph": lambda out: torch.ones(SHAPE, requires_grad=True) * out,
}


@pytest.mark.parametrize("name", KEEPERS)
def test_whatever_refers_to_an_output_keeps_it(name):
    out = attend()
    at = out.data_ptr()
    alias = KEEPERS[name](out)
    del out
    assert memory.kept() == 0
    assert attend(1).data_ptr() != at
    kept = memory.kept()
    del alias
    assert memory.kept() == kept + 4 * MIB


def test_a_graph_computes_with_the_output_it_was_given():
    weight = torch.ones(SHAPE, requires_grad=True)
    loss, expected = (weight * attend()).sum(), attend()
    others = [attend(seed) for seed in range(1, 5)]
    loss.backward()
    assert torch.equal(weight.grad, expected)
    assert len(others) == 4


def test_which_block_is_taken():
    sizes = [memory.empty(n * MIB // 4) for n in (8, 10, 8)]
    eight, ten, last = (x.data_ptr() for x in sizes)
    while sizes:
        del sizes[0]
    assert memory.empty(7 * MIB // 4).data_ptr() == last  # the smallest, and of two equals the one freed last
    assert memory.empty(9 * MIB // 4).data_ptr() == ten
    assert memory.empty(6 * MIB // 4).data_ptr() not in (eight, ten, last)  # more than 1.25 times what is wanted


def test_small_outputs_are_torch_s(monkeypatch):
    monkeypatch.setattr(library, "pool_alloc", None)  # to be called would be an error
    assert memory.empty(2**19 - 1).shape == (2**19 - 1,)
    assert memory.empty(3, 0, 2).shape == (3, 0, 2)


def test_where_there_is_no_memory_torch_serves_or_says_so(monkeypatch):
    with pytest.raises(RuntimeError):
        memory.empty(2**30, 2**30)
    five = memory.empty(1, 1, 1, 1, 2**19)
    assert five.shape == (1, 1, 1, 1, 2**19)
    expected = attend()
    monkeypatch.setattr(library, "pool_alloc", lambda *_: None)
    assert torch.equal(attend(), expected)


def test_nothing_is_lost_when_torch_does_not_take_a_block(monkeypatch):
    def refuse(capsule):
        raise RuntimeError("no")

    monkeypatch.setattr(memory, "from_dlpack", refuse)
    with pytest.raises(RuntimeError, match="no"):
        attend()
    assert memory.kept() == 4 * MIB


def test_release_empties_it():
    outputs = [attend(seed) for seed in range(3)]
    assert release() == 0
    del outputs
    assert release() == 12 * MIB
    assert memory.kept() == 0
    assert attend().isfinite().all()


def test_an_output_is_a_tensor_like_any_other():
    expected = attend().clone()
    out = attend()
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), expected)
    assert torch.equal(out.mul_(2).add_(1), expected * 2 + 1)
    shared = attend().share_memory_()
    assert shared.is_shared()
    assert torch.equal(shared, expected)
    leaf = attend().requires_grad_()
    leaf.square().sum().backward()
    assert torch.equal(leaf.grad, 2 * expected)
    with torch.inference_mode():
        assert attend().is_inference()


@pytest.mark.parametrize("is_causal", [False, True])
def test_compiled(is_causal):
    inputs = [tokens(*SHAPE, seed=i).requires_grad_() for i in range(3)]

    def function(q, k, v):
        return linattn.attention(q, k, v, kernel=kernel, engine="native", is_causal=is_causal) + 1

    kernel = Positive(64, features=16)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        poison()
        got, expected = compiled(*inputs), function(*inputs)
        assert torch.equal(got, expected)
        grads = [torch.autograd.grad(out.square().sum(), inputs) for out in (got, expected)]
        assert all(torch.equal(x, y) for x, y in zip(*grads, strict=False))


def test_outputs_may_be_freed_by_other_threads():
    outputs = [attend(seed) for seed in range(4)]
    for out in outputs:
        worker = threading.Thread(target=lambda x: x.untyped_storage(), args=(out,))
        worker.start()
        worker.join()
    assert memory.kept() == 0
    box = [outputs.pop()]
    del out
    worker = threading.Thread(target=box.clear)
    worker.start()
    worker.join()
    assert memory.kept() == 4 * MIB


def test_many_threads_at_once():
    expected = [attend(i) for i in range(4)]
    failures = []

    def work(i):
        for _ in range(15):
            one, two = attend(i), attend((i + 1) % 4)
            if not (torch.equal(one, expected[i]) and torch.equal(two, expected[(i + 1) % 4])):
                failures.append(i)

    side_by_side(work, 4)
    assert not failures


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_forks_while_other_threads_take_and_give():
    """A forked child starts with an empty pool and a free lock, and its parent's outputs stay valid."""
    live, expected = memory.empty(*SHAPE).fill_(3), attend()
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            memory.empty(*SHAPE)

    workers = [threading.Thread(target=busy) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                torch.set_num_threads(1)  # it has none of its parent's
                right = memory.kept() == 0 and bool((live == 3).all()) and torch.equal(attend(), expected)
                live.fill_(4)
                del live
                os._exit(0 if right and memory.kept() == 8 * MIB else 1)
            assert _ended(child) == 0
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert (live == 3).all()


def _ended(child: int) -> int | None:
    """How a child ended, or None if it hangs."""
    for _ in range(2000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


class _Attended(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return attend(i)[0]


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_workers_of_a_data_loader():
    here = [_Attended()[i] for i in range(4)]
    workers = DataLoader(_Attended(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert all(torch.equal(x, y) for x, y in zip(workers, here, strict=True))
