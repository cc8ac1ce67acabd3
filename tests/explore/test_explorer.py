"""The explorer in a real Chromium: its controls do what they say, and it fits, opens and answers quickly."""

import json

import pytest
import torch

pytest.importorskip("jinja2")

from browser_support import screenshot, watched_page
from explorer_support import GAUSSIAN, LETTERS, numbers, show, wait
from linattn.explore.page import explorer_page, sample_heads


def test_sliders_change_what_they_should(explorer):
    start = show(explorer, f"{GAUSSIAN}&kernel=positive&features=16")
    explorer.locator("#c-features").press("ArrowRight")
    wait(explorer)
    more = numbers(explorer)
    assert explorer.evaluate("linattn.settings.features") == 32
    assert "features=32" in more["code"]
    assert "features=32" in explorer.url
    assert torch.equal(start["exact"], more["exact"])
    assert not torch.equal(start["implied"], more["implied"])
    explorer.locator("#c-norm").press("ArrowLeft")
    wait(explorer)
    assert not torch.equal(start["exact"], numbers(explorer)["exact"])
    explorer.locator("#c-kernel").select_option("nearfar")
    wait(explorer)
    assert explorer.locator("#c-window").is_visible()
    assert not explorer.locator("#c-features").is_visible()
    before = numbers(explorer)["implied"]
    explorer.locator("#c-slots").press("ArrowRight")
    wait(explorer)
    assert not torch.equal(before, numbers(explorer)["implied"])
    explorer.locator("#c-source").select_option("letters")
    explorer.locator("#c-text").fill("hello there")
    wait(explorer)
    assert numbers(explorer)["n"] == 11
    assert explorer.locator("#tokens span").count() == 11


def test_pointing_at_a_cell_and_a_token_shows_its_numbers(explorer):
    found = show(explorer, f"{LETTERS}&kernel=elu")
    explorer.locator("#map-exact").scroll_into_view_if_needed()
    box = explorer.locator("#map-exact").bounding_box()
    explorer.mouse.move(box["x"] + box["width"] * 4.5 / 37, box["y"] + box["height"] * 20.5 / 37)
    tip = explorer.text_content("#tip")
    assert "query 21" in tip
    assert "key 5" in tip
    exact = float(tip.partition("exact weight")[2].split()[0].partition("elu")[0])
    assert exact == pytest.approx(found["exact"][20, 4].item(), rel=5e-3)
    explorer.locator("#tokens span").nth(7).hover()
    assert "Query 8 " in explorer.text_content("#row-note")
    explorer.locator("#map-implied").focus()
    explorer.keyboard.press("ArrowDown")
    explorer.keyboard.press("ArrowRight")
    assert explorer.evaluate("[linattn.row, linattn.column]") == [8, 8]


def test_all_heads_of_a_layer_stand_beside_each_other(explorer):
    """Each with the error that the page shows when the head is chosen."""
    show(explorer, "source=head&layer=5&head=6&kernel=elu")
    explorer.wait_for_function("document.querySelectorAll('#heads button[aria-label]').length === 9")
    said = explorer.locator("#heads button").nth(3).get_attribute("aria-label")
    explorer.locator("#heads button").nth(3).click()
    wait(explorer)
    assert explorer.evaluate("linattn.settings.head") == 3
    assert said.startswith(f"head 3: error {explorer.locator('#figures b').first.text_content().split()[0]}, plain")
    assert explorer.locator("#heads button[aria-pressed=true]").get_attribute("data-head") == "3"
    show(explorer, GAUSSIAN)
    assert not explorer.locator("#heads").is_visible()


def test_the_wheel_scrolls_the_page_until_a_map_is_chosen(explorer):
    show(explorer, f"{GAUSSIAN}&kernel=elu")
    explorer.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    map_ = explorer.locator("#map-exact")

    def near_the_corner():
        box = map_.bounding_box()
        explorer.mouse.move(box["x"] + 20, box["y"] + 20)
        return explorer.text_content("#tip")

    whole = near_the_corner()
    map_.hover()
    explorer.mouse.wheel(0, 120)
    explorer.wait_for_function("scrollY > 0")
    place = explorer.evaluate("scrollY")
    assert near_the_corner() == whole
    map_.click()
    explorer.mouse.wheel(0, -240)
    explorer.wait_for_function("new Promise(resolve => requestAnimationFrame(() => resolve(true)))")
    assert near_the_corner() != whole
    assert explorer.evaluate("scrollY") == place
    explorer.keyboard.press("0")
    assert near_the_corner() == whole


