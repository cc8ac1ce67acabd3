"""Attention without a causal mask over shards: the sums of all keys, then every process reads them with its queries."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from ..states import LinearState, State
from .causal import Layout, assembled, sequence, with_guarded
from .exchange import Exchange, tie
from .messages import Tensors
from .rules import rebuilt, stack_states
from .token_rules import SumsRule


def run_full(rule: SumsRule, layout: Layout, *, state: State | None, return_state: bool) -> tuple[Tensor, State | None]:
    """The rows of this process, and the state after all tokens on every process."""
    if layout.packing is not None:
        return _packed(rule, layout, state, return_state)
    who = layout.who
    own = rule.summary(0, state if who.first else None, fresh=True)
    like = rule.empty().tensors()

    def fold(summaries: Sequence[Tensors]) -> Iterator[Tensors | None]:
        yield from [None] * who.size
        yield _sum(rule, summaries)

    _, common, token = Exchange(own, like, fold, who, single=False, shared=True).finish()
    total = rebuilt(rule.empty(), common)
    out, after = rule.read(total, None)
    final: State | None = None
    if return_state:
        final = total
        if isinstance(total, LinearState) and isinstance(after, LinearState):
            final = with_guarded(total, layout, rule.batch, state, total, after)
    return tie(out, token), final


def _sum(rule: SumsRule, summaries: Sequence[Tensors]) -> Tensors:
    total = summaries[0]
    for summary in summaries[1:]:
        total = rule.advance(total, summary)
    return total


def _packed(rule: SumsRule, layout: Layout, given: State | None, return_state: bool) -> tuple[Tensor, State | None]:
    """A sequence may reach over several processes: each sends the sums of its first and of its last sequence."""
    assert layout.packing is not None
    packing, who, batch = layout.packing, layout.who, rule.batch
    shard = packing.shards[who.rank]
    empty = rule.empty()
    parts: list[State] = []
    if shard.sequences:
        states = rule.run(layout.initial(rule, given, empty.tensors()), shard.bounds)[1]
        parts = [sequence(states, i, batch) for i in range(len(shard.sequences))]
    none = rule.identity()
    decay = {"decay": none["decay"]}
    ends = [parts[0] if len(parts) > 1 else empty, parts[-1] if parts else empty]
    own = {
        f"{place} {name}": x
        for place, part in zip(("first", "last"), ends, strict=True)
        for name, x in {**part.tensors(), **decay}.items()
    }
    like = {f"{place} {name}": x for place in ("first", "last") for name, x in empty.tensors().items()}

    def total(summaries: Sequence[Tensors], sequence: int) -> Tensors:
        found = []
        for rank, other in enumerate(packing.shards):
            if sequence in other.sequences:
                place = "last" if other.sequences[-1] == sequence else "first"
                names = [*empty.tensors(), "decay"]
                found.append({name: summaries[rank][f"{place} {name}"] for name in names})
        return _sum(rule, found)

    def fold(summaries: Sequence[Tensors]) -> Iterator[Tensors | None]:
        for other in packing.shards:
            if not other.sequences:
                yield None
                continue
            first, last = (total(summaries, other.sequences[i]) for i in (0, -1))
            both = {"first": first, "last": last}
            yield {f"{place} {name}": both[place][name] for place in both for name in empty.tensors()}
        yield None

    mine, _, token = Exchange(own, like, fold, who).finish()
    if parts:
        for place, i in (("first", 0), ("last", -1)):
            parts[i] = rebuilt(empty, {name: mine[f"{place} {name}"] for name in empty.tensors()})
    before = stack_states(parts, batch) if parts else None
    out, after = rule.read(before, shard.bounds) if parts else rule.run(None, shard.bounds)
    final: State | None = None
    if return_state:
        final, second = assembled(rule, layout, given, before if before is not None else empty)
        out = tie(out, second)
        if isinstance(final, LinearState) and isinstance(after, LinearState):
            final = with_guarded(final, layout, batch, given, before, after)
    return tie(out, token), final
