"""The notebooks run from the first cell to the last; checks fail until the exercise is solved, and the solutions solve them."""

import os
import re
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytest.importorskip("linattn_lab")

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

pytestmark = pytest.mark.filterwarnings("ignore")  # of jupyter's own packages


def solutions(path):
    text = (FOLDER / "solutions" / f"{path.stem}.py").read_text()
    return [part.partition("\n")[2] for part in re.split(r"^# %% exercise", text, flags=re.MULTILINE)[1:]]


def with_tag(notebook, tag):
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory):
    """A Jupyter kernel for all notebooks, so that torch is imported once; each finds it without variables."""
    path = os.pathsep.join(p for p in sys.path if p)  # the kernel sees what this process sees
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("COURSE_STEPS", "120")  # at most, of every training; a reader's take minutes
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        manager = jupyter_client.KernelManager(kernel_name="python3")
        manager.start_kernel(cwd=str(FOLDER))
        yield manager
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_its_exercises_can_be_solved(path, jupyter):
    """Once with unsolved exercises; then every solution with its check, in the same kernel."""
    notebook = nbformat.read(path, as_version=4)
    checks, found = with_tag(notebook, "check"), solutions(path)
    assert len(checks) == len(with_tag(notebook, "exercise")) == len(found) >= 2
    for cell in checks:
        cell.metadata.tags = ["check", "raises-exception"]
    for solution, cell in zip(found, checks, strict=True):
        notebook.cells += [nbformat.v4.new_code_cell(solution), nbformat.v4.new_code_cell(cell.source)]
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    client = nbclient.NotebookClient(notebook, timeout=300, km=jupyter)
    try:
        client.execute()
    finally:
        client.kc.stop_channels()  # sockets that are left open warn in other tests
    for cell in checks:
        raised = [output.ename for output in cell.outputs if output.output_type == "error"]
        assert raised, f"the check passes before the exercise is solved: {cell.source}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_with_its_outputs_and_without_traces_of_a_machine(path):
    text = path.read_text()
    assert '"image/png"' in text
    assert "/work/" not in text
    assert "/root/" not in text
    assert path.stat().st_size < 700_000
