"""One server process for the tests that talk to it."""

import pytest

pytest.importorskip("starlette")
pytest.importorskip("transformers")

from serve_support import ServerProcess, save_tiny


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(served_folder, tmp_path_factory):
    """A model in float64, where rounding decides nothing, with near/far attention and a key."""
    near_far = ["--kernel", "nearfar", "--window", "16", "--slots", "16", "--equal-slots", "--dtype", "float64"]
    limits = ["--max-tokens", "64", "--max-body", "1", "--piece", "64", "--api-key", "secret"]
    states = ["--state-dir", tmp_path_factory.mktemp("states"), "--state-memory", "64"]
    made = ServerProcess("--model", served_folder, *near_far, *limits, *states)
    yield made
    made.stop()
