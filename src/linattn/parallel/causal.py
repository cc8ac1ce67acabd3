"""A causal rule over shards: two schedules for any rule.

gather: every process summarises its shard, all summaries are gathered while the next heads are summarised, and each process
runs its tokens once, from the state before them. Work is (1 + summary) times that of one process, for any number of processes.
scan: each process runs a group of heads from the state that the one before hands on, then hands it on. No extra work and the
fewest bytes, but process p starts p groups late.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ..states import LinearState, State
from .exchange import Exchange, Fold, tie
from .groups import Members
from .messages import Tensors
from .pipeline import hand_on, spread, take_over
from .rows import Rows
from .rules import Rule, join_states, rebuilt, split_state, stack_states
from .shards import Packing, Shard

Schedule = Literal["auto", "gather", "scan"]
MOST_GROUPS = 16  # of a scan: each is a message
GATHER_GROUPS = 4  # of a gather: enough to hide the exchange behind the work on other heads


@dataclass(frozen=True)
class Layout:
    """Which sequences this process holds. packing: of packed sequences, None for one sequence that all processes share."""

    who: Members
    packing: Packing | None

    @property
    def bounds(self) -> tuple[int, ...] | None:
        return None if self.packing is None else self._shard.bounds

    @property
    def continues(self) -> bool:
        return not self.who.first if self.packing is None else self._shard.continues

    @property
    def goes_on(self) -> bool:
        return not self.who.last if self.packing is None else self._shard.goes_on

    @property
    def _shard(self) -> Shard:
        assert self.packing is not None
        return self.packing.shards[self.who.rank]

    def starts_fresh(self, rank: int) -> bool:
        """Whether nothing before that process reaches the end of its tokens."""
        return rank == 0 if self.packing is None else not self.packing.shards[rank].alone

    def initial(self, rule: Rule, given: State | None, prefix: Tensors | None) -> State | None:
        """The state before this process's tokens, of all its sequences; None if nothing is before any."""
        like = rule.empty()
        before = rebuilt(like, prefix) if self.continues and prefix is not None else None
        if self.packing is None:
            return before if self.continues else given
        if before is None and given is None:
            return None
        chosen = [sequence(given, i, rule.batch) if given is not None else like for i in self._shard.sequences]
        if before is not None:
            chosen[0] = before
        return stack_states(chosen, rule.batch) if chosen else None

    def last_start(self, given: State | None, batch: int) -> tuple[int, State | None]:
        """Where this process's last sequence starts, and the given state of a sequence that starts here."""
        if self.packing is None:
            return 0, given if self.who.first else None
        shard = self._shard
        begins_here = bool(shard.sequences) and not shard.alone
        state = sequence(given, shard.sequences[-1], batch) if begins_here and given is not None else None
        return shard.last_start, state


def sequence(state: State, i: int, batch: int) -> State:
    """One of the states of packed sequences, after `batch` batch dimensions."""
    return state.map(lambda _, x: x.select(batch, i))


def run_causal(
    rule: Rule, layout: Layout, *, state: State | None, return_state: bool, schedule: Schedule
) -> tuple[Tensor, State | None]:
    """The rows of this process, and the state after all tokens on every process."""
    scan = _scans(rule, layout.who.size, schedule)
    groups = _divisor(rule.parts(), MOST_GROUPS if scan else GATHER_GROUPS)
    rules = rule.split(groups)
    given: Sequence[State | None] = [None] * groups if state is None else split_state(state, groups)
    rows, run = Rows(rule.head_dim, groups, rule.rows_shape(), rule.rows_like()), _scan if scan else _gather
    finals = []
    for final in run(rules, given, layout, return_state, rows):
        finals.append(final)
    return rows.joined(), join_states([x for x in finals if x is not None]) if return_state else None


def _scans(rule: Rule, size: int, schedule: Schedule) -> bool:
    """Scan if waiting for the first groups takes less time than the summaries would."""
    if schedule not in get_args(Schedule):
        raise ValueError(f"unknown schedule {schedule!r}; schedules: {', '.join(get_args(Schedule))}.")
    if schedule != "auto":
        return schedule == "scan"
    return (size - 1) / _divisor(rule.parts(), MOST_GROUPS) <= rule.extra_work


def _divisor(number: int, most: int) -> int:
    return max(n for n in range(1, most + 1) if number % n == 0)


