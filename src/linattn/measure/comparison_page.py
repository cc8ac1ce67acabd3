"""The page of `linattn compare --html`. Needs matplotlib and Jinja2, which come with the extra `pages`."""

import functools
from pathlib import Path
from typing import Any

import torch

from ..functional.implied_attention import implied_attention
from ..nearfar import NearFar
from ..pages import data_address, render_page, themed_plot
from . import plots
from .compare import Comparison, Row

TEMPLATE = Path(__file__).with_name("comparison_page.html.j2")
SCALE_ENDS = 8  # where the scale of errors ends, in plain averages


def comparison_page(result: Comparison) -> str:
    """Time, memory, error, attention maps and all figures of one run."""
    setting = result.setting
    matrices = attention_matrices(result)
    summary = [
        [s["kernel"], s["engine"], _number(s["crossover"], ".0f"), _number(s["exponent"], ".2f")]
        for s in result.summary()
    ]
    return render_page(
        TEMPLATE,
        title="Linear attention next to softmax",
        machine=result.machine,
        setting=setting,
        form=f"{'causal' if setting['causal'] else 'non-causal'}, {'forward + backward' if setting['backward'] else 'forward'}",
        plots=[
            themed_plot(functools.partial(plots.panel, result, measure)) | {"title": title}
            for measure, title in plots.measures(result).items()
        ],
        series=plots.series(result),
        summary=[["kernel", "engine", "crossover", "growth"], *summary],
        errors=_errors(result),
        maps=[
            {"name": name, "address": data_address(plots.map_png(matrix)), "largest": matrix.max().item()}
            for name, matrix in matrices.items()
        ],
        wide=columns(len(matrices), (5, 4, 6)),
        narrow=columns(len(matrices), (3, 2, 4)),
        rules=_rules(result),
        figures=[
            ["kernel", "engine", "tokens", "ms", "x softmax", "peak extra MiB", "error", "plain average"],
            *(_cells(row) for row in [*result.softmax, *result.rows]),
        ],
    )


def _rules(result: Comparison) -> list[list[object]]:
    """The table of update rules, with its head; empty if none was measured."""
    head: list[object] = [
        "rule",
        "tokens",
        "ms",
        "of matmul rate",
        "growth",
        "peak extra MiB",
        "x transformers",
        "token, us",
        "in copies",
    ]
    rows = [
        [
            row["rule"],
            row["tokens"],
            _number(1e3 * float(str(row["seconds"])), ".2f"),
            _number(row["matmul_share"], ".2f"),
            _number(row["exponent"], ".2f"),
            _number(None if row["peak_bytes"] is None else int(str(row["peak_bytes"])) / 2**20, ".1f"),
            _number(row["reference_speedup"], ".1f"),
            _number(1e6 * float(str(row["step_seconds"])), ".0f"),
            _number(row["step_copies"], ".1f"),
        ]
        for row in result.rule_summary()
    ]
    return [head, *rows] if rows else []


def _errors(result: Comparison) -> dict[str, Any] | None:
    """A bar for each kernel at the largest number of tokens with errors, and the plain average as a mark on all of them."""
    measured = [row for row in result.rows if row.relative_error is not None]
    tokens = max((row.tokens for row in measured), default=0)
    rows = {row.kernel: row for row in measured if row.tokens == tokens}
    if not rows:
        return None
    plain = next(iter(rows.values())).baseline_error or 0.0
    errors = {kernel: row.relative_error or 0.0 for kernel, row in rows.items()}
    largest = max(errors.values())
    end = min(max(largest, 1.2 * plain), SCALE_ENDS * plain) if plain else largest or 1.0
    bars = [
        {
            "kernel": kernel,
            "error": error,
            "width": 100 * min(1.0, error / end),
            "cut": error > end,
            "colour": plots.colour_of(result, kernel),
        }
        for kernel, error in errors.items()
    ]
    return {
        "tokens": tokens,
        "plain": plain,
        "end": end,
        "mark": 100 * plain / end,
        "cut": largest > end,
        "bars": bars,
    }


def columns(count: int, choices: tuple[int, ...]) -> int:
    """The number of columns that leaves no single one in the last row if possible, then the fewest gaps there."""
    return min(choices, key=lambda c: (count % c == 1 and count > 1, -count % c))


def attention_matrices(result: Comparison) -> dict[str, torch.Tensor]:
    """Attention matrices of a short, structured sequence: neighbours are alike, so that there is something to see."""
    dim = int(str(result.setting["dim"]))
    steps = torch.randn(96, dim, generator=torch.Generator().manual_seed(0)) / 4
    walk = (steps.cumsum(0) - steps.cumsum(0).mean(0)).unsqueeze(0)
    x = walk / walk.std() * 1.5
    causal = bool(result.setting["causal"])
    names = ["softmax", *dict.fromkeys(row.kernel for row in result.rows)]
    # 96 tokens would all be near: a small near/far shows what it does to far ones.
    kernels: dict[str, Any] = {"near/far": NearFar(window=8, slots=8, sinks=2, block=8)}
    return {name: implied_attention(x, x, kernels.get(name, name), is_causal=causal)[0] for name in names}


def _cells(row: Row) -> list[object]:
    return [
        row.kernel,
        row.engine,
        row.tokens,
        f"{row.seconds * 1e3:.2f}",
        f"{row.speedup:.2f}",
        _number(None if row.peak_bytes is None else row.peak_bytes / 2**20, ".1f"),
        _number(row.relative_error, ".3g"),
        _number(row.baseline_error, ".3g"),
    ]


def _number(x: object, spec: str) -> str:
    return "" if x is None else format(x, spec)
