"""What all tests of the lab share."""

import os
from collections.abc import Iterator

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores, and so do the processes that tests start
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # which NumPy reads when it is imported

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch on one thread: small matrices, and times that are not disturbed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