def prefixes(layout: Layout, advance: Callable[[Tensors, Tensors], Tensors], names: Sequence[str]) -> Fold:
    """A fold: for each process the state before its tokens, then the state after all."""

    def fold(summaries: Sequence[Tensors]) -> Iterator[Tensors | None]:
        state: Tensors | None = None
        for rank, summary in enumerate(summaries):
            yield state
            if state is None or layout.starts_fresh(rank):
                state = {name: summary[name] for name in names}
            else:
                state = advance(state, summary)
        yield state

    return fold


def _gather(
    rules: list[Rule], given: Sequence[State | None], layout: Layout, return_state: bool, rows: Rows
) -> Iterator[State | None]:
    total = return_state and layout.packing is None
    exchanges = []
    for rule, state in zip(rules, given, strict=True):
        start, before = layout.last_start(state, rule.batch)
        if layout.goes_on or total:
            own = rule.summary(start, before, fresh=layout.starts_fresh(layout.who.rank))
        else:
            own = rule.identity()
        like = rule.empty().tensors()
        fold = prefixes(layout, rule.advance, list(like))
        exchanges.append(Exchange(own, like, fold, layout.who, shared=total))
    for rule, state, exchange in zip(rules, given, exchanges, strict=True):
        prefix, common, token = exchange.finish()
        initial = layout.initial(rule, state, prefix)
        with rows.place():
            out, after = rule.run(initial, layout.bounds)
        final = None
        if total:
            final = rebuilt(after, common)
        elif return_state:
            final, second = assembled(rule, layout, state, after)
            out = tie(out, second)
        if isinstance(final, LinearState) and isinstance(after, LinearState):
            final = with_guarded(final, layout, rule.batch, state, initial, after)
        rows.add(tie(out, token))
        yield final


def _scan(
    rules: list[Rule], given: Sequence[State | None], layout: Layout, return_state: bool, rows: Rows
) -> Iterator[State | None]:
    for rule, state in zip(rules, given, strict=True):
        prefix = take_over(rule.empty().tensors(), layout.who) if layout.continues else None
        with rows.place():
            out, after = rule.run(layout.initial(rule, state, prefix), layout.bounds)
        if layout.goes_on:
            last = after if layout.packing is None else sequence(after, -1, rule.batch)
            out = tie(out, hand_on(last.tensors(), layout.who))
        final = None
        if return_state and layout.packing is None:
            tensors, token = spread(after.tensors(), layout.who)
            final, out = rebuilt(after, tensors), tie(out, token)
        elif return_state:
            final, token = assembled(rule, layout, state, after)
            out = tie(out, token)
        rows.add(out)
        yield final


def assembled(rule: Rule, layout: Layout, given: State | None, after: State) -> tuple[State, Tensor | None]:
    """The states of all packed sequences, each from the process that holds its last token."""
    packing, who = layout.packing, layout.who
    assert packing is not None
    empty, batch = rule.empty(), rule.batch
    owners = [packing.owner(i) for i in range(packing.count)]
    most = max([1, *(owners.count(rank) for rank in range(who.size))])
    held = packing.shards[who.rank].sequences

    def state_of(i: int) -> State:
        if i in held:
            return sequence(after, held.index(i), batch)
        return empty if given is None else sequence(given, i, batch)  # a sequence without tokens

    mine = [state_of(i) for i, owner in enumerate(owners) if owner == who.rank]
    own = stack_states(mine + [empty] * (most - len(mine)), batch).tensors()
    like = stack_states([empty] * packing.count, batch).tensors()

    def fold(summaries: Sequence[Tensors]) -> Iterator[Tensors | None]:
        yield from [None] * who.size
        states = []
        for i, owner in enumerate(owners):
            place = owners[:i].count(owner)
            states.append({name: x.select(batch, place) for name, x in summaries[owner].items()})
        yield {name: torch.stack([x[name] for x in states], batch) for name in like}

    _, common, token = Exchange(own, like, fold, who, single=False, shared=True).finish()
    return rebuilt(after, common), token


def with_guarded(
    final: LinearState,
    layout: Layout,
    batch: int,
    given: State | None,
    initial: State | None,
    after: LinearState,
) -> LinearState:
    """The state with the guarded rows of all processes counted."""
    seen = after.guarded - (initial.guarded if isinstance(initial, LinearState) else 0)
    counts = torch.zeros_like(final.guarded)
    if layout.packing is None:
        counts += seen
    else:
        for place, i in enumerate(layout.packing.shards[layout.who.rank].sequences):
            counts.select(batch, i).add_(seen.select(batch, place))
    dist.all_reduce(counts, group=layout.who.group)
    if isinstance(given, LinearState):
        counts += given.guarded
    return rebuilt(final, {**final.tensors(), "guarded": counts})  # type: ignore[return-value]
