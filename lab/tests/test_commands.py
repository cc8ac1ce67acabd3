"""The commands of the lab: bad input is one line, missing packages are named, and --help is quick and complete."""

import sys

import pytest

import warm_python
from cli_support import (
    INTERRUPTED,
    check_command_help,
    check_group_help,
    check_interrupted_import,
    check_nothing_slow_is_imported,
    check_refused,
    command_paths,
    completer,
    process,
    refusal,
    with_places,
)
from linattn_lab.commands import LAB

BAD_INPUT = [
    (["lab"], "COMMAND"),
    (["lab", "face"], "unknown command 'face'; did you mean 'faces'?"),
    (["lab", "faces", "verfy"], "unknown command 'verfy'; did you mean 'verify'?"),
    (["lab", "handmade", "revers"], "did you mean 'reverse'?"),
    (["lab", "handmade", "--steps", "0"], "--steps must be at least 1"),
    (["lab", "handmade", "reverse", "--picture", "x.xyz"], "--picture writes .png"),
    (["lab", "handmade", "--json", "FOLDER"], "is a folder"),
    (["lab", "questions", "argmx"], "did you mean 'argmax'?"),
    (["lab", "questions", "--html", "FILE/x.html"], "cannot write"),
    (["lab", "purify", "--noise", "nan"], "--noise must be a finite number"),
    (["lab", "purify", "--picture", "x.docx"], "--picture writes"),
    (
        ["lab", "difficulty", "measure", "--folder", "/nowhere"],
        "/nowhere does not exist: `linattn lab difficulty train",
    ),
    (["lab", "difficulty", "measure", "--folder", "FOLDER"], "holds no networks"),
    (["lab", "difficulty", "train", "--steps", "0"], "--steps must be at least 1"),
    (["lab", "difficulty", "train", "--lr", "nan"], "--lr must be a finite number"),
    (["lab", "difficulty", "train", "--batch-size", "0"], "--batch-size must be at least 1"),
    (["lab", "difficulty", "train", "--data", "nowhere", "--folder", "FOLDER/x"], "or a folder, got 'nowhere'"),
    (["lab", "difficulty", "report", "--picture", "x.svg"], "--picture writes .png"),
    (["lab", "early-exit", "sweep", "--folder", "/nowhere"], "/nowhere"),
    (["lab", "early-exit", "predict", "/nowhere.png", "--folder", "/nowhere"], "/nowhere"),
    (["lab", "early-exit", "train", "--width", "0"], "--width must be at least 1"),
    (["lab", "early-exit", "report", "--json", "FOLDER"], "is a folder"),
    (["lab", "summarize", "run", "/nowhere.txt"], "/nowhere.txt is not there"),
    (["lab", "summarize", "run", "FILE", "--temperature", "-1"], "--temperature must be above 0"),
    (["lab", "summarize", "run", "FILE", "--temperature", "nan"], "--temperature must be a finite number"),
    (["lab", "summarize", "run", "FILE", "--beam", "0"], "--beam must be at least 1"),
    (["lab", "summarize", "run", "FILE", "--show-attention", "x.gif"], "--show-attention writes .html, .png"),
    (["lab", "summarize", "run", "FILE", "--model", "FILE"], "a.txt"),
    (["lab", "summarize", "run", "FILE", "--kernel", "cosine"], "cosine"),
    (["lab", "summarize", "evaluate", "--limit", "0"], "--limit must be at least 1"),
    (["lab", "summarize", "train"], "required: --out"),
    (["lab", "summarize", "train", "--out", "FOLDER", "--data", "/nowhere"], "/nowhere"),
    (["lab", "summarize", "train", "--out", "FOLDER", "--dropout", "2"], "--dropout must be at most 1"),
    (["lab", "summarize", "prepare", "/nowhere.jsonl", "--out", "FOLDER"], "/nowhere.jsonl"),
    (["lab", "summarize", "compare", "/nowhere", "--data", "/nowhere"], "/nowhere"),
    (["lab", "faces", "train", "/nowhere"], "/nowhere"),
    (["lab", "faces", "train", "FOLDER", "--lr", "inf"], "--lr must be a finite number"),
    (["lab", "faces", "train", "FOLDER", "--far", "0"], "--far must be above 0"),
    (["lab", "faces", "train", "FOLDER", "--folds", "1"], "--folds must be at least 2"),
    (["lab", "faces", "train", "FOLDER", "--old", "/nowhere"], "there is no model in /nowhere"),
    (["lab", "faces", "unseen", "--far", "0.9"], "--far must be at most 0.5"),
    (["lab", "figures", "--docs", "FOLDER"], "there is no folder"),
    (["lab", "figures", "--limit", "-1"], "--limit must be at least 0"),
    (["lab", "faces", "verify", "a.jpg", "b.jpg", "--model", "/nowhere"], "there is no model in /nowhere"),
    (["lab", "faces", "verify", "a.jpg", "b.jpg", "--threshold", "nan"], "above 0 and at most 4"),
    (["lab", "faces", "search", "a.jpg", "--index", "/nowhere"], "there is no index in /nowhere"),
    (["lab", "faces", "search", "a.jpg", "-k", "0"], "-k must be at least 1"),
    (["lab", "faces", "embed", "/nowhere"], "/nowhere"),
    (["lab", "faces", "cluster", "--picture", "sheet.xyz"], "--picture writes"),
    (["lab", "faces", "pairs", "--far", "2"], "--far must be at most 1"),
    (["lab", "faces", "report", "--workers", "0"], "--workers must be at least 1"),
    (["lab", "faces", "orl", "FOLDER", "--people", "0-99"], "--people must be like 1-30"),
]
PATHS = command_paths({"lab": LAB})


