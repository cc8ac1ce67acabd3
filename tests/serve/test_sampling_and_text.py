"""Tokens are drawn and shown as a readable twin does it."""

import pytest

pytest.importorskip("starlette")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn.serve.answers import ChatForm, CompletionForm, Usage
from linattn.serve.jobs import Delta
from linattn.serve.prompts import PromptError, Prompts
from linattn.serve.sampling import Choice, NotFiniteError, Sampler, SamplingOptions
from linattn.serve.text import TextStream
from serve_support import spaced_tokenizer, tokenizer

TOKENIZER = tokenizer()


def test_the_likeliest_token_and_log_probabilities():
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    found = Sampler(SamplingOptions(1, temperature=0, top_logprobs=3)).choose(logits)
    assert found.token == int(logits.argmax())
    assert found.logprob == pytest.approx(float(logits.log_softmax(-1)[found.token]))
    assert [token for token, _ in found.top] == logits.topk(3).indices.tolist()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.5, 0.7), (1.0, 0.01)])
def test_tokens_are_drawn_with_their_probabilities(temperature, top_p):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    weights = (logits / temperature).softmax(-1).tolist()
    order = sorted(range(6), key=lambda i: -weights[i])
    kept, total = [], 0.0
    for i in order:
        kept.append(i)
        total += weights[i]
        if total >= top_p:
            break
    expected = torch.tensor([weights[i] / total if i in kept else 0.0 for i in range(6)])
    sampler = Sampler(SamplingOptions(1, temperature=temperature, top_p=top_p, seed=0))
    counts = torch.bincount(torch.tensor([sampler.choose(logits).token for _ in range(4000)]), minlength=6)
    assert (counts / 4000 - expected).abs().max() < 0.03
    assert counts[expected == 0].sum() == 0


@pytest.mark.parametrize("top_p", [1.0, 0.5, 5e-324])
@pytest.mark.parametrize("temperature", [1e-6, 1e-308, 5e-324])
def test_the_lower_the_temperature_the_likelier_the_token(temperature, top_p):
    sampler = Sampler(SamplingOptions(1, temperature=temperature, top_p=top_p, seed=0))
    assert {sampler.choose(torch.tensor([1.0, 3.0, 2.5, -1.0])).token for _ in range(5)} == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_no_token_is_chosen_from_what_is_no_number(wrong, temperature):
    sampler = Sampler(SamplingOptions(1, temperature=temperature, seed=0))
    with pytest.raises(NotFiniteError, match="the model's logits are not finite"):
        sampler.choose(torch.tensor([1.0, wrong, 2.5]))


def scored(form, tokens):
    """The log-probabilities of an answer of these tokens, each with all of them as the likeliest."""
    top = tuple((token, -1.0 - i) for i, token in enumerate(tokens))
    form.add(Delta(0, "", tuple(Choice(token, -0.5, top) for token in tokens), "length"))
    return form.whole(1, Usage(1))["choices"][0]["logprobs"]


def test_parts_of_a_character_have_their_own_bytes_names_and_places():
    text = "a漢é!"
    tokens = TOKENIZER(text, add_special_tokens=False).input_ids
    chat = scored(ChatForm("x", "tiny", TOKENIZER), tokens)["content"]
    assert bytes(byte for entry in chat for byte in entry["bytes"]).decode() == text
    plain = scored(CompletionForm("x", "tiny", TOKENIZER), tokens)
    assert plain["tokens"][:2] == ["a", "bytes:\\xe6"]
    assert plain["text_offset"] == [0, 1, 1, 1, 2, 2, 3]
    assert list(plain["top_logprobs"][0].values()) == [-1.0 - i for i in range(7)]  # none hides another
    spaced = spaced_tokenizer()
    fallback = scored(ChatForm("x", "tiny", spaced), [3 + 0xC3, 3 + 0xA9])["content"]
    assert [entry["bytes"] for entry in fallback] == [[0xC3], [0xA9]]