def test_the_state_plays_steps_and_says_its_mathematics(explorer):
    show(explorer, f"{GAUSSIAN}&kernel=positive&features=16&at=3")
    explorer.locator("#next").click()
    explorer.wait_for_function("document.getElementById('at-name').textContent.startsWith('token 5 of 50')")
    assert "φ(q)" in explorer.text_content("#maths")
    assert "at=4" in explorer.url
    explorer.locator("#h-state").click()
    explorer.keyboard.press(",")
    explorer.wait_for_function("document.getElementById('at-name').textContent.startsWith('token 4 of 50')")
    explorer.locator("#play").click()
    explorer.wait_for_function("Number(document.getElementById('at').value) > 5")
    explorer.locator("#play").click()
    stopped = explorer.input_value("#at")
    explorer.wait_for_timeout(300)
    assert explorer.input_value("#at") == stopped


def test_the_link_brings_the_same_page_back(explorer, browser, saved):
    found = show(explorer, f"{LETTERS}&kernel=positive&features=8&seed=4&row=9&theme=dark&scale=log")
    with watched_page(browser) as page:
        page.goto(explorer.url)
        wait(page)
        again = numbers(page)
        assert torch.equal(again["implied"], found["implied"])
        assert page.evaluate("linattn.row") == 9
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.goto(
            f"{saved.as_uri()}#kernel=nonsense&n=1e99&features=-3&dim=x&text=%F0%9F%98%80%3C/script%3E&source=letters"
        )
        page.reload()
        wait(page)
        assert page.evaluate("linattn.settings.kernel") == "positive"


@pytest.mark.parametrize(
    ("name", "width", "scheme"), [("light", 1280, "light"), ("dark", 1280, "dark"), ("phone", 390, "light")]
)
def test_it_is_small_and_fits(browser, saved, name, width, scheme):
    """No sideways scrolling, both themes, and a screenshot to look at."""
    assert saved.stat().st_size < 3e6
    with watched_page(browser, viewport={"width": width, "height": 844}, color_scheme=scheme) as page:
        page.goto(saved.as_uri() + "#kernel=nearfar")
        wait(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(int(x) for x in paper[4:-1].split(",")) < 200) == (scheme == "dark")
        assert page.locator("main svg[role=img]").count() == 2
        assert screenshot(page, f"explorer-{name}").stat().st_size > 30_000


def test_2048_tokens_keep_the_page_responsive(explorer):
    """The page keeps answering while the worker computes 2048 x 2048 weights twice, and shows what is pointed at."""
    script = """link => new Promise(resolve => { linattn.busy = true; location.hash = link; let turns = 0; const done = () => {
      turns++; if (linattn.busy || linattn.shown.data.n !== 2048) {
        if (linattn.data.n ** 2 !== linattn.result.exact.length) resolve(-1); // the former page until all is there
        setTimeout(done, 10); } else resolve(turns); };
      setTimeout(done, 50); })"""
    turns = explorer.evaluate(script, "source=gaussian&n=2048&dim=16&kernel=positive&features=64")
    assert turns > 5  # one or two if the page computed it itself
    assert explorer.evaluate("linattn.result.exact.length") == 2048**2
    explorer.locator("#map-exact").scroll_into_view_if_needed()
    box = explorer.locator("#map-exact").bounding_box()
    explorer.mouse.move(box["x"] + 150, box["y"] + 200)
    tip = explorer.text_content("#tip")
    for i in range(10):
        explorer.mouse.move(box["x"] + 100 - i, box["y"] + 210 + i)
    assert explorer.text_content("#tip") != tip


def test_the_heads_of_an_encoder_look_both_ways(browser, tmp_path):
    path = tmp_path / "encoder.html"
    path.write_text(explorer_page(heads={**sample_heads(), "causal": False}), encoding="utf-8")
    with watched_page(browser) as page:
        page.goto(path.as_uri())
        wait(page)
        assert numbers(page)["exact"][0].count_nonzero() > 1
        page.locator("#c-causal").check()
        wait(page)
        page.reload()
        wait(page)
        assert numbers(page)["exact"][0].count_nonzero() == 1


def test_a_text_cannot_end_the_data():
    heads = {**sample_heads(), "text": "</script><script>alert(1)</script>"}
    page = explorer_page(heads=heads)
    assert "<script>alert" not in page
    start = page.index('id="data">') + len('id="data">')
    assert json.loads(page[start : page.index("</script>", start)])["heads"]["text"] == heads["text"]
