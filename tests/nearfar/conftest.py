"""What the tests of near/far attention share."""

import pytest

from linattn.engines.native.ffi import library


@pytest.fixture(params=["torch", "native"])
def each_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with the torch engine and with the native one; float64 is the torch engine's in any case."""
    if request.param == "torch":
        monkeypatch.setattr(library, "why_not", "switched off for this test")
    elif library.why_not is not None:
        pytest.skip(library.why_not)
