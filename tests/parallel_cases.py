"""What the processes of tests/parallel do: each rule over shards against the same call on one process."""

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import linattn
from linattn import parallel
from linattn.functional.decayed_sums import decayed_sums
from linattn.parallel import messages
from linattn.parallel.delta_rule import decayed_sums as parallel_decayed_sums
from linattn.parallel.groups import Members
from linattn.states import ConvState, ScanState
from parallel_comparison import LENGTHS, Comparison, bounds, randn

SCHEDULES = ("gather", "scan", "mixed")


def attention_case(who: Members, lengths: list[int], dtype: torch.dtype, **case: Any) -> None:
    """kernel, causal, decay (None, "head", "channel", "gate"), masked, packed, state, normalize, schedule, heads."""
    H = case.get("heads", 2)
    T, B, Hq, D, M = sum(lengths), 2, 2 * H, 8, 6
    tensors = {"query": randn(B, Hq, T, D, dtype=dtype), "key": randn(B, H, T, D, dtype=dtype)}
    tensors["value"] = randn(B, H, T, M, dtype=dtype)
    if case["decay"] == "gate":
        tensors["gate"] = torch.rand(B, H, T).clamp(0.3, 0.7).to(dtype)
    elif case["decay"] is not None:
        tensors["log_decay"] = -torch.rand(B, H, T, *((D,) if case["decay"] == "channel" else ()), dtype=dtype)
    constants = {"key_mask": torch.rand(B, T) > 0.3} if case["masked"] else {}
    linear = case["kernel"] not in ("softmax", "nearfar")
    kernel = (
        linattn.NearFar(window=4, slots=(2, 5), sinks=1, block=4) if case["kernel"] == "nearfar" else case["kernel"]
    )
    options = {"kernel": kernel, "is_causal": case["causal"], "enable_gqa": True, "return_state": linear}
    options |= {"normalize": case["normalize"], "cu_seqlens": bounds(T, case["packed"])}
    state = None
    if case["state"]:
        before = {name: x[:, :, :4] for name, x in tensors.items()}
        packed = [0, 1, 2, 2, 4] if case["packed"] else None
        state = linattn.attention(**before, **{**options, "cu_seqlens": packed})[1]

    def several(**given: Any) -> Any:
        return parallel.attention(**given, schedule=case["schedule"])

    Comparison(who, lengths, tensors, dict.fromkeys(tensors, 2)).check(
        linattn.attention, several, constants, options, state, rows=2
    )


def attention(who: Members) -> int:
    """A fixed, random choice of combinations that covers every pair of options; the same on all processes."""
    choices = {
        "kernel": ("elu", "positive", "identity", "trig"),
        "causal": (True, True, True, False),
        "decay": (None, "head", "channel", "gate"),
        "masked": (False, True),
        "packed": (False, True),
        "state": (False, True),
        "normalize": (True, False),
        "schedule": SCHEDULES,
        "heads": (2, 4),
    }
    picked = random.Random(who.size)
    done = 0
    for lengths, dtype in itertools.product(LENGTHS[who.size], (torch.float64, torch.float32)):
        for _ in range(8):
            case = {name: picked.choice(options) for name, options in choices.items()}
            if case["kernel"] in ("identity", "trig") and case["normalize"]:
                case["normalize"] = case["kernel"] == "trig" and case["decay"] is None and dtype == torch.float64
            if not case["causal"] or (case["decay"] == "channel" and case["kernel"] in ("positive", "trig")):
                case["decay"] = None
            torch.manual_seed(done)
            try:
                attention_case(who, lengths, dtype, **case)
            except Exception as error:
                raise AssertionError(f"{case} with shards of {lengths} in {dtype}: {error}") from error
            done += 1
    return done


