"""The page of `linattn compare --html`: its structure, and plots whose labels stay apart."""

import itertools
import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg

from linattn import pages
from linattn.measure import plots
from linattn.measure.compare import Comparison, Row
from linattn.measure.comparison_page import columns, comparison_page

SETTING = {"batch": 1, "heads": 2, "dim": 16, "causal": False, "backward": False, "spread": 1.0}
MACHINE = {"torch": "2.0", "processor": "<a processor>", "threads": 2}
ERRORS = {"elu": 0.77, "positive": 4.66, "near/far": 2.6e-7}


def comparison(lengths=(256, 512, 1024, 2048), engines=("torch", "native"), errors=ERRORS, peak=2**20, seconds=1e-6):
    """A comparison as if measured: softmax grows quadratically, the kernels linearly."""
    result = Comparison(MACHINE, SETTING)
    for n in lengths:
        result.softmax.append(Row("softmax", "torch SDPA", n, seconds * n**2, 1.0, peak))
        for i, kernel in enumerate(errors):
            for engine in engines:
                time = 300 * seconds * n * (i + 1)
                error = (errors[kernel], 0.79, 0.1) if n <= 2048 else ()
                result.rows.append(Row(kernel, engine, n, time, seconds * n**2 / time, peak and peak + n, *error))
    return result


class Outline(HTMLParser):
    """Which elements stand in which."""

    VOID = ("meta", "img", "source", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.unclosed = [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), list(self.open)))
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def all(self, tag):
        return [(attributes, around) for name, attributes, around in self.found if name == tag]


def classes(around):
    return [attributes.get("class") for _, attributes in around]


@pytest.fixture(scope="module")
def text():
    return comparison_page(comparison())


def test_the_page_is_well_formed_and_fits_a_phone(text):
    outline = Outline(text)
    assert outline.open == []
    assert ({"name": "viewport", "content": "width=device-width, initial-scale=1"}) in [
        a for a, _ in outline.all("meta")
    ]
    assert len(outline.all("table")) == 2
    assert all(
        "scroll" in classes(around) for _, around in outline.all("table")
    )  # scrolls by itself, the page does not
    assert ".scroll { overflow-x: auto;" in text
    assert "img { max-width: 100%;" in text
    assert "&lt;a processor&gt;" in text
    assert "http" not in text


def test_every_plot_has_a_dark_twin(text):
    outline = Outline(text)
    sources = outline.all("source")
    assert [a["media"] for a, _ in sources] == ["(prefers-color-scheme: dark)"] * 3
    images = [a for a, around in outline.all("img") if around[-1][0] == "picture"]
    assert len(images) == 3
    for (dark, _), light in zip(sources, images, strict=True):
        assert dark["srcset"].startswith("data:image/png;base64,")
        assert dark["srcset"] != light["src"]
        assert light["alt"]
    assert "text.color" in pages.DARK
    assert rcParams["text.color"] != pages.DARK["text.color"]  # drawing left matplotlib's own settings alone


def test_numbers_stand_beside_their_bars(text):
    outline = Outline(text)
    assert [around[-1][1].get("class") for _, around in outline.all("output")] == ["bars"] * 3  # not on the track
    assert re.findall(r"<output>(.*?)</output>", text) == ["0.77", "4.66", "2.6e-07"]
    widths = [float(x) for x in re.findall(r'<div style="width:([\d.]+)%', text)]
    assert widths == pytest.approx([100 * 0.77 / 4.66, 100, 0], abs=0.1)
    assert {float(x) for x in re.findall(r'<i style="left:([\d.]+)%', text)} == {17.0}


def test_an_error_beyond_the_scale_is_marked():
    text = comparison_page(comparison(errors={"elu": 0.77, "relu": 110.0}))
    assert "<output>110 &rarr;</output>" in text
    assert "The scale ends at 6.32; bars with an arrow go on." in text
    assert max(float(x) for x in re.findall(r'<div style="width:([\d.]+)%', text)) == 100


def test_lengths_without_errors_and_systems_without_memory_make_a_page():
    text = comparison_page(comparison(lengths=(4096, 8192), peak=None))
    assert "<output>" not in text
    assert "peak extra memory" not in text
    assert len(Outline(text).all("picture")) == 2


@pytest.mark.parametrize("count", range(1, 11))
def test_no_map_is_left_alone_in_its_row(count):
    for choices in ((5, 4, 6), (3, 2, 4)):
        assert columns(count, choices) in choices
        assert count == 1 or count % columns(count, choices) != 1


def test_maps_are_square_pictures_of_the_matrices(text):
    outline = Outline(text)
    maps = [(a, around) for a, around in outline.all("img") if "maps" in classes(around)]
    assert len(maps) == 4
    assert all(around[-1][0] == "figure" for _, around in maps)


LENGTHS = [
    (256, 512, 1024, 2048, 4096, 8192, 16384),
    (256, 512, 1024, 2048, 4096, 8192),
    (600, 700, 1024),
    (1000, 1010, 1020, 1030, 64000),
    (1024, 65536),
    (131072, 262144, 524288, 1048576),
    (64,),
]


@pytest.mark.parametrize(
    ("lengths", "seconds"),
    [*zip(LENGTHS, [1e-9, 1e-6, 1e-3] * 3, strict=False), (LENGTHS[0], 1e-3), (LENGTHS[4], 1e-9)],
)
def test_tick_labels_do_not_touch(lengths, seconds):
    result = comparison(lengths, seconds=seconds)
    for figure in (plots.growth(result), *(plots.panel(result, measure) for measure in plots.measures(result))):
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        whole = figure.bbox
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                labels = [*axis.get_majorticklabels(), *axis.get_minorticklabels()]
                low, high = sorted(axis.get_view_interval())
                places = [*axis.get_majorticklocs(), *axis.get_minorticklocs()]
                shown = [x for x, at in zip(labels, places, strict=True) if x.get_text() and low <= at <= high]
                boxes = [label.get_window_extent(renderer) for label in shown]
                assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2)), [
                    x.get_text() for x in shown
                ]
                assert all(
                    whole.x0 <= b.x0 and b.x1 <= whole.x1 and whole.y0 <= b.y0 and b.y1 <= whole.y1 for b in boxes
                )
            assert any(label.get_text() for label in axes.get_xticklabels())


def test_ticks_are_at_measured_lengths():
    assert plots.tick_places(LENGTHS[0]) == [256, 1024, 4096, 16384]
    assert plots.tick_places(LENGTHS[1]) == list(LENGTHS[1])
    assert plots.tick_places(LENGTHS[3])[-1] == 64000
    assert plots.tick_places([64]) == [64]
    assert plots.tick_places([]) == []
