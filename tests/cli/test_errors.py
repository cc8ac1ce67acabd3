"""Bad input of any kind is one line on stderr and exit code 2, before anything is measured or trained."""

import json
import shutil
import sys

import pytest

from cli_support import check_refused, exit_code, process, refusal, with_places
from linattn.cli import fidelity_tasks

GENERATE = ["generate", "--model", "smollm2"]
FIDELITY = ["fidelity", "--model", "smollm2"]
# words -> what the line must say. "FILE" and "FOLDER" become an existing text file and an empty folder.
BAD_INPUT = [
    ([], "COMMAND"),
    (["compar"], "unknown command 'compar'; did you mean 'compare'?"),
    (["42"], "choose from info, compare"),
    (["--", "info"], "command"),
    (["--verbose", "info"], "unknown argument '--verbose'"),
    (["info", "--jsn"], "unknown argument '--jsn'; did you mean '--json'?"),
    (["info", "more"], "unknown argument 'more'"),
    (["completion", "bsh"], "did you mean 'bash'?"),
    (["compare", "--lengths"], "--lengths"),
    (["compare", "--lengths", "0"], "--lengths must be at least 1, got 0"),
    (["compare", "--lengths", "1e3"], "--lengths must be a whole number, got '1e3'"),
    (["compare", "--lengths", "9" * 30], "--lengths must be at most"),
    (["compare", "--lengths", "2000000000"], "this machine has"),
    (["compare", "--batch", "-1"], "--batch must be at least 1"),
    (["compare", "--heads", "0"], "--heads must be at least 1"),
    (["compare", "--dim", "0"], "--dim must be at least 1"),
    (["compare", "--spread", "nan"], "--spread must be a finite number, got 'nan'"),
    (["compare", "--spread", "0"], "--spread must be above 0"),
    (["compare", "--seconds", "inf"], "--seconds must be a finite number"),
    (["compare", "--seconds", "-1"], "--seconds must be at least 0"),
    (["compare", "--seed", "-1"], "--seed must be at least 0"),
    (["compare", "--seed", str(2**70)], "--seed must be at most"),
    (["compare", "--kernels", "positve"], "--kernels: unknown value 'positve'; did you mean 'positive'?"),
    (["compare", "--kernels", "cosine"], "choose from"),
    (["compare", "--engines", "abacus"], "--engines: unknown value 'abacus'; choose from torch, native"),
    (["compare", "--json", "FOLDER"], "is a folder; name a file"),
    (["compare", "--json", "FILE/report.json"], "cannot write"),
    (["compare", "--html", "/proc/nowhere/report.html"], "cannot write"),
    (["compare", "--html", "x" * 300 + ".html"], "cannot write"),
    (["compare", "--plot", "report.xyz"], "--plot writes .png, .svg, .pdf, got 'report.xyz'"),
    (["compare", "--plot", "report"], "--plot writes .png, .svg, .pdf"),
    (["compare", "--json", "FOLDER/a", "--html", "FOLDER/a"], "--json and --html both name"),
    (["generate", "--model", "smolm2", "--prompt", "x"], "there is no model 'smolm2'; did you mean 'smollm2'?"),
    (
        ["generate", "--model", "/nowhere", "--prompt", "x"],
        "give a model folder, a GGUF file or one of smollm2, minilm",
    ),
    (["generate", "--prompt", "x"], "required: --model"),
    (GENERATE, "--prompt"),
    ([*GENERATE, "--prompt", "x", "--prompt-file", "FILE"], "not allowed with"),
    ([*GENERATE, "--prompt", ""], "--prompt is empty"),
    ([*GENERATE, "--prompt-file", "/nowhere.txt"], "/nowhere.txt: No such file or directory"),
    ([*GENERATE, "--prompt-file", "FOLDER"], "Is a directory"),
    ([*GENERATE, "--prompt-file", "/dev/null"], "/dev/null is empty"),
    ([*GENERATE, "--prompt", "x", "--tokens", "0"], "--tokens must be at least 1, got 0"),
    ([*GENERATE, "--prompt", "x", "--length", "0"], "--length must be at least 1"),
    ([*GENERATE, "--prompt", "x", "--temperature", "-1"], "--temperature must be at least 0, got -1"),
    ([*GENERATE, "--prompt", "x", "--temperature", "nan"], "--temperature must be a finite number"),
    ([*GENERATE, "--prompt", "x", "--slots", "-1"], "--slots must be at least 0"),
    ([*GENERATE, "--prompt", "x", "--calibration", "/nowhere"], "No such file or directory"),
    (["explore", "--text", ""], "go with --model"),
    (["explore", "--model", "smollm2", "--text", " "], "--text is empty"),
    (["ask", "FILE", "\udcff?"], "QUESTION must be a text in UTF-8, got '\\udcff?'"),
    (["explore", "--model", "smollm2", "--text", "\udcff"], "--text must be a text in UTF-8, got '\\udcff'"),
    ([*GENERATE, "--prompt", "a \udcff b"], "--prompt must be a text in UTF-8, got 'a \\udcff b'"),
    (["generate", "--model", "", "--prompt", "x"], "there is no model ''"),
    (["fidelity", "--model", "minlm", "--text", "FILE"], "did you mean 'minilm'?"),
    (FIDELITY, "name texts to read by --text, or run --tasks"),
    ([*FIDELITY, "--tasks", "chess"], "chess"),
    ([*FIDELITY, "--tasks", "--calibrated-baselines"], "adds to --baselines: give that too"),
    ([*FIDELITY, "--tasks", "--baselines", "h2o", "--calibrated-baselines"], "add --calibrate or --calibration"),
    ([*FIDELITY, "--tasks", "--baselines", "duo"], "duo needs budgets by head"),
    ([*FIDELITY, "--text", "/nowhere.txt"], "/nowhere.txt: No such file or directory"),
    ([*FIDELITY, "--text", "/dev/null"], "is empty"),
    ([*FIDELITY, "--text", "FILE", "--length", "10"], "--length must be at least 64, got 10"),
    ([*FIDELITY, "--text", "FILE", "--kernels", "elue"], "did you mean 'elu'?"),
    ([*FIDELITY, "--text", "FILE", "--baselines", "h20"], "--baselines: unknown value 'h20'; did you mean 'h2o'?"),
    ([*FIDELITY, "--text", "FILE", "--save", "FOLDER"], "--save keeps the budgets of --calibrate"),
    ([*FIDELITY, "--text", "FILE", "--calibrate", "FILE", "--save", "FILE/x"], "cannot write"),
    ([*FIDELITY, "--text", "FILE", "--calibrate", "FILE", "--calibration", "FOLDER"], "not allowed with"),
    ([*FIDELITY, "--text", "FILE", "--html", "FOLDER"], "is a folder"),
]