def whole_tokens(who: Members) -> None:
    """Softmax and near/far, which need all tokens of a head: rows of one process to the last bit for near/far."""
    case = {"decay": None, "state": False, "normalize": True, "schedule": "auto"}
    for kernel, causal, masked, packed in itertools.product(("softmax", "nearfar"), *[(True, False)] * 3):
        torch.manual_seed(0)
        attention_case(
            who, LENGTHS[who.size][0], torch.float64, kernel=kernel, causal=causal, masked=masked, packed=packed, **case
        )
    torch.manual_seed(1)
    x = torch.randn(1, 4, 60 * who.size, 8)
    for biases in (
        {},
        {"alibi_slopes": [0.5, 0.3, 0.1, 0.01]},
        {"position_bias": torch.randn(4, 13), "logit_cap": 3.0},
    ):
        kernel = linattn.NearFar(window=8, slots=8, sinks=2, block=8, **biases)
        with torch.no_grad():
            one = linattn.attention(x, x, x, kernel=kernel, is_causal=True)
            mine = parallel.attention(
                *[parallel.shard(x, 2, group=who.group)] * 3, kernel=kernel, is_causal=True, group=who.group
            )
        assert torch.equal(mine, parallel.shard(one, 2, group=who.group))


def delta_rule(who: Members) -> None:
    options = LENGTHS[who.size], (None, "head", "channel"), (False, True), (False, True), SCHEDULES
    choices = list(itertools.product(*options))
    picked = random.Random(who.size).sample(choices, len(choices) // 4)  # the same on all processes
    for lengths, decay, masked, packed, schedule in picked:
        dtype = torch.float32 if masked and not packed else torch.float64
        torch.manual_seed(0)
        T, B, Hq, Hk, H, D, M = sum(lengths), 2, 4, 2, 4, 8, 6
        tensors = {"query": randn(B, Hq, T, D, dtype=dtype), "key": randn(B, Hk, T, D, dtype=dtype)}
        tensors |= {"value": randn(B, H, T, M, dtype=dtype), "beta": torch.rand(B, H, T, dtype=dtype)}
        if decay is not None:
            tensors["log_decay"] = -torch.rand(B, H, T, *((D,) if decay == "channel" else ()), dtype=dtype)
        constants = {"key_mask": torch.rand(B, T) > 0.3} if masked else {}
        options = {"enable_gqa": True, "cu_seqlens": bounds(T, packed)}
        before = [tensors[name][:, :, :4] for name in ("query", "key", "value", "beta")]
        starts = [0, 1, 2, 2, 4] if packed else None
        comparison = Comparison(who, lengths, tensors, dict.fromkeys(tensors, 2))
        more = {**options, "normalize_qk": True, "return_state": True}
        state = linattn.delta_rule(*before[:3], beta=before[3], **{**more, "cu_seqlens": starts})[1] if masked else None

        def several(schedule: str = schedule, **given: Any) -> Any:
            return parallel.delta_rule(**given, schedule=schedule)

        comparison.check(linattn.delta_rule, several, constants, more, state, rows=2)
        del tensors["beta"]

        def sums(schedule: str = schedule, **given: Any) -> Any:
            return parallel_decayed_sums(**given, schedule=schedule)

        state = decayed_sums(*before[:3], enable_gqa=True, cu_seqlens=starts)[1] if masked else None
        comparison.check(decayed_sums, sums, constants, options, state, rows=2)


def scans(who: Members) -> None:
    """The selective scan, with B and C of one and of several groups, and the convolution, longer than some shards."""
    B, C, n, dtype = 2, 6, 3, torch.float64
    for lengths, groups, schedule in itertools.product(LENGTHS[who.size], (1, 3), SCHEDULES):
        torch.manual_seed(0)
        T = sum(lengths)
        tensors = {name: torch.randn(B, C, T, dtype=dtype) for name in ("u", "delta", "z")}
        tensors |= {name: torch.randn(B, *((groups,) if groups > 1 else ()), n, T, dtype=dtype) for name in ("B", "C")}
        weights = {
            "A": -torch.rand(C, n, dtype=dtype),
            "D": torch.rand(C, dtype=dtype),
            "delta_bias": torch.rand(C).to(dtype),
        }
        dims = {**dict.fromkeys(tensors, -1), **dict.fromkeys(weights)}

        def several(schedule: str = schedule, **given: Any) -> Any:
            return parallel.selective_scan(**given, schedule=schedule)

        state = ScanState("selective_scan", torch.randn(B, C, n, dtype=dtype)) if groups > 1 else None
        options = {"delta_softplus": True, "return_state": True}
        Comparison(who, lengths, {**tensors, **weights}, dims).check(
            linattn.selective_scan, several, {}, options, state, rows=-1
        )
    for lengths, masked, packed, given in itertools.product(LENGTHS[who.size], *[(False, True)] * 3):
        T = sum(lengths)
        tensors = {"x": torch.randn(B, C, T, dtype=dtype), "weight": torch.randn(C, 4, dtype=dtype)}
        tensors["bias"] = torch.randn(C, dtype=dtype)
        for x in tensors.values():  # all processes draw the same
            dist.broadcast(x, who.ranks[0], group=who.group)
        mask = torch.rand(B, T, generator=torch.Generator().manual_seed(T)) > 0.3
        inputs = torch.ones(B, *((4,) if packed else ()), C, 3, dtype=dtype)
        options = {"activation": "silu", "cu_seqlens": bounds(T, packed), "return_state": True}
        Comparison(who, lengths, tensors, {"x": -1, "weight": None, "bias": None}).check(
            linattn.causal_conv1d,
            parallel.causal_conv1d,
            {"key_mask": mask} if masked else {},
            options,
            ConvState("causal_conv1d", inputs) if given else None,
            rows=-1,
        )


def traffic(who: Members, tokens: int) -> dict[str, int]:
    """Bytes that this process receives for a forward and a backward pass of each rule."""
    found = {}
    for rule, schedule in itertools.product(("sums", "decay", "delta", "scan"), SCHEDULES):
        torch.manual_seed(0)
        T, options = tokens // who.size, {"group": who.group, "schedule": schedule}
        q, k, v = (torch.randn(1, 2, T, 8, requires_grad=True) for _ in range(3))
        decay, beta = -torch.rand(1, 2, T), torch.rand(1, 2, T)
        with parallel.count_traffic() as counted:
            if rule == "sums":
                out = parallel.attention(q, k, v, kernel="elu", is_causal=True, **options)
            elif rule == "decay":
                out = parallel.attention(
                    q, k, v, kernel="identity", normalize=False, log_decay=decay, is_causal=True, **options
                )
            elif rule == "delta":
                out = parallel.delta_rule(q, k, v, beta=beta, normalize_qk=True, **options)
            else:
                u, A = q.flatten(0, 1).mT, -torch.rand(8, 4)
                x = torch.randn(2, 4, T)
                out = parallel.selective_scan(u, u, A, x, x, delta_softplus=True, **options)
            out.sum().backward()
        found[f"{rule} {schedule}"] = counted.total
    return found


def refusals(who: Members) -> None:
    """Every process raises the same clear error, and the group works afterwards."""
    x, beta, group = torch.randn(1, 2, 5, 8), torch.rand(1, 2, 5), who.group
    causal, full = {"is_causal": True, "group": group, "kernel": "elu"}, {"group": group}

    def refuses(kind: type[Exception], text: str, call: Any, *args: Tensor, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            call(*args, **options)

    attend = parallel.attention
    refuses(ValueError, "rise from 0 to the", attend, x, x, x, cu_seqlens=[0, 5], **causal)
    refuses(ValueError, "one list of bounds", attend, x, x, x, cu_seqlens=([0, 5], [0, 5]), **causal)
    refuses(ValueError, "queries and keys of the same tokens", attend, x[:, :, :3], x, x, **causal)
    refuses(ValueError, "takes and returns no state", attend, x, x, x, kernel="softmax", return_state=True, **full)
    refuses(ValueError, "takes and returns no state", attend, x, x, x, kernel="nearfar", return_state=True, **full)
    refuses(ValueError, "unknown schedule", parallel.delta_rule, x, x, x, beta=beta, schedule="ring", **full)
    refuses(ValueError, "beta must be", parallel.delta_rule, x, x, x, beta=beta[..., :3], **full)
    refuses(TypeError, "process group or a DeviceMesh", attend, x, x, x, kernel="elu", group=7)
    out = parallel.attention(x, x, x, kernel="elu", is_causal=True, group=who.group)
    assert out.shape == x.shape


def disagreements(who: Members) -> None:
    """Processes that do not pass the same options all raise an error, where their messages have one size; then all goes on."""
    x, decay, beta = torch.randn(1, 2, 6, 8), -torch.rand(1, 2, 6), torch.rand(1, 2, 6)
    other, total = who.rank == 0, 6 * who.size
    _, state = linattn.attention(x, x, x, kernel="elu", is_causal=True, return_state=True)
    sums = {"call": parallel.attention, "is_causal": True, "kernel": "elu"}
    seeded = [linattn.kernels.Positive(8, 16, seed=seed) for seed in (1, 2)]
    cases = [
        {**sums, "kernel": "relu" if other else "elu"},
        {**sums, "kernel": seeded[other]},
        {**sums, "scale": 0.5 if other else None, "kernel": seeded[0]},
        {**sums, "log_decay": decay if other else None},
        {**sums, "gate": decay.exp() if other else None},
        {**sums, "cu_seqlens": [0, 3 + other, total]},
        {**sums, "state": state if other else None},
        {**sums, "kernel": linattn.NearFar(window=4 + other, slots=4), "schedule": "auto"},
        {**sums, "kernel": "softmax", "is_causal": other, "schedule": "auto"},
        {"call": parallel.delta_rule, "beta": beta, "normalize_qk": other},
        {"call": parallel.delta_rule, "beta": beta, "scale": 1.0 + other},
    ]
    for options in cases:
        call = options.pop("call")
        with pytest.raises(RuntimeError, match="did not make the same call"):
            call(x, x, x, **{"schedule": "gather", "group": who.group, **options})
    scan, weight = torch.rand(2, 8, 6), torch.rand(8, 4)
    tokens = scan, scan, -weight, scan[:, :4], scan[:, :4]
    with pytest.raises(RuntimeError, match=r"did not make the same call.*selective_scan"):
        parallel.selective_scan(*tokens, delta_softplus=other, group=who.group, schedule="gather")
    with pytest.raises(RuntimeError, match="did not make the same call"):
        parallel.causal_conv1d(scan, weight, activation="silu" if other else None, group=who.group)
    assert parallel.attention(x, x, x, kernel="elu", is_causal=True, group=who.group).shape == x.shape


def many_layers(who: Members, dies: int, how: str) -> str:
    """Calls until a process is lost; returns the error. Process `dies` ends, or stops to answer, after a few calls."""
    import os
    import signal
    import time

    x = torch.randn(1, 2, 50, 8, requires_grad=True)
    for i in range(1000):
        if who.rank == dies and i == 3:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(120)
        try:
            parallel.attention(x, x, x, kernel="elu", is_causal=True, group=who.group).sum().backward()
        except RuntimeError as error:
            return str(error)
    return "nothing happened"


def sent_messages(who: Members) -> int:
    """How many buffers are held after many more messages than may be under way."""
    x = torch.randn(1, 16, 3, 4)
    for _ in range(2 * messages.MOST_PENDING // 16):
        parallel.attention(x, x, x, kernel="elu", is_causal=True, group=who.group, schedule="scan")
    sent = messages._pending
    assert who.last or sent
    return len(sent)


def processor_time(who: Members) -> float:
    """Of this process so far; a case that shows that all processes are there."""
    import time

    return time.process_time()
