"""The attention questions: theory and measurement agree, except where the machine's clock has a say."""

import json

import pytest
import torch

from linattn.cli import main
from linattn_lab.questions import QUESTIONS, argmax_attention
from linattn_lab.questions.answer import Finding, exponent
from linattn_lab.threads import one_thread

TIMED = {"time_in_N", "time_in_D", "time_in_M", "exponent_sums", "exponent_mask", "step"}


@pytest.fixture(scope="module", params=QUESTIONS)
def answer(request):
    with one_thread():
        return QUESTIONS[request.param](seed=0, quick=True)


def test_theory_and_measurement_agree(answer):
    off = [f for f in answer.findings if not f.agrees and f.key not in TIMED]
    assert off == []


def test_times_grow_roughly_as_they_should(answer):
    for f in answer.findings:
        if f.key in TIMED:
            assert 0.2 < f.measured / f.predicted < 5, f


def test_every_answer_draws(answer, tmp_path):
    from linattn_lab.questions.page import save_picture, write_page

    save_picture(answer, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    write_page([answer], tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert answer.question.split("?")[0] in page
    assert "data:image/png;base64," in page
    assert "http" not in page  # nothing is loaded from elsewhere


def test_the_worked_example_of_argmax_attention():
    query = torch.tensor([[1.0, 1, 2]])
    key = torch.tensor([[1.0, 2, 0], [0, 3, 4], [5, 0, 0], [0, 0, 1]])
    value = torch.tensor([[2.0, 0, 1], [1, 4, 3], [0, -1, 4], [1, 0, -1]])
    assert (query @ key.T).tolist() == [[3, 11, 5, 2]]
    assert argmax_attention(query, key, value).tolist() == [[1, 4, 3]]


def test_argmax_passes_gradients_to_values_alone():
    query, key, value = (torch.randn(4, 3, requires_grad=True) for _ in range(3))
    argmax_attention(query, key, value).sum().backward()
    assert query.grad is None
    assert key.grad is None
    assert value.grad is not None
    assert value.grad.sum() == 12


def test_a_wrong_prediction_is_seen():
    assert Finding("x", "", 1.0, 1.05, 0.1).agrees
    assert not Finding("x", "", 1.0, 1.2, 0.1).agrees
    assert not Finding("x", "", [1.0, 2.0], [1.0, 2.5], 0.1).agrees
    assert not Finding("x", "", 0.0, 1e-3, 1e-4).agrees
    assert not Finding("x", "", 1.0, float("nan"), 0.1).agrees


def test_the_exponent_of_a_power_is_its_power():
    assert exponent([1, 2, 4, 8], [3 * n**1.5 for n in (1, 2, 4, 8)]) == pytest.approx(1.5)


def test_the_command_writes_measured_beside_predicted(tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("q.json", "q.html", "pictures")]
    words = ["argmax", "variance", "--quick", "--json", files[0], "--html", files[1], "--pictures", files[2]]
    assert main(["lab", "questions", *words]) == 0
    figures = json.loads((tmp_path / "q.json").read_text())
    assert list(figures) == ["argmax", "variance"]
    assert figures["argmax"]["output"] == {"predicted": [1, 4, 3], "measured": [1, 4, 3], "agrees": True}
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == ["argmax.png", "variance.png"]
    assert "<h2>Why divide by sqrt(d)?</h2>" in (tmp_path / "q.html").read_text()
    assert "zero almost everywhere" in capsys.readouterr().out


def test_an_unknown_question_is_named(capsys):
    assert main(["lab", "questions", "why"]) == 2
    assert "unknown question 'why'" in capsys.readouterr().err


def test_a_missing_extra_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["lab", "questions", "argmax", "--html", "x.html"]) == 2
    assert "matplotlib is not installed: pip install linattn-lab" in capsys.readouterr().err
