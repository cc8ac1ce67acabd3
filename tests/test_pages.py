"""Pages in a real Chromium: plots of lines and bars become charts with the numbers of the figure."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from matplotlib.figure import Figure

from browser_support import chromium, screenshot, watched_page
from linattn import pages

TEMPLATE = """{% extends "base.html.j2" %}{% from "macros.html.j2" import plot %}
{% block body %}{{ plot(address, "a plot") }}{% endblock %}"""


def lines():
    figure = Figure(figsize=(6, 3))
    left, right = figure.subplots(1, 2)
    left.loglog([1, 10, 100], [2, 20, 210], "o-", label="measured </script>")
    left.loglog([1, 10, 100], [2, 20, 200], "--", label="theory")
    left.axhline(5, color="grey", label="a rule")
    left.set(xlabel="tokens", ylabel="ms", title="Time")
    right.bar([0, 1, 2], [0.5, 0.25, 0.25], label="share")
    right.set_xticks([0, 1, 2], ["first", "second", "third"])
    right.set(ylabel="share")
    return figure


def test_charts_hold_the_numbers_of_the_figure():
    time, share = pages.charts_of(lines())
    assert [s["points"] for s in time["series"]] == [[[1, 2], [10, 20], [100, 210]], [[1, 2], [10, 20], [100, 200]]]
    assert [s["dash"] for s in time["series"]] == ["", "7 4"]
    assert time["rules"] == [{"y": 5.0, "label": "a rule"}]
    assert (time["x"]["log"], time["x"]["label"], time["title"]) == (True, "tokens", "Time")
    assert share["series"][0]["bars"]
    assert [y for _, y in share["series"][0]["points"]] == [0.5, 0.25, 0.25]
    assert share["x"]["names"] == {"0": "first", "1": "second", "2": "third"}


def test_names_of_ticks_may_be_numbers():
    figure = Figure()
    given, words, own = figure.subplots(1, 3)
    given.plot([0, 1, 2], [3, 2, 1], label="a")
    given.set_xticks([0, 1, 2], ["512", "128", "16"])
    words.plot(["10", "50"], [1, 2], label="b")
    own.plot([0, 1, 2], [3, 2, 1], label="c")
    assert [chart["x"]["names"] for chart in pages.charts_of(figure)] == [
        {"0": "512", "1": "128", "2": "16"},
        {"0": "10", "1": "50"},
        {},
    ]


def test_a_figure_with_more_than_lines_and_bars_stays_a_picture():
    figure = Figure()
    one, two = figure.subplots(1, 2)
    one.plot([1, 2], [1, 2], label="line")
    two.imshow([[1, 2], [3, 4]])
    assert pages.charts_of(figure) == []


def test_a_chart_shows_values_hides_series_and_changes_its_axes(tmp_path):
    template, path = tmp_path / "page.html.j2", tmp_path / "page.html"
    template.write_text(TEMPLATE)
    pages.write_page(path, template, title="Charts", address=pages.plot_address(lines()))
    assert "<img" in path.read_text()  # for readers without scripts
    with chromium() as browser:
        for width, scheme in ((1000, "light"), (360, "dark")):
            with watched_page(browser, viewport={"width": width, "height": 700}, color_scheme=scheme) as page:
                page.goto(Path(path).as_uri())
                page.wait_for_selector(".chart svg[role=img]")
                assert page.locator("img").count() == 0
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                screenshot(page, f"charts-{width}-{scheme}")
        with watched_page(browser, viewport={"width": 1000, "height": 700}) as page:
            page.goto(Path(path).as_uri())
            chart = page.locator(".chart").first
            box = chart.locator(".chart-plot > svg").bounding_box()
            page.mouse.move(box["x"] + box["width"] - 25, box["y"] + 60)
            assert chart.locator(".chart-tip").inner_text().split("\n") == [
                "tokens 100",
                "measured </script>: 210",
                "theory: 200",
            ]
            chart.locator(".chart-legend button").nth(1).click()
            assert chart.locator(".chart-legend button").nth(1).get_attribute("aria-pressed") == "false"
            page.mouse.move(box["x"] + 60, box["y"] + 60)
            assert "theory" not in chart.locator(".chart-tip").inner_text()
            before = chart.locator("path").first.get_attribute("d")
            chart.locator("button[data-axis=y]").click()
            assert chart.locator("button[data-axis=y]").inner_text() == "y: linear"
            assert chart.locator("path").first.get_attribute("d") != before
            chart.locator(".chart-plot > svg").focus()
            page.keyboard.press("ArrowRight")
            assert chart.locator(".chart-tip").is_visible()