@pytest.mark.parametrize(
    ("words", "said"), BAD_INPUT, ids=[" ".join(words)[:60] or "nothing" for words, _ in BAD_INPUT]
)
def test_bad_input_is_one_line(words, said, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(words, said, tmp_path, capfd)


def test_the_process_says_the_same(tmp_path):
    for words, said in (
        (["compare", "--lengths", "0"], "--lengths must be at least 1, got 0"),
        (["generate", "--model", "smolm2", "--prompt", "x"], "did you mean 'smollm2'?"),
    ):
        done = process(with_places(words, tmp_path))
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert said in done.stderr
        assert done.stdout == ""


def test_every_baseline_and_every_task_can_be_asked_for():
    pytest.importorskip("transformers")
    from linattn.hf import baselines, tasks

    assert tuple(fidelity_tasks.RULES) == baselines.NAMES
    assert list(tasks.TASKS) == fidelity_tasks.TASKS


def test_an_engine_that_is_not_there_is_refused_with_the_reason(capfd, monkeypatch):
    reasons = {"torch": "available: any device", "native": "not built: there was no compiler"}
    monkeypatch.setattr("linattn.engines.describe", lambda: reasons)
    line = refusal(["compare", "--engines", "native"], capfd)
    assert "engine 'native' cannot be used here: not built: there was no compiler" in line


@pytest.mark.parametrize(
    ("missing", "words", "extra"),
    [
        ("matplotlib", ["compare", "--html", "x.html"], "pages"),
        ("matplotlib", ["compare", "--plot", "x.png"], "pages"),
        ("transformers", ["generate", "--model", "smollm2", "--prompt", "x"], "hf"),
        ("transformers", ["fidelity", "--model", "smollm2", "--text", "FILE"], "hf"),
        ("shtab", ["completion", "bash"], "completion"),
    ],
)
def test_a_missing_extra_says_what_to_install(missing, words, extra, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    assert f"{missing} is not installed: pip install 'linattn[{extra}]'" in refusal(with_places(words, tmp_path), capfd)


def broken_models(folder):
    """Name -> a model that cannot be read."""
    (folder / "empty").mkdir()
    (folder / "garbage.gguf").write_bytes(b"\x00\x01 not a model" * 50)
    (folder / "nothing.gguf").write_bytes(b"")
    (folder / "header.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 100)
    (folder / "readme.txt").write_text("not a model")
    for name, config in (("syntax", "{"), ("list", "[]"), ("type", '{"model_type": "nonsense"}'), ("none", "{}")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config)
    return [path.name for path in sorted(folder.iterdir())]


def test_models_that_cannot_be_read(tmp_path, capfd):
    pytest.importorskip("transformers")
    for name in broken_models(tmp_path):
        line = refusal(["generate", "--model", str(tmp_path / name), "--prompt", "x"], capfd)
        assert f"{name} cannot be read as a model" in line


def test_damaged_weights_and_wrong_uses_of_a_model(tiny_model, tmp_path, capfd):
    text = tmp_path / "short.txt"
    text.write_text("a b c")
    model = ["--model", str(tiny_model)]
    assert "has 3 tokens; 64 are asked for" in refusal(
        ["fidelity", *model, "--text", str(text), "--length", "64"], capfd
    )
    for name, damage in (("model.safetensors", b"\x00" * 40), ("tokenizer.json", b"{}")):
        copy = tmp_path / name
        shutil.copytree(tiny_model, copy)
        (copy / name).write_bytes(damage)
        assert "cannot be read as a model" in refusal(["generate", "--model", str(copy), "--prompt", "a"], capfd)
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "linattn_calibration.json").write_text(json.dumps({"no": "budgets"}))
    refusal(["generate", *model, "--prompt", "a", "--calibration", str(saved)], capfd)


def test_a_closed_stdout_is_no_failure(monkeypatch, capfd):
    """As after `linattn info >&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    assert exit_code(["info"]) == 0
    assert capfd.readouterr().err == ""
