"""The command, as a user runs it: what it prints and writes."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import linattn
import warm_python
from cli_support import INTERRUPTED, check_interrupted_import, process
from linattn.cli import main, names
from linattn.cli.run import explain

SMALL = ["compare", "--lengths", "32", "64", "--heads", "2", "--dim", "16", "--seconds", "0.001", "--rules", "none"]


def test_info_says_what_is_there(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for word in (linattn.__version__, "torch", "threads", "engine native", "positive, trig"):
        assert word in text
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engines"]["torch"].startswith("available")


def test_compare_prints_a_table_and_writes_files(capsys, tmp_path):
    files = {name: tmp_path / "new" / f"report.{name}" for name in ("json", "html", "svg")}
    outputs = ["--json", str(files["json"]), "--html", str(files["html"]), "--plot", str(files["svg"])]
    assert main([*SMALL, "--kernels", "elu", "taylor", "nearfar", "--causal", *outputs]) == 0
    text = capsys.readouterr().out
    for word in ("tokens", "softmax", "elu", "taylor", "crossover", "growth", "causal, forward"):
        assert word in text
    figures = json.loads(files["json"].read_text())
    assert {row["kernel"] for row in figures["rows"]} == {"elu", "taylor", "near/far"}
    assert all(row["seconds"] > 0 and row["baseline_error"] > 0 for row in figures["rows"])
    assert "<svg" in files["svg"].read_text()
    page = files["html"].read_text()
    assert page.count("<img ") == 3 + 4  # time, memory, speed-up; maps of softmax and the three kernels
    assert "http" not in page


def test_compare_shows_the_update_rules(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("linattn.measure.rules.PRODUCT", 256)
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html")}
    rules = ["gated-delta", "mamba1"]
    chosen = ["--kernels", "elu", "--engines", "torch", "--rules", *rules]
    assert main([*SMALL, *chosen, *(x for kind, path in files.items() for x in (f"--{kind}", str(path)))]) == 0
    printed = capsys.readouterr().out
    found = json.loads(files["json"].read_text())
    assert [row["rule"] for row in found["rule_summary"]] == rules
    assert [(row["rule"], row["tokens"]) for row in found["rules"]] == [(name, n) for name in rules for n in (32, 64)]
    for row in found["rule_summary"]:
        assert row["seconds"] > 0
        assert row["step_copies"] > 0
        assert (row["matmul_share"] is None) == (row["rule"] == "mamba1")
        assert f"{row['seconds'] * 1e3:.2f} ms" in printed
        assert f"<td>{row['rule']}</td>" in files["html"].read_text()


def test_the_count_of_a_rule_is_that_of_the_design():
    from linattn.measure import flops

    H, N, D, M, C = 8, 4096, 128, 64, 64
    assert flops.delta_rule(H, N, D, M) == N * H * (2 * C * D + 2 * C * M + 6 * D * M)


def test_compare_times_the_backward_pass(capsys):
    assert main([*SMALL, "--kernels", "relu", "--backward", "--engines", "torch"]) == 0
    assert "forward + backward" in capsys.readouterr().out


def test_the_names_of_options_are_those_of_the_library():
    from linattn.engines import describe
    from linattn.measure.rules import RULES

    assert tuple(linattn.kernels.NAMES) == names.KERNELS
    assert tuple(describe()) == names.ENGINES
    assert tuple(RULES) == names.RULES


def test_the_names_of_models_are_those_of_the_library():
    weights = pytest.importorskip("linattn.hf.weights")
    assert tuple(weights.PACKAGES) == names.MODELS


def test_the_installed_command_runs():
    done = subprocess.run([sys.executable, "-m", "linattn", "info"], capture_output=True, text=True, check=True)
    assert "linattn" in done.stdout


def test_figures_go_to_devices_too(tmp_path):
    done = process([*SMALL, "--kernels", "elu", "--engines", "torch", "--json", "/dev/stdout"])
    assert done.returncode == 0
    assert '"relative_error"' in done.stdout
    assert not os.path.isfile("/dev/stdout") or os.path.islink("/dev/stdout")


def test_no_progress_goes_into_a_pipe(tiny_model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g " * 60)
    model = ["--model", str(tiny_model)]
    generate = ["generate", *model, "--prompt-file", str(text), "--tokens", "3", "--equal-slots"]
    fidelity = ["fidelity", *model, "--text", str(text), "--calibrate", str(text), "--calibrate-length", "256"]
    fidelity += ["--length", "64", "--html", str(tmp_path / "page.html"), "--kernels"]
    script = (  # one process for both: transformers is imported once
        "import sys\nfrom linattn.cli import main\n"
        f"for words in {[generate, fidelity]}:\n"
        "    assert main(words) == 0\n"
        "    print('\\n--', file=sys.stderr)"
    )
    done = warm_python.run("-c", script, check=True)
    generated, measured = done.stderr.split("\n--\n")[:2]
    assert generated.count("\n") == 1  # the summary
    assert "\r" not in done.stderr
    assert measured == ""
    assert "near/far" in done.stdout
    page = (tmp_path / "page.html").read_text()
    assert page.count("<table>") == 3
    assert "<td>near/far</td>" in page


@pytest.mark.parametrize("how", INTERRUPTED)
def test_ctrl_c_while_modules_load_is_one_line(how, tmp_path):
    check_interrupted_import(["info"], how, tmp_path)


def test_ctrl_c_in_a_command_is_one_line(monkeypatch, capsys):
    from linattn.cli import info

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "run", interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "linattn info: stopped\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    done = warm_python.run(
        "-c",
        "import os, sys; os.close(0); sys.stdout = open(1, 'w', 1); "
        "r, w = os.pipe(); os.dup2(w, 1); os.close(w); os.close(r); "
        "from linattn.cli import main; sys.exit(main(['info']))",
    )
    assert done.returncode == 141
    assert done.stderr == ""


def test_errors_become_codes_and_lines():
    assert explain(ValueError("two\nlines")) == (2, "two lines")
    assert explain(FileNotFoundError(2, "No such file or directory", "x.txt")) == (
        2,
        "x.txt: No such file or directory",
    )
    assert explain(MemoryError())[0] == 2
    assert explain(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))[0] == 2
    assert explain(ModuleNotFoundError("No module named 'matplotlib.figure'", name="matplotlib.figure")) == (
        2,
        "matplotlib is not installed: pip install 'linattn[pages]'",
    )
    code, text = explain(KeyError("bug"))
    assert code == 1
    assert text == "unexpected KeyError: 'bug' (LINATTN_TRACEBACK=1 shows where)"
    assert len(explain(ValueError("x" * 5000))[1]) < 700


def test_a_traceback_is_there_for_who_asks(monkeypatch):
    monkeypatch.setenv("LINATTN_TRACEBACK", "1")
    with pytest.raises(ValueError, match="take about"):
        main(["compare", "--lengths", "2000000000"])


def test_the_package_imports_torch_at_first_use():
    script = (
        "import sys, linattn\n"
        "assert 'torch' not in sys.modules and set(linattn.__all__) <= set(dir(linattn))\n"
        "assert linattn.states.Snapshots  # before anything else imports it\n"
        "found = {name: getattr(linattn, name) for name in linattn.__all__}\n"
        "from linattn import *\n"
        "assert all(globals()[name] is thing for name, thing in found.items())\n"
        "assert attention is linattn.functional.attention.attention and linattn.engines.describe()\n"
        "try:\n    linattn.atention\nexcept AttributeError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "module 'linattn' has no attribute 'atention'"


def test_type_checkers_see_the_names_that_are_imported_late():
    """The imports under TYPE_CHECKING, which nothing runs, against the tables that are used at run time."""
    tree = ast.parse(Path(linattn.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == {**linattn._MODULES, **dict.fromkeys(linattn._SUBPACKAGES)}
    assert set(linattn.__all__) <= set(seen)


def test_a_first_use_inside_a_compiled_function_breaks_no_graph():
    script = (
        "import torch, linattn\n"
        "f = torch.compile(lambda x: linattn.attention(x, x, x, kernel='elu', engine='torch'), fullgraph=True, "
        "backend='eager')\n"
        "print(f(torch.ones(1, 2, 5, 4)).shape)"
    )
    done = warm_python.run("-c", script, check=True)
    assert done.stdout.strip() == "torch.Size([1, 2, 5, 4])"


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_hybrids_are_read_written_and_compared(family, tiny_model, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    from hybrid_support import build_hybrid

    folder, text = tmp_path / family, tmp_path / "text.txt"
    text.write_text("a b c d e f g " * 60)
    build_hybrid(family).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    assert (
        main(["generate", "--model", str(folder), "--prompt-file", str(text), "--tokens", "3", "--length", "40"]) == 0
    )
    assert "native" in capsys.readouterr().err
    words = ["--text", str(text), "--length", "64", "--kernels", "--json", str(tmp_path / "figures.json")]
    assert main(["fidelity", "--model", str(folder), *words, "--dtype", "auto"]) == 0
    summary = json.loads((tmp_path / "figures.json").read_text())["summary"]
    assert summary["attached"] == pytest.approx(1, abs=1e-5)
    assert ("near/far" in summary) == (family == "qwen3_next")
