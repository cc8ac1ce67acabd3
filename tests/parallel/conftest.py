from collections.abc import Iterator

import pytest

from parallel_support import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()
