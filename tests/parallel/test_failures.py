"""A process that dies or stops to answer gives the others an error that says so, within the timeout."""

import time

import pytest

from parallel_support import Pool


@pytest.mark.parametrize("how", ["kill", "sleep"])
def test_a_lost_process_is_an_error_on_the_others(how):
    pool = Pool(world=3, timeout=5.0)
    pool.run(3, "parallel_cases.processor_time")  # all have started
    begun = time.monotonic()
    pool.start(3, "parallel_cases.many_layers", 1, how)
    found = [pool.pipes[rank].recv() if pool.pipes[rank].poll(60) else ("hangs", "") for rank in (0, 2)]
    assert time.monotonic() - begun < 60
    for kind, text in found:
        assert kind == "done", text
        assert "lost the others of its sequence-parallel group" in text
        assert "last checkpoint" in text
    for process in pool.processes:
        process.kill()
