"""A saved state comes back bit by bit; a damaged file is a clear error and never half a state."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import linattn
from conftest import KERNELS, qkv


@pytest.fixture
def state():
    return linattn.attention(*qkv(20, dtype=torch.float32), kernel="positive", is_causal=True, return_state=True)[1]


@pytest.mark.parametrize("name", [*KERNELS, "softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_save_and_load_reproduce_bits(name, dtype, tmp_path):
    kernel = KERNELS[name]() if name in KERNELS else linattn.kernels.Softmax()
    _, state = linattn.attention(*qkv(20, dtype=dtype), kernel=kernel, is_causal=True, return_state=True)
    state.save(tmp_path / "state.safetensors")
    again = linattn.State.load(tmp_path / "state.safetensors")
    assert type(again) is type(state)
    assert again.kernel == state.kernel
    for field, tensor in state.tensors().items():
        assert torch.equal(getattr(again, field), tensor)
        assert getattr(again, field).dtype == tensor.dtype
    step = qkv(3, dtype=dtype)
    options = {"kernel": kernel, "is_causal": True}
    assert torch.equal(
        linattn.attention(*step, state=again, **options), linattn.attention(*step, state=state, **options)
    )


def test_half_precision_and_empty_states(tmp_path):
    for dtype in (torch.float16, torch.bfloat16):
        _, state = linattn.attention(*qkv(5, dtype=dtype), kernel="softmax", return_state=True)
        state.save(tmp_path / "state")
        assert torch.equal(linattn.State.load(tmp_path / "state").key, state.key)
    _, state = linattn.attention(*qkv(0), kernel="softmax", return_state=True)
    state.save(tmp_path / "state")
    assert linattn.State.load(tmp_path / "state").key.shape == state.key.shape


def test_the_file_is_a_safetensors_file(state, tmp_path):
    state.save(tmp_path / "state")
    theirs = load_file(tmp_path / "state")
    assert set(theirs) == set(state.tensors())
    assert all(torch.equal(theirs[name], tensor) for name, tensor in state.tensors().items())
    header = {"format": "linattn-state", "version": "1", "form": "sums", "kernel": state.kernel}
    save_file(state.tensors(), tmp_path / "theirs", metadata=header)
    assert torch.equal(linattn.State.load(tmp_path / "theirs").S, state.S)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 0.999])
def test_a_truncated_file_is_an_error(state, tmp_path, share):
    state.save(tmp_path / "state")
    data = (tmp_path / "state").read_bytes()
    (tmp_path / "cut").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match=r"cut is not a whole safetensors file"):
        linattn.State.load(tmp_path / "cut")


def test_other_files_are_errors(state, tmp_path):
    (tmp_path / "text").write_text("not a state at all, but long enough to look like one")
    with pytest.raises(ValueError, match="text is not a whole safetensors file"):
        linattn.State.load(tmp_path / "text")
    save_file({"S": torch.zeros(2)}, tmp_path / "weights")
    with pytest.raises(ValueError, match="weights is a safetensors file, but not a linattn state"):
        linattn.State.load(tmp_path / "weights")
    header = {"format": "linattn-state", "version": "99", "form": "sums", "kernel": ""}
    save_file(state.tensors(), tmp_path / "newer", metadata=header)
    with pytest.raises(ValueError, match="newer has state version 99; this linattn reads version 1"):
        linattn.State.load(tmp_path / "newer")
    save_file({"S": torch.zeros(2)}, tmp_path / "other", metadata={**header, "version": "1"})
    with pytest.raises(ValueError, match="other holds a damaged state: its S must be"):
        linattn.State.load(tmp_path / "other")
    lying = json.dumps({"S": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}).encode()
    (tmp_path / "lying").write_bytes(len(lying).to_bytes(8, "little") + lying + b"1234")
    with pytest.raises(ValueError, match="lying is not a whole safetensors file"):
        linattn.State.load(tmp_path / "lying")
    with pytest.raises(FileNotFoundError):
        linattn.State.load(tmp_path / "missing")


@pytest.mark.parametrize("number", [1e31, -1e38, float("inf"), float("nan")])
def test_logarithms_out_of_range_are_errors(state, number, tmp_path):
    """They would overflow in the engines' arithmetic: rows of zeros, without a word."""
    state.log_scale.flatten()[0] = number
    call = {"kernel": "positive", "is_causal": True}
    with pytest.raises(ValueError, match="log_scale must lie between -1e30 and 1e30"):
        linattn.attention(*qkv(8, dtype=torch.float32), **call, state=state)
    state.save(tmp_path / "state")
    with pytest.raises(ValueError, match="state holds a damaged state: its log_scale must lie"):
        linattn.State.load(tmp_path / "state")


def test_writing_is_all_or_nothing(state, tmp_path, monkeypatch):
    state.save(tmp_path / "state")
    before = (tmp_path / "state").read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        state.save(tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == before
    assert os.listdir(tmp_path) == ["state"]
