"""`linattn read` and `linattn ask`, without a server."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("starlette")

from linattn.cli import main
from linattn.serve.local import saved_choice
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


def test_a_state_through_a_pipe_and_a_model_that_is_named_by_a_relative_path(
    served_folder, tmp_path, monkeypatch, capfd
):
    (tmp_path / "book.txt").write_text(text_of(0, 200))
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(served_folder)
    with ThreadPoolExecutor(1) as reader:
        piped = reader.submit((tmp_path / "pipe").read_bytes)
        assert main(["read", str(tmp_path / "book.txt"), "--model", ".", "--save", str(tmp_path / "pipe")]) == 0
        (tmp_path / "book.state").write_bytes(piped.result(30))
    assert capfd.readouterr().out == ""  # as --save /dev/stdout needs it
    monkeypatch.chdir(tmp_path)
    assert main(["ask", "book.state", "What?", "--tokens", "3"]) == 0
    choice, _ = saved_choice("book.state")
    assert choice.model == str(served_folder)


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
        (["serve", "--model", "smollm2", "--api-key", "schlüssel"], "must be of ASCII letters"),
        (["serve", "--model", "smollm2", "--api-key", "secret\n"], "no client could send it"),
        (["serve", "--model", "smollm2", "--cors-origin", "page.example"], "must be * or begin with http://"),
        (["serve", "--model", "smollm2", "--cors-origin", "http://localhost:3000/"], "without a path or slash"),
        (["serve", "--model", "smollm2", "--host", "localhost", "--port", "TAKEN"], "Address already in use"),
        (["generate", "--model", "smollm2", "--prompt", "x", "--temperature", "1e-40"], "must be 0 or at least 1e-06"),
        (["read", "plain.txt", "--model", "smollm2", "--slots", "9"], "are for --kernel nearfar"),
        (["serve", "--model", "smollm3"], "did you mean 'smollm2'?"),
        (["serve", "--model", "smollm2", "--host", "10.0.0.1"], "give an --api-key too"),
    ],
)
def test_mistakes_are_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LINATTN_API_KEY", raising=False)
    (tmp_path / "plain.txt").write_text("no state")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main([port if word == "TAKEN" else word for word in words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
