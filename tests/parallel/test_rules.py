"""Rows, states and gradients over 2, 3 and 4 processes equal those of one, for every rule: see parallel_cases.py."""

import pytest

from linattn.parallel.messages import MOST_PENDING
from linattn.parallel.schedules import duration, plan
from parallel_support import SIZES


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", ["attention", "whole_tokens", "delta_rule", "scans", "refusals", "disagreements"])
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


@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("size", [2, 3, 8, 64])
def test_plans(groups, size):
    """Every group is run once; no process takes over a group of a scan before the one before it can have run it."""
    mixed = plan("mixed", groups, size, 0.4)
    orders = [mixed.order(rank) for rank in range(size)]
    assert all(sorted(order) == list(range(mixed.groups)) for order in orders)
    scanned = range(mixed.gathered, mixed.groups)
    ready = dict.fromkeys(scanned, 0)  # the step after which the state of a group is handed on
    late = 0
    for order in orders:
        step = 0
        for group in order:
            step = max(step, ready.get(group, 0)) + 1
            if group in ready:
                ready[group] = step
        late = max(late, step)
    assert late == mixed.groups + max(0, size - 1 - mixed.gathered)
    assert duration(mixed, size, 0.4) == pytest.approx((late + 0.4 * mixed.gathered) / mixed.groups)
    auto = plan("auto", groups, size, 0.4)
    choices = [plan(name, groups, size, 0.4) for name in ("gather", "scan", "mixed")]
    assert duration(auto, size, 0.4) == min(duration(choice, size, 0.4) for choice in choices)
