"""Charts from matplotlib figures: the numbers of their lines and bars, for chart.js."""

import math
from typing import Any

MOST_POINTS = 400  # of a series; longer ones are thinned
# Okabe and Ito's colours, told apart with any colour vision, in the order in which chart.js takes them.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1", "#7f7f7f")
_DEFAULTS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")  # matplotlib's
_COLOURS = {**dict(zip(_DEFAULTS, COLOURS, strict=True)), "#000000": "currentColor"}
_DASHES = {"-": "", "--": "7 4", ":": "2 3", "-.": "9 3 2 3"}


def charts_of(figure: Any) -> list[dict[str, Any]]:
    """One chart for each axes of a figure; none if an axes shows anything but lines, bars and text.

    Lines without a label and without a slope are rules; other lines without a label are left out.
    """
    charts = [_chart(axes) for axes in figure.axes if axes.has_data()]
    return [] if any(chart is None for chart in charts) else [chart for chart in charts if chart is not None]


def _chart(axes: Any) -> dict[str, Any] | None:
    bars = {id(patch) for container in axes.containers for patch in getattr(container, "patches", ())}
    strange = [patch for patch in axes.patches if id(patch) not in bars]
    if axes.images or axes.collections or strange:
        return None
    series, rules = [], []
    for line in axes.lines:
        x, y = ([float(value) for value in part] for part in (line.get_xdata(orig=False), line.get_ydata(orig=False)))
        label = str(line.get_label())
        rule = _rule(x, y, line, axes)
        if rule is not None:
            rules.append(rule | {"label": "" if label.startswith("_") else label})
        elif not label.startswith("_") or len(axes.lines) == 1:
            name = axes.get_ylabel() if label.startswith("_") else label
            series.append({"label": name, "points": _points(x, y)} | _style(line))
    for container in axes.containers:
        patches: list[Any] = list(getattr(container, "patches", ()))
        label = str(container.get_label())
        x = [patch.get_x() + patch.get_width() / 2 for patch in patches]
        y = [patch.get_height() for patch in patches]
        name = axes.get_ylabel() if label.startswith("_") else label
        if x:
            shown = {"points": _points(x, y), "colour": _colour(patches[0].get_facecolor())}
            series.append({"label": name, "bars": True} | shown)
    if not series:
        return None
    names = [label.get_text() for label in axes.get_xticklabels()]
    given = _names_are_given(axes)
    ticks = {
        _key(at): name
        for at, name in zip(axes.get_xticks(), names, strict=False)
        if name and (given or not _is_number(name))
    }
    return {
        "title": axes.get_title() or axes.get_ylabel(),
        "series": series,
        "rules": rules,
        "x": {"label": axes.get_xlabel(), "log": axes.get_xscale() == "log", "choice": not ticks, "names": ticks}
        | ({"ticks": [float(key) for key in ticks]} if ticks else {}),
        "y": {"label": axes.get_ylabel(), "log": axes.get_yscale() == "log", "choice": True},
    }


def _rule(x: list[float], y: list[float], line: Any, axes: Any) -> dict[str, float] | None:
    """A line of axhline or axvline, whose other coordinates are shares of the axes."""
    if len(x) != 2 or line.get_transform() == axes.transData:
        return None
    if y[0] == y[1]:
        return {"y": y[0]}
    return {"x": x[0]} if x[0] == x[1] else None


def _style(line: Any) -> dict[str, Any]:
    """Colour and dashes, or dots alone."""
    kind = str(line.get_linestyle())
    return {"colour": _colour(line.get_color()), "dash": _DASHES.get(kind, ""), "line": kind in _DASHES}


def _colour(given: Any) -> str:
    from matplotlib.colors import to_hex

    found = str(to_hex(given))
    return _COLOURS.get(found, found)


def _points(x: Any, y: Any) -> list[list[float]]:
    points = [[a, b] for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    step = -(-len(points) // MOST_POINTS) or 1
    return points[::step] if step == 1 else [*points[::step], points[-1]]


def _key(number: float) -> str:
    """As JavaScript writes a number."""
    return str(int(number)) if float(number).is_integer() else repr(float(number))


def _names_are_given(axes: Any) -> bool:
    """True if the ticks were named one by one, perhaps by numbers: 16 bytes at place 0."""
    from matplotlib.category import StrCategoryFormatter
    from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

    formatter, locator = axes.xaxis.get_major_formatter(), axes.xaxis.get_major_locator()
    named = isinstance(formatter, FuncFormatter) and isinstance(locator, FixedLocator)  # set_xticks with labels
    return named or isinstance(formatter, FixedFormatter | StrCategoryFormatter)


def _is_number(text: str) -> bool:
    try:
        float(text.replace("\N{MINUS SIGN}", "-"))
    except ValueError:
        return "mathdefault" in text
    return True
