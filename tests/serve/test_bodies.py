"""Whatever a body holds, the answer is a status and an error in OpenAI's form, and the server goes on."""

import asyncio
import errno
import json
import os
import threading

import pytest

pytest.importorskip("starlette")

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn.serve.app import create_app
from linattn.serve.limits import Limits
from serve_support import served, service

FIELDS = ["model", "messages", "prompt", "text", "n", "stop", "stream", "state", "max_tokens", "temperature", "top_p"]
FIELDS += ["seed", "logprobs", "top_logprobs", "stream_options", "format", "name", "user", "nonsense"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["tiny", "user", "chat", 0, 1, 2]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6)
NEARLY = st.fixed_dictionaries(
    {"messages": st.just([{"role": "user", "content": "x"}]), "max_tokens": st.just(1)},
    optional={name: VALUES for name in FIELDS if name not in ("messages", "max_tokens")},
)
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/states"]


class Running:
    """The application in an event loop of its own, called without a socket."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        limits = Limits(max_tokens=4, max_concurrent=8, max_body=4096, context=200)
        self.service = service(served(), limits=limits, rows=8)
        self.service.start()
        app = create_app(self.service)
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def post(self, path, **options):
        return self.request("POST", path, **options)

    def request(self, *words, **options):
        return asyncio.run_coroutine_threadsafe(self.client.request(*words, **options), self.loop).result(60)

    def close(self):
        asyncio.run_coroutine_threadsafe(self.client.aclose(), self.loop).result(60)
        self.service.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def running():
    made = Running()
    yield made
    made.close()


def check(response):
    assert response.status_code in (200, 201, 400, 404, 409, 413, 415)
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(PATHS), BODIES | NEARLY)
def test_any_json(running, path, body):
    content = json.dumps(body)
    check(running.post(path, content=content, headers={"Content-Type": "application/json"}))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PATHS),
    st.binary(max_size=60) | st.sampled_from([b"[" * 3000, b'{"a":' * 600, b"\xff\xfe", b"null", b'"x"', b"1e999"]),
    st.sampled_from(["application/json", "text/plain", "multipart/form-data", "multipart/form-data; boundary=x", ""]),
)
def test_any_bytes(running, path, body, kind):
    check(running.post(path, content=body, headers={"Content-Type": kind}))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "\ud800"}),
        ("/v1/completions", {"prompt": "x", "stop": "\udfff"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a\ud800"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "model": "\ud800"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "\ud800": 1}),
        ("/v1/states", {"text": "\ud800"}),
        ("/v1/states", {"text": "x", "name": "\ud800"}),
    ],
)
def test_text_that_is_not_unicode_is_refused(running, path, body):
    answer = running.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "text that is not valid Unicode" in answer.json()["error"]["message"]


def test_deep_nesting_is_refused(running):
    for depth in range(850, 1010, 3):  # about the depth at which Python gives up
        body = b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"
        answer = running.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400


@pytest.mark.parametrize("header", [{"Host": "["}, {"Host": "[::1"}, {"Origin": "http://["}])
def test_addresses_that_cannot_be_read_are_refused(running, header):
    assert running.request("GET", "/health", headers=header).status_code == 403


def test_a_method_that_is_not_possible_is_told_the_others(running):
    answer = running.request("PUT", "/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


PLAIN = {"Content-Type": "text/plain"}


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        (
            "/v1/states",
            {"files": {"file": ("a.txt", "one")}, "data": {"text": "two"}},
            "give one text: there are several.",
        ),
        ("/v1/states", {"files": {"file": ("a.txt", "one")}, "data": {"stream": "1"}}, "stream: "),
        ("/v1/states?stream=True", {"content": "one", "headers": PLAIN}, "stream: "),
        ("/v1/states", {"json": {"text": " "}}, "text is empty."),
    ],
)
def test_nothing_of_a_form_is_ignored(running, path, options, said):
    answer = running.post(path, **options)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)


def test_what_a_form_says_is_done(running):
    form = {"files": {"file": ("a.txt", "one")}, "data": {"stream": "false", "name": "b"}}
    assert running.post("/v1/states", **form).json()["name"] == "b"
    events = running.post("/v1/states?stream=true", content="one", headers=PLAIN)
    assert events.text.endswith("data: [DONE]\n\n")


def test_a_form_that_does_not_arrive_is_given_up(running, monkeypatch):
    monkeypatch.setattr("linattn.serve.requests.BODY_SECONDS", 0.05)

    async def slow():
        yield b"--x\r\n"
        await asyncio.sleep(20)

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert running.post("/v1/states", content=slow(), headers=headers).status_code == 408


def test_a_full_disk_is_told(running, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(running.service.saved, "add", full)
    answer = running.post("/v1/states", json={"text": "one"})
    assert answer.status_code == 507
    assert answer.json()["error"]["message"] == "the state cannot be saved: No space left on device (--state-dir)."
    events = running.post("/v1/states", json={"text": "one", "stream": True}).text.split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "state_not_saved"


def test_it_still_answers(running):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    assert running.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 3
    assert running.service.engine.load == 0
