"""The trainer with data and sequence parallelism has the losses of one process."""

import pytest

from parallel_support import Pool
from trainer_task import sequence_trainer


def test_four_processes_in_pairs_have_the_losses_of_one(tmp_path):
    expected = sequence_trainer(tmp_path / "one", steps=5).run(show=False)
    expected = sequence_trainer(tmp_path / "one").run(show=False)
    pool = Pool()
    try:
        histories = pool.run(4, "trainer_task.over_shards", str(tmp_path / "four"))
    finally:
        pool.close()
    for found in histories:
        for kind in ("train", "validation"):
            assert [step for step, _ in found[kind]] == [step for step, _ in expected[kind]]
            assert [loss for _, loss in found[kind]] == pytest.approx([loss for _, loss in expected[kind]], rel=1e-9)


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="cannot share sequences"):
        sequence_trainer(None, sequence=2)
