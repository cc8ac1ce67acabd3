"""OpenAI's own client against a running server process, and what the server refuses."""

import contextlib
import json
import signal
import time

import pytest

pytest.importorskip("openai")

import httpx
import openai

from cli_support import process
from serve_support import text_of

KEY = {"Authorization": "Bearer secret"}
DOCUMENT = text_of(0, 700)


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, headers=KEY, timeout=60) as made:
        yield made


def ask(client, content="Tell me.", **options):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    defaults = {"model": "tiny", "temperature": 0, "max_tokens": 20}
    return client.chat.completions.create(messages=messages, **{**defaults, **options})


def test_a_chat_whole_and_streamed(client):
    whole = ask(client, logprobs=True, top_logprobs=2)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 20 == len(whole.choices[0].logprobs.content)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 20
    first = whole.choices[0].logprobs.content[0]
    assert [top.logprob for top in first.top_logprobs] == sorted((t.logprob for t in first.top_logprobs), reverse=True)
    assert first.logprob == first.top_logprobs[0].logprob
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-2])
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens
    assert len({c.id for c in chunks}) == 1


def test_every_chunk_has_a_finish_reason_and_the_stream_ends_with_done(http):
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 3}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert all("finish_reason" in choice for chunk in chunks for choice in chunk["choices"])
    assert all("usage" not in chunk for chunk in chunks)


def test_several_answers_seeds_and_stops(client):
    options = {"n": 3, "temperature": 1.5, "seed": 7, "top_p": 0.9}
    many = ask(client, logprobs=True, **options)
    texts = [choice.message.content for choice in many.choices]
    assert len(set(texts)) == 3
    assert [c.message.content for c in ask(client, **options).choices] == texts
    shown = [len(choice.logprobs.content) for choice in many.choices]
    ended = [choice.finish_reason == "stop" for choice in many.choices]  # by the model's end token, which counts, too
    assert [count < 20 for count in shown] == ended
    assert many.usage.completion_tokens == sum(shown) + sum(ended)
    text = ask(client).choices[0].message.content
    stop = next(c for c in text[3:] if c.isprintable() and c != " ")
    stopped = ask(client, stop=[stop, "never there"]).choices[0]
    assert stopped.message.content == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_completions_of_texts_and_tokens(client):
    options = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    both = client.completions.create(prompt=["one text", "another"], logprobs=2, **options)
    alone = [client.completions.create(prompt=text, **options).choices[0].text for text in ("one text", "another")]
    assert [choice.text for choice in both.choices] == alone
    assert [choice.index for choice in both.choices] == [0, 1]
    assert len(both.choices[0].logprobs.tokens) == 8
    chunks = list(client.completions.create(prompt=["one text", "another"], stream=True, **options))
    for i in (0, 1):
        assert "".join(c.choices[0].text for c in chunks if c.choices[0].index == i) == alone[i]
    tokens = client.completions.create(prompt=[[5, 6, 7], [8, 9]], **options)
    assert tokens.usage.prompt_tokens == 5


