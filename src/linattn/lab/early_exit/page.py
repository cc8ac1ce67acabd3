"""The report as one page that needs no other file."""

import base64
import html
import io
from pathlib import Path

from matplotlib.figure import Figure

from .._commandline import write_file
from . import plots
from .macs import CONVENTION, COURSE_CONVENTION, course_totals
from .study import ALL_LAYERS, WITH_EXITS, Curve, Study, point_name, spearman, static_name

TIMES = "Times: of the processor, one thread; contestants interleaved, medians of rounds."
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
img { max-width: 100%; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: right; padding: 0.25rem 0.8rem; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
h2 { margin-top: 2.5rem; }
small { color: #666; }
"""


def write_page(study: Study, path: Path) -> None:
    parts = [
        "<h1>Early exit</h1>",
        f"<p>{html.escape(summary(study))}</p>",
        _table(comparison(study)),
        _picture(plots.curves(study), "accuracy against MACs and against measured time"),
        f"<p><small>{html.escape(CONVENTION)} {TIMES}</small></p>",
        "<h2>The exits</h2>",
        _table(exit_rows(study.curve, study)),
        _picture(plots.exits(study), "share, accuracy, noise and size by exit"),
        "<h2>What leaves first, what goes to the end</h2>",
        "<p>Over each picture the class that was named; red is wrong.</p>",
        _picture(plots.galleries(study), "pictures that leave first and that go to the end"),
    ]
    if study.depth is not None:
        parts += ["<h2>Prediction depth meets early exit</h2>", f"<p>{html.escape(depth_sentence(study))}</p>"]
        parts.append(_picture(plots.depth(study.depth, study.curve.exits[: len(study.depth)]), "depth against exit"))
    if study.transformer is not None:
        parts += ["<h2>A transformer with linear attention</h2>", f"<p>{html.escape(transformer_sentence(study))}</p>"]
        parts.append(_table(exit_rows(study.transformer, study)))
        parts.append(_picture(plots.transformer(study.transformer), "the transformer's exits"))
    whole, course = course_totals()
    parts += [
        "<h2>The course's count</h2>",
        f"<p>{html.escape(COURSE_CONVENTION)} Width 64, 32 x 32 x 3, 6 classes, 6000 images: {whole} without exits, "
        f"{course} with 16, 3, 6 and 22 of 47 batches leaving at the four exits.</p>",
    ]
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Early exit</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def save_picture(study: Study, path: Path) -> None:
    figure = plots.curves(study)
    write_file(path, lambda temporary: figure.savefig(temporary, dpi=100))


def summary(study: Study) -> str:
    chosen, full = study.curve.chosen, max(study.full.accuracy, study.curve.full_accuracy)
    wall = " and ".join(f"{study.latency_ratio(batch, 'wall'):.2f}" for batch in (1, 128))
    return (
        f"{point_name(chosen)}, chosen on validation pictures for an accuracy of {study.floor:.4f}: {chosen.accuracy:.4f} on "
        f"{len(study.test)} test pictures with {study.curve.mac_ratio:.2f} times fewer MACs than the network without exits, "
        f"{study.latency_ratio(1):.2f} times faster picture by picture and {study.latency_ratio(128):.2f} times in batches of "
        f"{largest_batch(study)} (by the clock on the wall {wall}). Without leaving early: {full:.4f}, the better of the "
        f"last exit ({study.curve.full_accuracy:.4f}) and a network trained without exits ({study.full.accuracy:.4f})."
    )


def largest_batch(study: Study) -> int:
    """128, or all test pictures where there are fewer."""
    return min(128, len(study.test))


def comparison(study: Study) -> list[list[str]]:
    """The chosen point beside the networks without exits, and the same of the transformer."""
    chosen = study.curve.chosen
    compared: list[tuple[str, float, float]] = [(point_name(chosen), chosen.accuracy, chosen.macs)]
    compared += [(static_name(s.width), s.accuracy, s.macs) for s in study.statics]
    if study.transformer is not None:
        found = study.transformer
        compared.append((WITH_EXITS, found.chosen.accuracy, found.chosen.macs))
        compared.append((ALL_LAYERS, found.full_accuracy, found.costs.full))
    rows = [["", "accuracy", "MACs", "ms, batch 1", f"ms a picture, batch {largest_batch(study)}"]]
    for name, accuracy, macs in compared:
        times = [f"{1e3 * study.times[batch][name].processor:.3f}" for batch in (1, 128)]
        rows.append([name, f"{accuracy:.4f}", f"{macs / 1e6:.2f} M", *times])
    return rows


def exit_rows(curve: Curve, study: Study) -> list[list[str]]:
    """Each exit at the chosen point of a curve."""
    rows = [["exit", "leave there", "accuracy of all", "of those that leave", "MACs"]]
    found = curve.exit_accuracies(study.test.labels)
    for number, ((whole, own), share, macs) in enumerate(zip(found, curve.chosen.shares, curve.costs.exits)):
        said = "-" if own is None else f"{own:.4f}"
        rows.append([str(number + 1), f"{100 * share:.1f} %", f"{whole:.4f}", said, f"{macs / 1e6:.2f} M"])
    return rows


def depth_sentence(study: Study) -> str:
    if study.depth is None:
        return ""
    known = spearman(study.depth, study.curve.exits[: len(study.depth)])
    said = "cannot be told" if known is None else f"is {known['spearman']:.3f} (p = {known['p']:.2g})"
    return (
        f"Over {len(study.depth)} test pictures the rank correlation of prediction depth, the first layer from which nearest "
        f"neighbours agree with the network, and the exit taken {said}."
    )


def transformer_sentence(study: Study) -> str:
    if study.transformer is None:
        return ""
    found = study.transformer
    faster = " and ".join(f"{study.transformer_latency_ratio(batch):.2f}" for batch in (1, 128))
    return (
        "The same wrapper on a transformer with linear attention, patches as tokens, an exit after every layer, every "
        f"sequence by itself: {point_name(found.chosen)} gives {found.chosen.accuracy:.4f} with "
        f"{found.mac_ratio:.2f} times fewer MACs than all layers ({found.full_accuracy:.4f}), "
        f"{faster} times faster one by one and in batches of {largest_batch(study)}."
    )


def _table(rows: list[list[str]]) -> str:
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows[1:]]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _picture(figure: Figure, alt: str) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=100)
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'
