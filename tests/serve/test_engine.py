"""The engine: prompts share what is read, short ones do not wait for long ones, and nothing runs for clients that left."""

import asyncio
import time

import pytest

pytest.importorskip("starlette")

from linattn.serve.errors import ApiError
from linattn.serve.limits import Limits
from linattn.serve.sampling import SamplingOptions
from serve_support import run_all, run_job, served, service, text_of

MODEL = {}


def model(kernel="softmax"):
    return MODEL.setdefault(kernel, served(kernel=kernel))


def running(made, main):
    made.start()
    try:
        return asyncio.run(main())
    finally:
        made.stop()


@pytest.mark.parametrize("family", ["softmax", "nearfar", "qwen3_next"])
def test_a_prompt_starts_from_the_longest_stored_prefix(family):
    served_model = served("qwen3_next") if family == "qwen3_next" else model(family)
    made, text = service(served_model), text_of(0, 400)

    async def main():
        first = await run_job(made, text)
        again = await run_job(made, text)
        longer = await run_job(made, text + text_of(5, 30))
        earlier = await run_job(made, text[:300] + text_of(6, 30))
        return first, again, longer, earlier

    first, again, longer, earlier = running(made, main)
    assert (first.cached, again.cached, longer.cached) == (0, 400, 400)
    assert earlier.cached in (192, 256)  # an anchor, every 64 tokens, that is left after thinning
    assert again.texts == first.texts
    fresh = service(served_model)
    expected = run_all(fresh, lambda made: run_job(made, text + text_of(5, 30)))[0]
    assert longer.texts == expected.texts
    other = service(served_model)
    expected = run_all(other, lambda made: run_job(made, text[:300] + text_of(6, 30)))[0]
    assert earlier.texts == expected.texts


def test_prompts_that_arrive_together_share_what_is_read():
    made, text = service(model()), text_of(0, 640)
    run_all(made, *[lambda made: run_job(made, text)] * 4)
    read = made.metrics.registry.get_sample_value("linattn_prompt_tokens_read_total")
    assert read < 1.4 * 640


def test_forks_of_a_prompt_do_not_disturb_each_other():
    """n answers, then the prompt again, then others behind it: keys are shared until two of them differ."""
    made, text = service(model()), text_of(1, 100)

    async def main():
        many = await run_job(made, text, answers=4, temperature=1.5, seed=3)
        plain = await run_job(made, text)
        return many, plain, await asyncio.gather(*(run_job(made, text + c) for c in "abcdef"))

    many, plain, behind = running(made, main)
    assert len(set(many.texts.values())) == 4
    fresh = service(model())
    assert run_all(fresh, lambda made: run_job(made, text))[0].texts == plain.texts
    for c, found in zip("abcdef", behind, strict=True):
        fresh = service(model())
        assert run_all(fresh, lambda made, c=c: run_job(made, text + c))[0].texts == found.texts


def test_a_short_prompt_does_not_wait_for_a_long_one():
    made = service(model("nearfar"))

    async def main():
        long = asyncio.ensure_future(run_job(made, text_of(0, 3000), max_tokens=1))
        await asyncio.sleep(0.05)
        short = await run_job(made, text_of(1, 20), max_tokens=3)
        left = not long.done()
        await long
        return short, left

    short, left = running(made, main)
    assert left
    assert short.texts[0]


def test_a_job_whose_client_left_is_dropped():
    made = service(model())

    async def main():
        prompt = made.prompts.text(text_of(0, 3000))
        events = made.run([prompt], SamplingOptions(max_tokens=64), 2)
        await anext(events)
        assert made.engine.load == 1
        await events.aclose()
        end = time.monotonic() + 20
        while made.engine.load and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return made.engine.load

    assert running(made, main) == 0
    assert made.metrics.registry.get_sample_value("linattn_cancelled_total") == 1