def test_a_conversation_continues_from_its_state(client):
    history = [{"role": "user", "content": DOCUMENT[:300]}]
    first = client.chat.completions.create(model="tiny", messages=history, temperature=0, max_tokens=5)
    history += [first.choices[0].message, {"role": "user", "content": "more"}]  # as it was received
    second = client.chat.completions.create(model="tiny", messages=history, temperature=0, max_tokens=5)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_a_document_is_read_once(http, client):
    made = http.post("/v1/states", json={"text": DOCUMENT, "name": "a book"})
    assert made.status_code == 201
    state = made.json()
    assert state["tokens"] >= 700
    assert state["bytes"] > 1000
    assert state["saved"]
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 9}
    question = [{"role": "user", "content": "What?"}]
    whole = [{"role": "user", "content": DOCUMENT + "\n\nWhat?"}]
    behind = client.chat.completions.create(messages=question, extra_body={"state": state["id"]}, **asked)
    plain = client.chat.completions.create(messages=whole, **asked)
    assert behind.choices[0].message.content == plain.choices[0].message.content
    assert behind.usage.prompt_tokens == plain.usage.prompt_tokens
    assert behind.usage.prompt_tokens_details.cached_tokens == state["tokens"]
    listed = http.get("/v1/states").json()["data"]
    assert state["id"] in [found["id"] for found in listed]
    assert DOCUMENT[:20] not in json.dumps(listed)
    assert http.get(f"/v1/states/{state['id']}").json() == state
    assert http.delete(f"/v1/states/{state['id']}").json()["deleted"]
    assert http.get(f"/v1/states/{state['id']}").status_code == 404
    gone = http.post("/v1/chat/completions", json={"messages": question, "state": state["id"]})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "state_not_found")


def test_states_from_files_forms_and_messages(http):
    as_file = http.post("/v1/states?name=f&stream=true", content=DOCUMENT, headers={"Content-Type": "text/plain"})
    events = [json.loads(part.removeprefix("data: ")) for part in as_file.text.split("\n\n") if "{" in part]
    assert [event["object"] for event in events[:-1]] == ["state.progress"] * (len(events) - 1)
    assert events[-2]["read"] == events[-2]["tokens"] == events[-1]["tokens"]
    form = http.post("/v1/states", files={"file": ("book.txt", DOCUMENT)})
    assert (form.json()["name"], form.json()["tokens"]) == ("book.txt", events[-1]["tokens"])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    more = [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go on"}]
    state = http.post("/v1/states", json={"messages": messages}).json()
    options = {"temperature": 0, "max_tokens": 8}
    behind = http.post("/v1/chat/completions", json={"messages": more, "state": state["id"], **options}).json()
    plain = http.post("/v1/chat/completions", json={"messages": [*messages, *more], **options}).json()
    assert behind["choices"] == plain["choices"]
    text = http.post("/v1/states", json={"text": "Once upon", "format": "plain"}).json()
    behind = http.post("/v1/completions", json={"prompt": " a time", "state": text["id"], **options}).json()
    plain = http.post("/v1/completions", json={"prompt": "Once upon a time", **options}).json()
    assert behind["choices"] == plain["choices"]


REFUSED = [
    ({}, "messages", 400),
    ({"messages": []}, "messages", 400),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", 400),
    ({"messages": [{"role": "user"}]}, "messages.0.content", 400),
    ({"temperature": 3}, "temperature", 400),
    ({"temperature": "hot"}, "temperature", 400),
    ({"n": 0}, "n", 400),
    ({"n": 17}, "n", 400),
    ({"top_p": 0}, "top_p", 400),
    ({"max_tokens": 65}, "max_tokens", 400),
    ({"max_tokens": True}, "max_tokens", 400),
    ({"stop": ""}, "stop", 400),
    ({"tools": []}, "tools", 400),
    ({"logit_bias": {"5": 1}}, "logit_bias", 400),
    ({"presence_penalty": 1}, "presence_penalty", 400),
    ({"stream_options": {}}, None, 400),
    ({"top_logprobs": 2}, None, 400),
    ({"model": "gpt-5"}, "model", 404),
    ({"state": "state-" + "0" * 24}, "state", 404),
    ({"state": "../../etc/passwd"}, "state", 404),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", 400),
]


@pytest.mark.parametrize(("change", "param", "status"), REFUSED, ids=[str(row[0])[:40] for row in REFUSED])
def test_bad_requests_are_refused_in_openais_form(http, change, param, status):
    body = {"messages": [{"role": "user", "content": "x"}]} if change else {}
    response = http.post("/v1/chat/completions", json={**body, **change})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", ")"))


