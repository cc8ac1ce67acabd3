"""Fuzzing of states: streams that are continued, copied, saved, selected and forked in any order equal their definition.

Every stream keeps all its tokens, so that the O(N^2) twin of tests/fuzz_support.py can say what the next rows must be. Streams
stay in use after others were made from them: a state that was changed in place would show.
"""

import copy
import io
import pickle
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import linattn
from fuzz_support import DIM, KERNELS, LINEAR, TOLERANCE, Case, Inputs, attend
from linattn.engines import native

ENGINES = ["torch", "native"] if native.available() else ["torch"]
HEADS, GROUPS = 2, 2


@dataclass(frozen=True)
class Stream:
    """A state, and the tokens that it stands for: key, value (B, HEADS, S, ..), mask (B, S), log_decay (B, HEADS, S)."""

    state: linattn.State | None
    past: Inputs

    @property
    def batch(self) -> int:
        return self.past.key.shape[0]


def through_torch_save(state: linattn.State) -> linattn.State:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_a_file(state: linattn.State) -> linattn.State:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        state.save(path)
        return linattn.State.load(path)


COPIES = {
    "clone": lambda state: state.clone(),
    "detach": lambda state: state.detach(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "torch.save": through_torch_save,
    "file": through_a_file,
}


class Streams(RuleBasedStateMachine):
    """One kernel, named by a subclass."""

    name = "elu"
    streams = Bundle("streams")

    def __init__(self) -> None:
        super().__init__()
        self.kernel = KERNELS[self.name]()
        self.case = Case(self.name, groups=GROUPS, forget="log_decay" if self.name in LINEAR else None)

    @initialize(target=streams, batch=st.integers(1, 3))
    def start(self, batch: int) -> Stream:
        none = torch.zeros(batch, HEADS, 0, DIM)
        mask, log_decay = torch.zeros(batch, 0, dtype=torch.bool), torch.zeros(batch, HEADS, 0)
        return Stream(None, Inputs(none, none, none[..., :5], mask, log_decay if self.case.forget else None))

    @rule(
        target=streams,
        stream=streams,
        tokens=st.sampled_from([1, 1, 2, 3, 17, 40]),
        engine=st.sampled_from(ENGINES),
        masked=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def go_on(self, stream: Stream, tokens: int, engine: str, masked: bool, seed: int) -> Stream:
        generator = torch.Generator().manual_seed(seed)
        query, key, value = (
            torch.randn(stream.batch, heads, tokens, dim, generator=generator)
            for heads, dim in ((HEADS * GROUPS, DIM), (HEADS, DIM), (HEADS, 5))
        )
        mask = torch.rand(stream.batch, tokens, generator=generator) < (0.7 if masked else 2)
        options = {"kernel": self.kernel, "is_causal": True, "enable_gqa": True, "engine": engine}
        log_decay = None
        if self.case.forget:
            log_decay = -0.3 * torch.rand(stream.batch, HEADS, tokens, generator=generator)
            options["log_decay"] = log_decay
        if masked:
            options["key_mask"] = mask
        out, state = linattn.attention(query, key, value, state=stream.state, return_state=True, **options)
        past = joined(stream.past, Inputs(query, key, value, mask, log_decay))
        self.check(out, query, past)
        return Stream(state, past)

    def check(self, out: torch.Tensor, query: torch.Tensor, past: Inputs) -> None:
        hidden = ~past.mask[:, None, :, None]
        key, value = (x.double().masked_fill(hidden, 0) for x in (past.key, past.value))
        log_decay = None if past.forget is None else past.forget.double()
        want = attend(self.case, self.kernel, query.double(), key, value, past.mask, log_decay)
        error = (out.double() - want.rows).abs().amax(-1)
        assert bool((error <= 3 * TOLERANCE[torch.float32] * want.condition * float(value.abs().max() + 1e-30)).all())

    @rule(target=streams, stream=streams, how=st.sampled_from(list(COPIES)))
    def copied(self, stream: Stream, how: str) -> Stream:
        return stream if stream.state is None else replace(stream, state=COPIES[how](stream.state))

    @rule(target=streams, stream=streams, data=st.data())
    def select(self, stream: Stream, data: st.DataObject) -> Stream:
        if stream.state is None:
            return stream
        index = torch.tensor(data.draw(st.lists(st.integers(0, stream.batch - 1), min_size=1, max_size=3)))
        past = stream.past
        chosen = [None if x is None else x[index] for x in (past.query, past.key, past.value, past.mask, past.forget)]
        return Stream(stream.state.select(index), Inputs(*chosen))


def joined(past: Inputs, new: Inputs) -> Inputs:
    key, value = (torch.cat([getattr(past, name), getattr(new, name)], -2) for name in ("key", "value"))
    forget = None if new.forget is None else torch.cat([past.forget, new.forget], -1)
    return Inputs(new.query, key, value, torch.cat([past.mask, new.mask], -1), forget)


@pytest.mark.parametrize("name", ["elu", "positive", "learned", "softmax", "nearfar"])
def test_streams_equal_their_definition(name):
    machine = type(f"Streams_{name}", (Streams,), {"name": name})
    profile = settings(
        max_examples=12,
        stateful_step_count=12,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=profile)
