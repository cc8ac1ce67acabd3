"""Answers that are written together are those that are written alone, for every kind of model."""

import pytest

pytest.importorskip("starlette")

import asyncio

import torch

from serve_support import naive, run_all, run_job, served, service, text_of

MODELS = [
    ("llama", "softmax"),
    ("llama", "nearfar"),
    ("gemma3", "softmax"),
    ("gemma3", "nearfar"),
    ("gpt2", "softmax"),
    ("qwen3_next", "softmax"),
    ("mamba2", "softmax"),
    ("falcon_h1", "softmax"),
    ("qwen3_next", "attached"),
    ("mamba2", "attached"),
    ("falcon_h1", "nearfar"),
]
TEXTS = [text_of(0, 120), text_of(1, 7), text_of(2, 64)]


@pytest.mark.parametrize(("family", "kernel"), MODELS)
def test_answers_together_are_the_answers_alone(family, kernel):
    """In float64, where rounding decides nothing, and against forward passes without a cache."""
    model = served(family, kernel)
    assert model.batches
    together = run_all(service(model), *(lambda made, text=text: run_job(made, text) for text in TEXTS))
    for text, found in zip(TEXTS, together, strict=True):
        (alone,) = run_all(service(model), lambda made, text=text: run_job(made, text))
        assert found.texts == alone.texts
        expected = naive(model, service(model).prompts.text(text).tokens, 12)
        assert [token for token, _ in found.scores[0]] == [token for token, _ in expected if token not in model.eos]
        torch.testing.assert_close(
            torch.tensor([score for _, score in found.scores[0]]),
            torch.tensor([score for token, score in expected if token not in model.eos]),
            rtol=1e-4,  # the recurrent layers of transformers compute in float32 whatever the model is
            atol=1e-4,
        )
    assert len({token for found in together for token, _ in found.scores[0]}) > 2


@pytest.mark.parametrize("kernel", ["softmax", "nearfar"])
def test_reproducible_answers_are_equal_to_the_last_bit(kernel):
    """In float32: beside others, after others, and from stored states."""
    try:
        model = served("llama", kernel, torch.float32, reproducible_rows=True)
    except ValueError as error:
        pytest.skip(str(error))
    texts = [*TEXTS, TEXTS[0], TEXTS[0] + text_of(9, 40)]
    made = service(model, reproducible=True)
    made.start()
    try:

        async def rounds():
            first = await asyncio.gather(*(run_job(made, text) for text in texts))
            return first, await asyncio.gather(*(run_job(made, text) for text in reversed(texts)))

        first, second = asyncio.run(rounds())
    finally:
        made.stop()
    assert any(found.cached for found in second)
    for text, one, two in zip(texts, first, reversed(second), strict=True):
        (alone,) = run_all(service(model, reproducible=True), lambda made, text=text: run_job(made, text))
        assert one.scores == alone.scores
        assert two.scores == alone.scores


def test_sampled_answers_depend_on_their_seed_alone():
    model = served()
    options = {"temperature": 1.3, "top_p": 0.9, "seed": 5}
    alone, *_ = run_all(service(model), lambda made: run_job(made, TEXTS[0], answers=3, **options))
    beside, *_ = run_all(
        service(model),
        lambda made: run_job(made, TEXTS[0], answers=3, **options),
        lambda made: run_job(made, TEXTS[1], temperature=2.0),
        lambda made: run_job(made, TEXTS[2]),
    )
    assert beside.texts == alone.texts
    assert len(set(alone.texts.values())) == 3
