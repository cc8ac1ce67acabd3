"""The report: its sentences, its tables, and one page of everything."""

from pathlib import Path

from linattn import pages

from ..plotting import save_figure
from . import plots
from .macs import CONVENTION, COURSE_CONVENTION, course_totals
from .study import ALL_LAYERS, WITH_EXITS, Curve, Study, point_name, spearman, static_name

TEMPLATE = Path(__file__).with_name("page.html.j2")


def write_page(study: Study, path: Path) -> None:
    """Everything in one file; parts that were not measured are left out."""
    total, with_exits = course_totals()
    depth = transformer = None
    if study.depth is not None:
        figure = plots.depth(study.depth, study.curve.exits[: len(study.depth)])
        depth = {"text": depth_sentence(study), "plot": pages.plot_address(figure)}
    if study.transformer is not None:
        transformer = {
            "text": transformer_sentence(study),
            "rows": exit_rows(study.transformer, study),
            "plot": pages.plot_address(plots.transformer(study.transformer)),
        }
    pages.write_page(
        path,
        TEMPLATE,
        title="Early exit",
        summary=summary(study),
        comparison=comparison(study),
        curves=pages.plot_address(plots.curves(study)),
        convention=CONVENTION,
        exits={"rows": exit_rows(study.curve, study), "plot": pages.plot_address(plots.exits(study))},
        gallery=pages.plot_address(plots.galleries(study)),
        depth=depth,
        transformer=transformer,
        course={"convention": COURSE_CONVENTION, "total": total, "with_exits": with_exits},
    )


def save_picture(study: Study, path: Path) -> None:
    save_figure(plots.curves(study), path, dpi=100)


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
    """128, or all test images where there are fewer."""
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
    for number, ((whole, own), share, macs) in enumerate(
        zip(found, curve.chosen.shares, curve.costs.exits, strict=True)
    ):
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
