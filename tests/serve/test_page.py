"""The page in Debian's Chromium: chat, a document that is read, its state, live figures; light, dark, and on a phone."""

import os
import re
import shutil

import pytest

pytest.importorskip("playwright")

from playwright import sync_api

from serve_support import text_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser():
    arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield made
        made.close()


@pytest.fixture
def page(browser, server):
    """The page with the key of the server; it must not say anything in the console or load anything from elsewhere."""
    made = browser.new_page()
    said, asked = [], []
    made.on("console", lambda message: said.append(message.text))
    made.on("pageerror", lambda error: said.append(str(error)))
    made.on("request", lambda request: asked.append(request.url))
    made.goto(server.url)
    made.fill("#key", "secret")
    made.dispatch_event("#key", "change")
    sync_api.expect(made.locator("#process")).to_contain_text("MiB")
    yield made
    assert all(url.startswith(server.url) for url in asked)
    assert [line for line in said if not line.startswith("Failed to load resource")] == []  # refused requests
    made.close()


def send(page, text):
    page.fill("#question", text)
    page.press("#question", "Enter")
    page.wait_for_selector("#send:not([hidden])")


def test_a_chat(page):
    send(page, "Hello <b>you</b>")
    turns = page.locator(".turn")
    assert turns.count() == 2
    assert "Hello <b>you</b>" in turns.nth(0).inner_text()
    assert len(turns.nth(1).locator("span").inner_text()) > 0
    assert re.search(r"\d+ tokens before the answer", page.inner_text("#about"))
    assert page.locator("#error").is_hidden()
    send(page, "And more")
    assert turns.count() == 4
    page.click("#clear")
    assert turns.count() == 0


def test_a_document_is_read_with_a_progress_bar_and_asked_about(page):
    page.evaluate(
        """() => {
          window.seen = [];
          const bar = document.getElementById("bar");
          new MutationObserver(() => seen.push(bar.value)).observe(bar, { attributes: true });
        }"""
    )
    page.set_input_files("#file", {"name": "book.txt", "mimeType": "text/plain", "buffer": text_of(8, 3500).encode()})
    page.wait_for_selector("#states li")
    seen = page.evaluate("seen")
    assert len(set(seen)) > 3
    assert seen == sorted(seen)
    assert re.search(r"book\.txt\s+35\d\d tokens, [\d.]+ MiB", page.inner_text("#states"))
    assert page.locator("#states input").is_checked()
    send(page, "What?")
    assert re.search(r"35\d\d of them from a state", page.inner_text("#about"))
    page.click("#states button")
    page.wait_for_selector("#states li", state="detached")
    assert page.locator("#none").is_visible()


def test_a_document_can_be_dropped(page):
    page.evaluate(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["a text to drop"], "dropped.txt", { type: "text/plain" }));
          document.getElementById("drop").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
        }"""
    )
    page.wait_for_selector("#states li")
    assert "dropped.txt" in page.inner_text("#states")
    page.click("#states button")
    page.wait_for_selector("#states li", state="detached")


def test_errors_are_shown_and_nothing_is_lost(page):
    page.set_input_files("#file", {"name": "large.txt", "mimeType": "text/plain", "buffer": b"x" * 5000})
    page.wait_for_selector("#error:not([hidden])")
    assert "--context" in page.inner_text("#error")
    send(page, "Hello")
    assert page.locator("#error").is_hidden()


def test_light_dark_and_a_phone(page):
    send(page, "A rather long line that has to be broken: " + "x" * 300)
    for scheme in ("light", "dark"):
        for width in (1280, 360):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
            brightness = sum(map(int, re.findall(r"\d+", colour)[:3])) / 3
            assert (brightness > 128) == (scheme == "light")
            if folder := os.environ.get("LINATTN_SCREENSHOTS"):
                page.screenshot(path=f"{folder}/page-{scheme}-{width}.png", full_page=True)
