"""Running commands in tests, and what every --help has to say."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import warm_python
from linattn.cli import main
from linattn.cli.commands import Command
from linattn.cli.parser import build


def exit_code(words: list[str]) -> int:
    """What the process would exit with: main returns it, or argparse raises it."""
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


def refusal(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that a command refuses its input with, after checking that it is one line and exit code 2."""
    capfd.readouterr()
    code, shown = exit_code(words), capfd.readouterr()
    assert code == 2, f"exit code {code}: {shown.err}"
    assert "Traceback" not in shown.err
    lines = shown.err.splitlines()
    assert len(lines) == 1, shown.err
    return lines[0]


def check_refused(words: list[str], said: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A refusal that says `said`. FILE and FOLDER among the words become a text and an empty folder in `folder`."""
    line = refusal(with_places(words, folder), capfd)
    assert said in line
    assert line.startswith("linattn")


def with_places(words: list[str], folder: Path) -> list[str]:
    file, empty = folder / "a.txt", folder / "empty"
    file.write_text("some words\n" * 5)
    empty.mkdir(exist_ok=True)
    return [word.replace("FILE", str(file)).replace("FOLDER", str(empty)) for word in words]


# Background jobs of a shell ignore SIGINT, and processes inherit that: put it back to Python's default first.
COMMAND = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from linattn.cli import main; sys.exit(main())"
)


def process(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with a pipe as stdout and stderr; in a fresh Python if it gets variables."""
    if not environment:
        return warm_python.run("-c", COMMAND, *words)
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
    )


Words = tuple[str, ...]


def command_paths(commands: dict[str, Command], path: Words = ()) -> dict[Words, Command]:
    """Every command and group below `commands`, by the words that name it."""
    found: dict[Words, Command] = {}
    for name, command in commands.items():
        found[(*path, name)] = command
        found |= command_paths(command.commands, (*path, name))
    return found


def help_text(path: Words, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert exit_code([*path, "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())


def check_command_help(path: Words, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """A command's --help: its purpose, examples, and every option with its default."""
    text = help_text(path, capsys)
    assert command.summary[0].upper() + command.summary[1:] + "." in text
    assert "examples:" in text
    assert text.split("examples:")[1].count(f"linattn {' '.join(path)}") >= 2 - (path[-1] == "completion")
    parser = build(path)[1]
    for action in parser._actions:
        assert action.help, action.dest
        default = action.default
        if default in (None, argparse.SUPPRESS) or isinstance(default, bool) or action.dest == "help":
            continue
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
        numbers = {shown, f"{default:g}"} if isinstance(default, float) else {shown}
        assert any(f"default {one}" in text for one in numbers), action.dest


def check_group_help(path: Words, commands: dict[str, Command], capsys: pytest.CaptureFixture[str]) -> None:
    """A group's --help: a line for each command, and examples."""
    text = help_text(path, capsys)
    for name, command in commands.items():
        assert f"{name} {command.summary}" in text
    assert text.split(" linattn ", 1)[1].count(f"linattn {' '.join(path)}".strip()) >= 2


HEAVY = ("torch", "numpy", "matplotlib", "scipy", "sklearn", "transformers", "PIL", "tqdm", "jinja2")
IMPORTS = f"""
import sys
from linattn.cli import main
for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit as ended:
        assert ended.code == 0
heavy = set({HEAVY}) & set(sys.modules)
assert not heavy, heavy
"""


def check_nothing_slow_is_imported(commands: list[str]) -> None:
    """`linattn --help` has to appear at once: neither torch nor numpy, nor any package of an extra, is imported."""
    subprocess.run([sys.executable, "-c", IMPORTS, *commands], capture_output=True, check=True)


def completer(capsys: pytest.CaptureFixture[str]) -> Callable[..., set[str]]:
    """A function of words: what bash offers for the last of them, by the script that `linattn completion` prints."""
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    assert bash is not None
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def completed(*words: str) -> set[str]:
        array = " ".join(f"'{word}'" for word in words)
        call = (
            f"{script}\nCOMP_WORDS=(linattn {array}); COMP_CWORD={len(words)}; _shtab_linattn; echo ${{COMPREPLY[@]}}"
        )
        done = subprocess.run([bash, "-c", call], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    return completed


# What an `import torch` that Ctrl-C hits may make of it.
INTERRUPTED = {
    "at once": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "swallowed": (
        "try:\n    os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    raise ImportError('C extensions failed')"
    ),
    "in a callback": (
        "class Callback:\n    def __del__(self): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.01)\n"
        "Callback(); time.sleep(60)"
    ),
}


def check_interrupted_import(words: list[str], how: str, folder: Path) -> None:
    """Ctrl-C while a command imports torch is one line and exit code 130."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(f"import os, signal, time\n{INTERRUPTED[how]}\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = process(words, PYTHONPATH=path)
    assert done.returncode == 130
    assert len(done.stderr.splitlines()) <= 1
    assert "Traceback" not in done.stderr
