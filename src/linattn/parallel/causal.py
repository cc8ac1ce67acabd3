"""A causal rule over shards: schedules for any rule.

gather: every process summarises its shard, all summaries are gathered while the next heads are summarised, and each process
runs its tokens once, from the state before them. Work is (1 + summary) times that of one process, for any number of processes.
scan: each process runs a group of heads from the state that the one before hands on, then hands it on. No extra work and the
fewest bytes, but process p starts p groups late.
mixed: a scan in which process p runs p groups while it would wait; the states before these are gathered.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..states import LinearState, State
from .exchange import Exchange, Fold, tie
from .groups import Members
from .messages import Tensors, failed
from .pipeline import hand_on, spread, take_over
from .rows import Rows
from .rules import Rule, join_states, rebuilt, split_state, stack_states
from .schedules import Schedule, plan
from .shards import Packing, Shard


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
    planned, who = plan(schedule, rule.parts(), layout.who.size, rule.extra_work), layout.who
    given = [None] * planned.groups if state is None else split_state(state, planned.groups)
    rows = Rows(rule.head_dim, planned.groups, rule.rows_shape(), rule.rows_like())
    total = return_state and layout.packing is None
    groups = [
        _Group(part, before, layout, total) for part, before in zip(rule.split(planned.groups), given, strict=True)
    ]
    for group in groups[: planned.gathered]:
        group.summarise()
    for i in planned.order(who.rank):
        with rows.place(i):
            out = groups[i].run()
        rows.add(i, out)
    if not return_state:
        return rows.joined(), None
    finals = []
    for i, group in enumerate(groups):  # exchanges of their own, in the same order on all processes
        final, token = group.final()
        rows.tie(i, token)
        finals.append(final)
    return rows.joined(), join_states(finals)


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


class _Group:
    """A group of heads on its way. total: the state after all tokens of one sequence is asked for."""

    def __init__(self, rule: Rule, given: State | None, layout: Layout, total: bool):
        self.rule, self.given, self.layout, self.total = rule, given, layout, total
        self.exchange: Exchange | None = None
        self.common: Tensors | None = None
        self.initial: State | None = None
        self.after: State | None = None

    def summarise(self) -> None:
        """Starts to gather what this process's tokens do to a state."""
        rule, layout = self.rule, self.layout
        start, before = layout.last_start(self.given, rule.batch)
        if layout.goes_on or self.total:
            own = rule.summary(start, before, fresh=layout.starts_fresh(layout.who.rank))
        else:
            own = rule.identity()
        like = rule.empty().tensors()
        self.exchange = Exchange(own, like, prefixes(layout, rule.advance, list(like)), layout.who, shared=self.total)

    def run(self) -> Tensor:
        """The rows, from the state before them: out of the gathered summaries, or handed on by the process before."""
        rule, layout, prefix, token = self.rule, self.layout, None, None
        if self.exchange is not None:
            prefix, self.common, token = self.exchange.finish()
        elif layout.continues:
            prefix = take_over(rule.empty().tensors(), layout.who)
        self.initial = layout.initial(rule, self.given, prefix)
        out, self.after = rule.run(self.initial, layout.bounds)
        if self.exchange is None and layout.goes_on:
            last = self.after if layout.packing is None else sequence(self.after, -1, rule.batch)
            token = hand_on(last.tensors(), layout.who)
        return tie(out, token)

    def final(self) -> tuple[State, Tensor | None]:
        """The state after all tokens, on every process, and a tensor to tie to the rows."""
        after, token = self.after, None
        assert after is not None
        if self.total and self.common is not None:
            found = rebuilt(after, self.common)
        elif self.total:
            tensors, token = spread(after.tensors(), self.layout.who)
            found = rebuilt(after, tensors)
        else:
            found, token = assembled(self.rule, self.layout, self.given, after)
        if self.exchange is not None and isinstance(found, LinearState) and isinstance(after, LinearState):
            found = with_guarded(found, self.layout, self.rule.batch, self.given, self.initial, after)
        return found, token


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
    try:
        dist.all_reduce(counts, group=layout.who.group)
    except RuntimeError as error:
        raise failed(layout.who, error) from error
    if isinstance(given, LinearState):
        counts += given.guarded
    return rebuilt(final, {**final.tensors(), "guarded": counts})  # type: ignore[return-value]
