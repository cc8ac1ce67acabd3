"""Sequence parallelism on one machine: bytes, memory, time, and what they say about 64 machines.

    python benchmarks/parallel.py bytes                   received by a process for each layer, at several lengths
    python benchmarks/parallel.py memory                  peak of a process at 2^20 tokens, 1 process and 4
    python benchmarks/parallel.py speed                   2 processes of one thread beside one process of one thread
    python benchmarks/parallel.py extra                   time of a shard's summary beside that of its rows
    python benchmarks/parallel.py model                   64 machines with 25 Gbit/s, 2^24 tokens; checked against counted bytes

Processes are started here, with gloo and one thread each. `--json FILE` keeps the figures. Ratios are of the shortest of
several rounds that take turns; on a busy machine, processor time beside them says what a quiet one would do.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import linattn
import parallel_model
from linattn import parallel
from parallel_model import LAYERS, SCHEDULES

Found = dict[str, Any]


def run(world: int, task: Callable[..., Found], *args: Any) -> list[Found]:
    """task(rank, world, *args) in as many processes; what each returned."""
    context, folder = multiprocessing.get_context("spawn"), tempfile.mkdtemp()
    pipes, processes = [], []
    for rank in range(world):
        own, other = context.Pipe()
        process = context.Process(target=_process, args=(rank, world, f"{folder}/store", other, task, args))
        process.start()
        other.close()
        pipes.append(own)
        processes.append(process)
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return found


def _process(rank: int, world: int, store: str, pipe: Any, task: Callable[..., Found], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=600)
    )
    pipe.send(task(rank, world, *args))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def count_bytes(rank: int, world: int, names: list[str], lengths: list[int]) -> Found:
    """Bytes received for the rows and for the gradients, by layer, schedule and number of tokens."""
    found: Found = {}
    for name in names:
        for schedule in SCHEDULES:
            for tokens in lengths:
                call = LAYERS[name].call(tokens // world, grad=True)
                with parallel.count_traffic() as traffic:
                    call(parallel, schedule=schedule).sum().backward()
                found[f"{name}/{schedule}/{tokens}"] = [
                    traffic.bytes.get("forward", 0),
                    traffic.bytes.get("backward", 0),
                ]
    return found


def bytes_of_layers(args: argparse.Namespace) -> Found:
    lengths, record = [2048, 16384], {}
    for world in (2, 4):
        ranks = run(world, count_bytes, list(LAYERS), lengths)
        print(f"\n{world} processes: KiB received by the process that receives most, forward and backward")
        for name in LAYERS:
            for schedule in SCHEDULES:
                most = [
                    [max(found[f"{name}/{schedule}/{tokens}"][way] for found in ranks) for way in (0, 1)]
                    for tokens in lengths
                ]
                same = "independent of the tokens" if most[0] == most[1] else f"GROWS: {most}"
                print(f"  {name:28} {schedule:7} {most[0][0] / 1024:9.1f} {most[0][1] / 1024:9.1f}   {same}")
                record[f"{world}/{name}/{schedule}"] = {"forward": most[0][0], "backward": most[0][1], "lengths": most}
    return record


def measure_memory(rank: int, world: int, name: str, tokens: int, grad: bool) -> Found:
    """Peak of this process above what it holds before its first tensor, in MiB."""
    layer = LAYERS[name].narrowed()
    with torch.set_grad_enabled(grad):
        layer.call(64, grad=grad)(parallel if world > 1 else linattn)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.set_grad_enabled(grad):
        out = layer.call(tokens // world, grad=grad)(parallel if world > 1 else linattn)
        if grad:
            out.sum().backward()
    return {"MiB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def memory(args: argparse.Namespace) -> Found:
    record = {}
    for name in args.layers or ("sums (elu)", "delta rule"):
        for tokens, grad in ((args.tokens or 2**20, False), ((args.tokens or 2**20) // 4, True)):
            peaks = {}
            for world in (1, 2, 4):
                peaks[world] = max(found["MiB"] for found in run(world, measure_memory, name, tokens, grad))
            ratio = peaks[4] / peaks[1]
            kind = "forward + backward" if grad else "forward"
            print(
                f"{name:20} {kind:18} {tokens:8} tokens: {peaks[1]:.0f} MiB for one process, {peaks[2]:.0f} for each of 2, "
                f"{peaks[4]:.0f} for each of 4: {ratio:.3f} of one (bar <= 0.3)"
            )
            record[f"{name}/{kind}/{tokens}"] = {"peaks": peaks, "ratio": ratio}
    return record


def measure_speed(rank: int, world: int, name: str, tokens: int, rounds: int) -> Found:
    """Seconds and processor seconds of one process alone, and of all together; each after a call that is not counted, so that
    both find memory as in a loop."""
    layer, times = LAYERS[name], {"one": [], "all": []}  # type: Layer, dict[str, list[tuple[float, float]]]
    with torch.no_grad():
        alone = layer.call(tokens) if rank == 0 else None
        shared = layer.call(tokens // world)
        for _ in range(rounds):
            dist.barrier()
            if alone is not None:
                alone(linattn)
                times["one"].append(_timed(lambda: alone(linattn)))
            shared(parallel)
            dist.barrier()
            begun = time.perf_counter()
            _, busy = _timed(lambda: shared(parallel))
            dist.barrier()
            times["all"].append((time.perf_counter() - begun, busy))
    return times


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    wall, busy = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - busy


def speed(args: argparse.Namespace) -> Found:
    record = {}
    for name in args.layers or LAYERS:
        tokens = args.tokens or 131072
        ranks = run(2, measure_speed, name, tokens, args.rounds)
        one, both = ([min(x[i] for x in ranks[0][kind]) for i in (0, 1)] for kind in ("one", "all"))
        busiest = max(min(x[1] for x in found["all"]) for found in ranks)
        planned = LAYERS[name].plan(2)
        late = 0.0 if planned.gathered else busiest / planned.groups  # waits for the first group of heads
        print(
            f"{name:28} one process {one[0]:6.2f} s ({one[1]:.2f} of processor), two {both[0]:6.2f} s ({busiest:.2f} each): "
            f"{one[0] / both[0]:.2f}x by the clock, {one[1] / (busiest + late):.2f}x by processor time (bar 1.7)"
        )
        record[name] = {"clock": one[0] / both[0], "processor": one[1] / (busiest + late), "one": one, "both": both}
    return record


def extra(args: argparse.Namespace) -> Found:
    """Of one process: the summary of a middle shard beside its rows, in processor time, taking turns."""
    torch.set_num_threads(1)
    record = {}
    for name in args.layers or LAYERS:
        with torch.no_grad():
            rule = LAYERS[name].rule(args.tokens or 8192)
            times: dict[str, list[float]] = {"rows": [], "summary": []}
            for _ in range(args.rounds + 1):
                times["rows"].append(_timed(lambda rule=rule: rule.run(rule.empty(), None))[1])
                times["summary"].append(_timed(lambda rule=rule: rule.summary(0, None, fresh=False))[1])
        share = min(times["summary"]) / min(times["rows"])
        print(f"{name:28} summary {share:.2f} of the rows; the library expects {rule.extra_work:.2f}")
        record[name] = {
            "share": share,
            "expected": rule.extra_work,
            "tokens per second": (args.tokens or 8192) / min(times["rows"]),
        }
    return record


def model(args: argparse.Namespace) -> Found:
    """The bytes of the model must be those counted; then its figures for many machines."""
    wrong = []
    for world in (2, 4):
        ranks = run(world, count_bytes, list(LAYERS), [2048])
        for name, layer in LAYERS.items():
            for schedule in SCHEDULES:
                for way, kind in enumerate(("forward", "backward")):
                    counted = max(found[f"{name}/{schedule}/2048"][way] for found in ranks)
                    expected = layer.bytes(world, schedule, kind)
                    if counted != expected:
                        wrong.append(
                            f"{name}, {schedule}, {world} processes, {kind}: {counted} counted, {expected} expected"
                        )
    if wrong:
        raise SystemExit("the model's bytes are not those counted:\n" + "\n".join(wrong))
    print(
        "bytes of the model equal those counted, for 2 and 4 processes, all layers and schedules, forward and backward"
    )
    measured = extra(args)
    rates = {name: (x["tokens per second"], x["share"]) for name, x in measured.items()}
    return parallel_model.predict(rates, args.machines, args.total, args.gigabits, args.cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bytes", "memory", "speed", "extra", "model"])
    parser.add_argument("--layers", nargs="+", choices=list(LAYERS), help="some of the layers")
    parser.add_argument("--tokens", type=int, help="of the whole sequence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--machines", type=int, default=64)
    parser.add_argument("--total", type=int, default=2**24, help="model: tokens of the sequence")
    parser.add_argument("--gigabits", type=float, default=25.0, help="model: per second between machines")
    parser.add_argument("--cores", type=int, default=32, help="model: of a machine, each as fast as one here")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    commands = {"bytes": bytes_of_layers, "memory": memory, "speed": speed, "extra": extra, "model": model}
    found = commands[args.what](args)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
