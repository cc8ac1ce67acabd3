"""Which files of linattn a call passes through, and how often one file calls another.

python benchmarks/call_path.py [--verbose]

Each case runs a few times first, so that caches are filled; then one call is traced, from the public function and back.
"""

import argparse
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import linattn

ROOT = os.path.dirname(os.path.abspath(linattn.__file__)) + os.sep


def call_path(call: Callable[[], Any]) -> list[str]:
    """The files of linattn in the order in which one call enters them, returns included; neighbours differ."""
    path: list[str] = []

    def visit(frame: FrameType | None) -> None:
        file = frame.f_code.co_filename if frame is not None else ""
        if file.startswith(ROOT) and (not path or path[-1] != file[len(ROOT) :]):
            path.append(file[len(ROOT) :])

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            visit(frame)
        elif event == "return":
            visit(frame.f_back)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return path


def cases() -> dict[str, Callable[[], Any]]:
    """Name -> a call. Inputs are (1, 4, 512, 32) unless the name says otherwise."""
    q, k, v = (torch.randn(1, 4, 512, 32) for _ in range(3))
    one = [x[:, :, :1].clone() for x in (q, k, v)]
    causal: dict[str, Any] = {"is_causal": True}
    made: dict[str, Callable[[], Any]] = {}
    for name, kernel in (("positive", linattn.kernels.Positive(32, 64)), ("near/far", linattn.NearFar(64, 64))):
        for engine in ("native", "torch"):
            about: dict[str, Any] = {"kernel": kernel, "engine": engine}
            state = linattn.attention(q, k, v, return_state=True, **causal, **about)[1]
            made |= {
                f"{name}, {engine}, forward": lambda a=about: linattn.attention(q, k, v, **a),
                f"{name}, {engine}, causal forward": lambda a=about: linattn.attention(q, k, v, **causal, **a),
                f"{name}, {engine}, prefill from no state": lambda a=about: linattn.attention(
                    q, k, v, return_state=True, **causal, **a
                ),
                f"{name}, {engine}, prefill with state": lambda a=about, s=state: linattn.attention(
                    q, k, v, state=s, return_state=True, **causal, **a
                ),
                f"{name}, {engine}, decode": lambda a=about, s=state: linattn.attention(
                    *one, state=s, return_state=True, **causal, **a
                ),
            }
    beta, log_decay = torch.rand(1, 4, 512), -torch.rand(1, 4, 512)
    gates: dict[str, Any] = {"beta": beta, "log_decay": log_decay, "normalize_qk": True}
    first = {name: x[..., :1].clone() for name, x in (("beta", beta), ("log_decay", log_decay))}
    state = linattn.delta_rule(q, k, v, return_state=True, **gates)[1]
    made |= {
        "delta rule, forward": lambda: linattn.delta_rule(q, k, v, **gates),
        "delta rule, decode": lambda: linattn.delta_rule(
            *one, **first, normalize_qk=True, state=state, return_state=True
        ),
    }
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="print the path itself")
    parser.add_argument("--case", default="", help="only cases whose name contains this text")
    options = parser.parse_args()
    print(f"{'call, warm':42}{'files':>6}{'calls into another file':>25}")
    for name, call in cases().items():
        if options.case not in name:
            continue
        for _ in range(3):
            call()
        path = call_path(call)
        print(f"{name:42}{len(set(path)):>6}{(len(path) - 1) // 2:>25}")
        if options.verbose:
            print("    " + " > ".join(path))


if __name__ == "__main__":
    main()
