"""Help that teaches and is quick, and completion."""

import pytest

import linattn
from cli_support import check_command_help, check_group_help, check_nothing_slow_is_imported, completer
from linattn.cli import main
from linattn.cli.commands import COMMANDS


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.module])
def test_every_command_says_its_purpose_examples_and_defaults(name, capsys):
    check_command_help((name,), COMMANDS[name], capsys)


def test_the_commands_are_listed_and_taught_by_example(capsys):
    check_group_help((), COMMANDS, capsys)


def test_help_imports_nothing_slow():
    check_nothing_slow_is_imported(
        ["--help", "--version", *(f"{name} --help" for name, command in COMMANDS.items() if command.module)]
    )


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"linattn {linattn.__version__}\n"


def test_completion_completes_in_bash(capsys, tmp_path):
    completed = completer(capsys)
    assert completed("comp") == {"compare", "completion"}
    assert completed("compare", "--ba") == {"--batch", "--backward"}
    assert "elu" in completed("compare", "--kernels", "el")
    (tmp_path / "report.json").touch()
    (tmp_path / "reports").mkdir()
    assert completed("compare", "--json", f"{tmp_path}/rep") == {f"{tmp_path}/report.json", f"{tmp_path}/reports"}
    assert completed("generate", "--calibration", f"{tmp_path}/rep") == {f"{tmp_path}/reports"}


def test_completion_for_zsh(capsys):
    pytest.importorskip("shtab")
    assert main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert "fidelity" in text
    assert "--lengths" in text
