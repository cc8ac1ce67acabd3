"""Which groups of heads are gathered and which are handed from process to process, and in which order a process runs them."""

from dataclasses import dataclass
from typing import Literal, get_args

Schedule = Literal["auto", "gather", "scan", "mixed"]
MOST_GROUPS = 16  # of a scan: each is a message
GATHER_GROUPS = 4  # of a gather: enough to hide the exchange behind the work on other heads


@dataclass(frozen=True)
class Plan:
    """groups of heads, of which the first ones are gathered and the others scanned."""

    groups: int
    gathered: int

    def order(self, rank: int) -> list[int]:
        """The groups in the order in which a process runs them: process p has p to run before a scan reaches it."""
        first = min(rank, self.gathered)
        return [*range(first), *range(self.gathered, self.groups), *range(first, self.gathered)]


def plan(schedule: Schedule, parts: int, size: int, extra_work: float) -> Plan:
    """The plan of a schedule; "auto" takes the shortest. parts: groups that the heads can be split into.

    extra_work: time of a summary as a share of that of the rows.
    """
    if schedule not in get_args(Schedule):
        raise ValueError(f"unknown schedule {schedule!r}; schedules: {', '.join(get_args(Schedule))}.")
    groups = _divisor(parts, MOST_GROUPS)
    gather = _divisor(parts, GATHER_GROUPS)
    plans: dict[Schedule, Plan] = {
        "scan": Plan(groups, 0),
        "mixed": Plan(groups, min(size - 1, groups - 1)),
        "gather": Plan(gather, gather),
    }
    if schedule == "auto":
        schedule = min(plans, key=lambda name: duration(plans[name], size, extra_work))
    return plans[schedule]


def duration(planned: Plan, size: int, extra_work: float) -> float:
    """Time of the last of the processes, in units of the work of one of them without summaries; exchanges take none."""
    groups, gathered = planned.groups, planned.gathered
    waiting = 0 if gathered == groups else max(0, size - 1 - gathered)
    return 1 + (gathered * extra_work + waiting) / groups


def _divisor(number: int, most: int) -> int:
    return max(n for n in range(1, most + 1) if number % n == 0)
