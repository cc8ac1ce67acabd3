"""Rows, states and gradients over 2, 3 and 4 processes equal those of one, for every rule: see parallel_cases.py."""

import pytest

from linattn.parallel.messages import MOST_PENDING
from parallel_support import SIZES


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ["attention", "whole_tokens", "delta_rule", "scans", "refusals"])
def test_a_rule_over_shards_equals_one_process(pool, case, size):
    pool.run(size, f"parallel_cases.{case}")


@pytest.mark.parametrize("size", SIZES)
def test_bytes_do_not_depend_on_the_number_of_tokens(pool, size):
    short, long = (pool.run(size, "parallel_cases.traffic", tokens) for tokens in (48, 480))
    assert short == long
    assert all(count > 0 for count in short[0].values())
    if size > 2:  # states from process to process are fewer bytes than states of all to all
        for rule in ("sums", "decay", "delta", "scan"):
            assert max(x[f"{rule} scan"] for x in short) < max(x[f"{rule} gather"] for x in short)


def test_sent_messages_are_let_go(pool):
    assert max(pool.run(2, "parallel_cases.sent_messages")) <= MOST_PENDING