def test_the_clients_own_errors(server):
    bad = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        bad.models.list()
    good = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
    assert [model.id for model in good.models.list()] == ["tiny"]
    assert good.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        ask(good, model="other")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(good, temperature=2.5)
    bad.close()
    good.close()


def test_what_comes_from_elsewhere_is_refused(server):
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/health").json()["status"] == "ok"
        for path in ("/v1/models", "/v1/states", "/v1/status", "/metrics"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers={"Authorization": "Bearer secre"}).status_code == 401
        assert http.get("/v1/models", headers={**KEY, "Host": "evil.example"}).status_code == 403
        assert http.get("/v1/models", headers={**KEY, "Origin": "https://evil.example"}).status_code == 403
        assert http.get("/v1/models", headers={**KEY, "Origin": server.url}).status_code == 200
        assert "access-control-allow-origin" not in http.get("/v1/models", headers=KEY).headers
        large = http.post("/v1/completions", json={"prompt": "x" * 2**20}, headers=KEY)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")

        def endless():
            for _ in range(40):
                yield b" " * 2**16

        chunked = http.post("/v1/completions", content=endless(), headers={**KEY, "Content-Type": "application/json"})
        assert chunked.status_code == 413
        form = http.post("/v1/completions", content="x=1", headers={**KEY, "Content-Type": "text/plain"})
        assert form.status_code == 415
        assert http.get("/v1/nothing", headers=KEY).json()["error"]["type"] == "not_found_error"
        assert http.get("/v1/completions", headers=KEY).status_code == 405


def test_metrics_and_logs_are_without_words(http, server):
    secret = "Zanzibar"
    http.post("/v1/completions", json={"prompt": secret, "max_tokens": 2})
    text = http.get("/metrics").text
    assert "linattn_completion_tokens_total" in text
    assert 'linattn_requests_total{path="/v1/completions",status="200"}' in text
    assert secret not in text
    assert any("POST /v1/completions 200" in line for line in server.lines)
    assert not any(secret in line for line in server.lines)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_not_worked_for(http, stream):
    before = _metric(http, "linattn_cancelled_total")
    for attempt, patience in enumerate(
        (0.02, 0.05, 0.1, 0.2, 0.4)
    ):  # a busy server may not have begun when the client leaves
        body = {"prompt": text_of(10 + 2 * attempt + stream, 3000), "max_tokens": 64, "stream": stream}
        with contextlib.suppress(httpx.TimeoutException):
            http.post("/v1/completions", json=body, timeout=httpx.Timeout(30, read=patience))
        end = time.monotonic() + 6
        while _metric(http, "linattn_cancelled_total") == before and time.monotonic() < end:
            time.sleep(0.05)
        if _metric(http, "linattn_cancelled_total") > before:
            break
    assert _metric(http, "linattn_cancelled_total") > before
    assert http.get("/v1/status").json()["running"] == 0


def _metric(http, name):
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def test_a_server_open_to_others_needs_a_key(served_folder):
    done = process(["serve", "--model", str(served_folder), "--host", "0.0.0.0"])
    assert done.returncode == 2
    assert "--api-key" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_killed_server_loses_no_saved_state(server, http):
    """kill -9 while it reads another document; then it starts again, at a new address."""
    question = {"messages": [{"role": "user", "content": "What?"}], "temperature": 0, "max_tokens": 6}
    state = http.post("/v1/states", json={"text": DOCUMENT}).json()["id"]
    answer = http.post("/v1/chat/completions", json={**question, "state": state}).json()["choices"]
    with pytest.raises(httpx.TimeoutException):
        http.post("/v1/states", json={"text": text_of(5, 3000)}, timeout=httpx.Timeout(30, read=0.02))
    server.kill()
    assert server.process.returncode == -signal.SIGKILL
    server.start()
    with httpx.Client(base_url=server.url, headers=KEY, timeout=60) as again:
        found = again.post("/v1/chat/completions", json={**question, "state": state}).json()
    assert found["choices"] == answer
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 700
