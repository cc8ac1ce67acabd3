"""Commands that other distributions provide."""

import os

import pytest

from cli_support import process, refusal
from linattn.cli import plugins
from linattn.cli.commands import Command

PLUGIN = """
from linattn.cli.commands import Command
LAB = Command("things of another package", commands={"say": Command("say a word", "plugin_of_a_test")})
def add_arguments(parser):
    parser.add_argument("word")
def run(args):
    print(args.word)
"""


def test_a_command_that_is_not_installed_says_what_to_install(monkeypatch, capfd):
    monkeypatch.setattr(plugins, "entry_points", lambda **_: ())
    for words in (["lab"], ["lab", "--help"], ["lab", "faces", "train", "x"]):
        assert refusal(words, capfd) == "linattn lab: not installed: pip install linattn-lab"


def test_a_command_is_found_by_the_entry_point_of_its_distribution(tmp_path):
    """A distribution as pip lays it out, in a folder that comes before all others."""
    information = tmp_path / "linattn_lab-9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: linattn-lab\nVersion: 9\n")
    (information / "entry_points.txt").write_text("[linattn.commands]\nlab = plugin_of_a_test:LAB\n")
    (tmp_path / "plugin_of_a_test.py").write_text(PLUGIN)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = process(["lab", "say", "hello"], PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")
    assert "say a word" in " ".join(process(["lab", "--help"], PYTHONPATH=path).stdout.split())
    done = process(["lab", "sya"], PYTHONPATH=path)
    assert done.returncode == 2
    assert "linattn lab: unknown command 'sya'; did you mean 'say'?" in done.stderr


def test_an_entry_point_that_is_no_command_is_refused(monkeypatch):
    class Entry:
        value = "somewhere:THING"
        load = staticmethod(lambda: "a string")

    monkeypatch.setattr(plugins, "entry_points", lambda **_: (Entry,))
    with pytest.raises(TypeError, match="somewhere:THING is a str; it must be a Command"):
        plugins.resolve("lab", Command("a command", distribution="linattn-lab"))
