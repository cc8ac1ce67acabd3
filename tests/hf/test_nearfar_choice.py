"""What a user asks of near/far, by size or by calibration, becomes kernels."""

import pytest

pytest.importorskip("transformers")

from hf_support import build, cache, tokens
from linattn import NearFar
from linattn.hf import calibrate
from linattn.hf.nearfar_choice import NearFarChoice

__all__ = ["cache"]

KERNEL = {"window": 16, "sinks": 2, "block": 8, "alpha": 0.2}


def test_nothing_is_measured_where_all_is_exact_or_slots_are_equal(cache):
    model = build("llama")
    for choice, length in ((NearFarChoice(16, 24), 40), (NearFarChoice(16, 24, equal_slots=True), None)):
        kernel = choice.kernels(model, length)
        assert isinstance(kernel, NearFar)
        assert (kernel.window, kernel.slots) == (16, 24)
    assert not cache.exists()


def test_a_saved_calibration_serves_its_own_window_alone(cache, tmp_path, capsys):
    model, folder = build("llama"), tmp_path / "model"
    saved = calibrate(model, tokens(1, 300), 24, kernel=NearFar(**KERNEL, recall_bits=8), save=folder, progress=False)
    assert NearFarChoice(calibration=str(folder)).kernels(model)[0].slots == saved.kernels()[0].slots
    model.config.name_or_path = model.name_or_path = str(folder)
    beside = NearFarChoice(slots=20).kernels(model, 1000)
    assert [kernel.slots for kernel in beside.values()] == [k.slots for k in saved.with_mean(20).kernels().values()]
    assert "measured" not in capsys.readouterr().err
    other = NearFarChoice(window=12, slots=20).kernels(model, 1000)
    assert {kernel.window for kernel in other.values()} == {12}
    assert "measured" in capsys.readouterr().err
