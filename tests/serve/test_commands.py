"""`linattn read` and `linattn ask`, without a server."""

import pytest

pytest.importorskip("starlette")

from linattn.cli import main
from serve_support import text_of


def test_a_document_is_read_and_asked_about(served_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LINATTN_CACHE", str(tmp_path / "cache"))
    book = tmp_path / "book.txt"
    book.write_text(text_of(0, 900))
    words = ["read", str(book), "--model", str(served_folder), "--kernel", "nearfar", "--window", "16", "--slots", "16"]
    assert main([*words, "--save", str(tmp_path / "book.state")]) == 0
    said = capsys.readouterr()
    assert "tokens read in" in said.out
    assert "measured which heads need slots" in said.err
    answers = []
    for _ in range(2):
        assert main(["ask", str(tmp_path / "book.state"), "What?", "--tokens", "12"]) == 0
        said = capsys.readouterr()
        answers.append(said.out)
        assert "measured" not in said.err
    assert answers[0] == answers[1] != "\n"
    other = tmp_path / "other"
    other.mkdir()
    for path in served_folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    weights = other / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-4000:-3000] = b"\0" * 1000
    weights.write_bytes(changed)
    assert main(["ask", str(tmp_path / "book.state"), "What?", "--model", str(other)]) == 2
    assert "another model, kernel or calibration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["read", "missing.txt", "--model", "smollm2"], "missing.txt: No such file"),
        (["ask", "missing.state", "What?"], "missing.state: No such file"),
        (["ask", "plain.txt", "What?"], "not a whole safetensors file"),
        (["ask", "plain.txt", " "], "the question is empty"),
        (["read", "plain.txt", "--model", "smollm2", "--memory", "much"], "memory must be a number of bytes"),
        (["read", "plain.txt", "--model", "smollm2", "--memory", "9", "--equal-slots"], "neither --memory nor"),
        (["read", "plain.txt", "--model", "smollm2", "--save", "./plain.txt"], "the state would replace plain.txt"),
        (["serve", "--model", "smollm2", "--api-key", ""], "--api-key is empty"),
        (["serve", "--model", "smollm2", "--cors-origin", "page.example"], "must be * or begin with http://"),
        (["read", "plain.txt", "--model", "smollm2", "--slots", "9"], "are for --kernel nearfar"),
        (["serve", "--model", "smollm3"], "did you mean 'smollm2'?"),
        (["serve", "--model", "smollm2", "--host", "10.0.0.1"], "give an --api-key too"),
    ],
)
def test_mistakes_are_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LINATTN_API_KEY", raising=False)
    (tmp_path / "plain.txt").write_text("no state")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