def test_an_answer_keeps_the_space_between_it_and_the_text_before():
    spaced = spaced_tokenizer()
    stream = TextStream(spaced, before=spaced("Hello").input_ids)
    world = spaced.convert_tokens_to_ids("▁world")
    assert [stream.push(world), stream.push(world), stream.flush()] == [" world", " world", ""]
    assert TextStream(spaced).push(world) == "world"  # of a turn of its own
    prompts = Prompts(spaced)
    assert prompts.text("Hello").goes_on
    assert prompts.tail("Hello").goes_on
    assert not prompts.chat([{"role": "user", "content": "Hello"}]).goes_on
    half = TextStream(TOKENIZER, before=TOKENIZER("é", add_special_tokens=False).input_ids[:1])
    assert half.push(TOKENIZER("x", add_special_tokens=False).input_ids[0]) == "x"


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_text_comes_in_whole_characters_up_to_a_stop(text, stops):
    stops = [stop for stop in stops if "\ufffd" not in stop]
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    whole = TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    stream = TextStream(TOKENIZER, tuple(stops))
    shown = []
    for token in ids:
        shown.append(stream.push(token))
        if stream.stopped:
            break
    else:
        shown.append(stream.flush())
    ends = [whole.find(stop) for stop in stops if stop in whole]
    if "\ufffd" not in whole:
        # Of two stops, the one that is complete first ends the text; what is shown never goes beyond the earliest.
        assert "".join(shown) == (whole[: _first_complete(whole, stops)] if ends else whole)


def _first_complete(text, stops):
    end = min(text.find(stop) + len(stop) for stop in stops if stop in text)
    return min(text.find(stop) for stop in stops if stop in text[:end])


def test_a_conversation_behind_a_state_has_the_tokens_of_the_whole_one():
    prompts = Prompts(TOKENIZER)
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    more = [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go on"}]
    whole = prompts.chat([system, user, *more])
    before = prompts.read_messages([system, user])
    assert [*before.tokens, *prompts.continue_messages([system, user], more).tokens] == whole.tokens
    for boundary in whole.boundaries:
        assert TOKENIZER.decode(whole.tokens[:boundary]).endswith("<|end|>\n")
    assert len(whole.boundaries) == 4
    document = prompts.document("A long text.")
    tail = prompts.continue_document([{"role": "user", "content": "What?"}, *more])
    expected = prompts.chat([{"role": "user", "content": "A long text.\n\nWhat?"}, *more])
    assert [*document.tokens, *tail.tokens] == expected.tokens
    with pytest.raises(PromptError, match="must be the user's question"):
        prompts.continue_document([system])


def test_models_without_a_template_get_a_plain_one():
    plain = tokenizer()
    plain.chat_template = None
    found = Prompts(plain).chat([{"role": "user", "content": "Hi"}])
    assert plain.decode(found.tokens) == "User: Hi\nAssistant:"
    starts = spaced_tokenizer()  # and the token that begins a text, which a template would have
    message = {"role": "user", "content": "Hello"}
    prompts = Prompts(starts)
    for begun in (prompts.chat([message]), prompts.read_messages([message]), prompts.document("Hello")):
        assert begun.tokens[0] == starts.bos_token_id
        assert begun.tokens.count(starts.bos_token_id) == 1
    assert starts.bos_token_id not in prompts.continue_document([message]).tokens
    assert starts.bos_token_id not in prompts.continue_messages([message], [message]).tokens


def test_what_is_not_unicode_is_no_prompt():
    prompts = Prompts(TOKENIZER)
    message = {"role": "user", "content": "a \udcff"}
    for call in (
        lambda: prompts.text("a \udcff"),
        lambda: prompts.tail("\ud800"),
        lambda: prompts.document("\ud800"),
        lambda: prompts.chat([message]),
        lambda: prompts.continue_document([message]),
    ):
        with pytest.raises(PromptError, match="the text is not valid Unicode"):
            call()
