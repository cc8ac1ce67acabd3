"""From the attention of tokens to the page of words."""

import shutil
import subprocess

import pytest
import torch

from linattn_lab.summarize import attention_page
from linattn_lab.summarize.documents import Document
from linattn_lab.summarize.summarizer import Explanation

EXPLAINED = Explanation(
    summary="terminal tool",
    output=["termin", "al", "tool"],
    source=[(0, 1), (1, 7), (7, 10), (10, 11)],
    attention=torch.tensor([[0.1, 0.6, 0.3, 0.0], [0.1, 0.4, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]]),
    copy=torch.tensor([0.5, 1.0, 0.0]),
)


SOURCE = Document("x", "A termi</b>.")


def test_tokens_are_gathered_into_words():
    first, second = attention_page.looks(EXPLAINED, SOURCE.text)
    assert (first.text, first.copy, second.text, second.copy) == ("terminal", 0.75, "tool", 0.0)
    assert first.words == pytest.approx({0: 0.1, 1: 0.9})
    assert second.words == {0: 1.0}


def test_half_characters_stay_with_their_word():
    assert attention_page.output_words("über x", ["\ufffd", "\ufffd", "ber", "x"]) == [("über", [0, 1, 2]), ("x", [3])]


def test_the_page_escapes_its_texts_and_its_script_is_sound(tmp_path):
    attention_page.draw(EXPLAINED, SOURCE, tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert "<span>A</span> <span>termi&lt;/b&gt;.</span>" in page
    script = page.partition("<script>")[2].partition("</script>")[0]
    assert '"text": "terminal"' in script
    if shutil.which("node"):
        done = subprocess.run(["node", "--check", "-"], input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
