"""Measures where engine="auto" should change from torch to native: prints native's gain for small and odd calls.

The rule it stands behind is in src/linattn/engines/choose.py: native wherever it can serve.
"""

import torch

import linattn
from clocks import seconds
from linattn.kernels import NAMES


def main() -> None:
    print("times faster than the torch engine, forward, 2 heads, dim 32")
    for name in [n for n in NAMES if n not in ("softmax", "exact", "trig-plain")]:
        figures = []
        for length in (1, 16, 256, 4096):
            x = [torch.randn(1, 2, length, 32) for _ in range(3)]
            for is_causal in (False, True):
                options = {"kernel": name, "is_causal": is_causal}
                calls = {
                    engine: lambda e=engine, x=x, o=options: linattn.attention(*x, engine=e, **o)
                    for engine in ("torch", "native")
                }
                with torch.no_grad():
                    best = seconds(calls, budget=0.2)
                figures.append(f"N={length}{' causal' if is_causal else ''} {best['torch'] / best['native']:.1f}")
        print(f"{name:12} " + ", ".join(figures))


if __name__ == "__main__":
    main()
