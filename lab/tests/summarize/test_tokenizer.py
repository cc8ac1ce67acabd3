"""The vocabulary."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn_lab.summarize.tokenizer import Tokens

VOCABULARY = Tokens.train(["A terminal multiplexer.\nA thing, the <end> of it."] * 4, 300)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r")))
def test_every_text_comes_back(text):
    text = "\n".join(line.strip() for line in text.strip().split("\n"))
    numbers, spans = VOCABULARY.offsets(text)
    assert VOCABULARY.decode(numbers) == text
    assert VOCABULARY.encode_many([text]) == [numbers] == [VOCABULARY.encode(text)]
    assert all(0 <= start <= end <= len(text) for start, end in spans)
    assert min(numbers, default=3) >= 3


def test_a_word_is_the_same_token_wherever_it_stands():
    first, middle, line = (VOCABULARY.encode(text) for text in ("thing", "A thing", "A\nthing"))
    assert first == middle[-len(first) :] == line[-len(first) :]


def test_a_vocabulary_is_saved_and_learned_alike(tmp_path):
    VOCABULARY.save(tmp_path / "tokens.json")
    assert Tokens.load(tmp_path / "tokens.json").to_json() == VOCABULARY.to_json()
    again = Tokens.train(["A terminal multiplexer.\nA thing, the <end> of it."] * 4, 300)
    assert again.to_json() == VOCABULARY.to_json()
    assert (VOCABULARY.pad, VOCABULARY.start, VOCABULARY.end) == (0, 1, 2)
    with pytest.raises(ValueError, match="256 bytes"):
        Tokens.train(["x"], 100)