@pytest.mark.parametrize(
    ("words", "said"), BAD_INPUT, ids=[" ".join(words)[:60] or "nothing" for words, _ in BAD_INPUT]
)
def test_bad_input_is_one_line(words, said, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refused(words, said, tmp_path, capfd)


@pytest.mark.parametrize("how", INTERRUPTED)
def test_ctrl_c_while_modules_load_is_one_line(how, tmp_path):
    check_interrupted_import(["lab", "handmade"], how, tmp_path)


def test_the_process_says_the_same():
    done = process(["lab", "difficulty", "measure", "--folder", "/nowhere"])
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "does not exist" in done.stderr


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("matplotlib", ["lab", "handmade", "reverse"]),
        ("PIL", ["lab", "faces", "verify", "a.jpg", "b.jpg"]),
        ("tokenizers", ["lab", "summarize", "run", "FILE"]),
        ("tensorboard", ["lab", "difficulty", "train"]),
        ("rouge_score", ["lab", "summarize", "evaluate"]),
    ],
)
def test_a_missing_package_says_what_to_install(missing, words, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    assert f"{missing} is not installed: pip install linattn-lab" in refusal(with_places(words, tmp_path), capfd)


def test_packages_that_are_missing_while_a_command_loads():
    hidden = "import sys; sys.modules.update(dict.fromkeys(['sklearn', 'tqdm', 'scipy']))"
    for words in (["lab", "purify"], ["lab", "early-exit", "train"], ["lab", "summarize", "train", "--out", "x"]):
        script = f"{hidden}; from linattn.cli import main; sys.exit(main())"
        done = warm_python.run("-c", script, *words)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert "pip install linattn-lab" in done.stderr


@pytest.mark.parametrize("path", [path for path, command in PATHS.items() if command.module], ids=" ".join)
def test_every_command_says_its_purpose_examples_and_defaults(path, capsys):
    check_command_help(path, PATHS[path], capsys)


@pytest.mark.parametrize("path", [path for path, command in PATHS.items() if command.commands], ids=" ".join)
def test_every_group_lists_its_commands_and_teaches_by_example(path, capsys):
    check_group_help(path, PATHS[path].commands, capsys)


def test_help_imports_nothing_slow():
    check_nothing_slow_is_imported([f"{' '.join(path)} --help" for path, command in PATHS.items() if command.commands])


def test_completion_knows_the_commands(capsys):
    completed = completer(capsys)
    assert completed("lab", "fa") == {"faces"}
    assert completed("lab", "difficulty", "measure", "--refe") == {"--references"}


def test_a_loss_that_is_not_finite_is_one_line(tmp_path, capfd):
    words = ["lab", "difficulty", "train", "--folder", str(tmp_path / "x"), "--pictures", "40", "--test", "10"]
    more = ["--width", "2", "--steps", "6", "--batch-size", "8", "--lr", "1e30", "--warmup", "0", "--seeds", "1"]
    line = refusal([*words, *more], capfd)
    assert "the loss became" in line
    assert "lower --lr" in line


def test_damaged_files_of_the_lab_are_named(tmp_path, capfd):
    run, exits, model = tmp_path / "run", tmp_path / "exits-folder" / "exits", tmp_path / "model"
    for folder in (run, exits, model):
        folder.mkdir(parents=True)
    (run / "run.json").write_text('{"config": {"stps": 3}}')
    assert "run.json is damaged" in refusal(["lab", "difficulty", "measure", "--folder", str(run)], capfd)
    (run / "run.json").write_text("{")
    assert "run.json is damaged" in refusal(["lab", "difficulty", "report", "--folder", str(run)], capfd)
    (exits / "model.json").write_text("[]")
    assert "model.json is damaged" in refusal(["lab", "early-exit", "sweep", "--folder", str(exits.parent)], capfd)
    (model / "embedder.json").write_text('{"format": 1}')
    assert "embedder.json" in refusal(["lab", "faces", "verify", "a.jpg", "b.jpg", "--model", str(model)], capfd)
    (model / "model.safetensors").write_bytes(b"\x10" * 64)
    words = ["lab", "summarize", "run", *with_places(["FILE"], tmp_path), "--model", str(model)]
    assert "model.safetensors is damaged" in refusal(words, capfd)