def test_limits_of_time_and_load():
    slow = Limits(max_tokens=64, max_concurrent=4, timeout=0.05, context=4096)
    with pytest.raises(ApiError, match="--timeout") as caught:
        run_all(service(model(), limits=slow), lambda made: run_job(made, text_of(0, 3000)))
    assert caught.value.status == 504
    none = Limits(max_tokens=64, max_concurrent=1, max_queue=0, context=4096)
    made = service(model(), limits=none, rows=1)
    results = []

    async def main():
        async def one():
            try:
                results.append(await run_job(made, text_of(0, 500)))
            except ApiError as error:
                results.append(error.status)

        await asyncio.gather(*(one() for _ in range(3)))

    running(made, main)
    assert results.count(429) == 2


def test_a_step_that_fails_ends_its_jobs_and_not_the_server():
    made = service(model())
    step, calls = made.model.step, []

    def broken(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return step(*args)

    made.model.step = broken

    async def main():
        with pytest.raises(ApiError, match="the model failed: RuntimeError"):
            await run_job(made, text_of(0, 50))
        return await run_job(made, text_of(0, 50))

    try:
        after = running(made, main)
    finally:
        made.model.step = step
    expected = run_all(service(model()), lambda made: run_job(made, text_of(0, 50)))[0]
    assert after.texts == expected.texts


def test_an_answer_without_numbers_fails_alone():
    made = service(model())
    read, text = made.model.read, text_of(0, 50)

    def broken(cache, ids, position):
        logits = read(cache, ids, position)
        return logits * float("nan") if len(ids) < 10 else logits

    made.model.read = broken

    async def main():
        whole, *wrong = await asyncio.gather(
            run_job(made, text), *(run_job(made, "short", answers=n) for n in (1, 2)), return_exceptions=True
        )
        return whole, wrong, made.engine.load

    try:
        whole, wrong, load = running(made, main)
    finally:
        made.model.read = read
    assert ["logits are not finite" in str(error) for error in wrong] == [True, True]
    assert load == 0
    assert whole.texts == run_all(service(model()), lambda made: run_job(made, text))[0].texts


@pytest.mark.parametrize(("name", "answers"), [("compact", 0), ("fork", 3)])
def test_a_failure_at_the_end_of_a_prompt_is_told(name, answers, monkeypatch):
    """As when there is no memory for the copies of its state."""
    made = service(model())
    monkeypatch.setattr(made.engine, "_keep", lambda *_, **__: None)

    def broken(_):
        raise MemoryError

    monkeypatch.setattr(f"linattn.serve.engine.caches.{name}", broken)

    async def main():
        with pytest.raises(ApiError, match="the model failed: MemoryError"):
            await asyncio.wait_for(run_job(made, "text", answers=answers), 10)

    running(made, main)


def test_an_answer_whose_state_cannot_be_stored_is_whole(monkeypatch):
    made = service(model())
    monkeypatch.setattr(made.engine, "_comes_back", lambda _: 1 / 0)
    found = running(made, lambda: asyncio.wait_for(run_job(made, text_of(0, 50)), 10))
    assert found.texts == run_all(service(model()), lambda made: run_job(made, text_of(0, 50)))[0].texts


def test_stop_texts_lengths_and_the_end_token():
    made = service(model())
    plain = run_all(made, lambda made: run_job(made, text_of(3, 40), max_tokens=30))[0]
    assert plain.finish[0] == "length"
    text = plain.texts[0]
    stop = text[10:12]
    stopped = run_all(service(model()), lambda made: run_job(made, text_of(3, 40), max_tokens=30, stop=(stop,)))[0]
    assert stopped.texts[0] == text[: text.index(stop)]
    assert stopped.finish[0] == "stop"
    ending = service(model())
    ending.model.eos = frozenset({plain.scores[0][5][0]})
    first = next(i for i, (token, _) in enumerate(plain.scores[0]) if token in ending.model.eos)
    try:
        ended = run_all(ending, lambda made: run_job(made, text_of(3, 40), max_tokens=30))[0]
    finally:
        ending.model.eos = frozenset({0})
    assert ended.finish[0] == "stop"
    assert len(ended.scores[0]) == first
