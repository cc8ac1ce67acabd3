"""The served explorer: a model's heads on the reader's text, times of this machine, and nothing for other sites."""

import http.client
import json
import math
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("jinja2")

import linattn
from browser_support import chromium, watched_page
from linattn.cli import explore
from linattn.explore.page import explorer_page
from linattn.explore.server import ExplorerServer, make_server
from linattn.explore.times import kernel_of, measure_times

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@contextmanager
def served(page, answers):
    server = make_server(page, answers, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def post(address, question, **headers):
    request = urllib.request.Request(
        address, json.dumps(question).encode(), {"Content-Type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_only_its_own_page_is_answered():
    with served("<p>page</p>", {"/api/double": lambda q: {"x": 2 * q["x"]}}) as address:
        with urllib.request.urlopen(address + "/") as answer:
            assert answer.read() == b"<p>page</p>"
        assert post(address + "/api/double", {"x": 4}) == (200, {"x": 8})
        assert post(address + "/api/double", {"y": 4})[0] == 400
        assert post(address + "/api/nothing", {})[0] == 404
        assert post(address + "/api/double", {"x": 4}, Origin="https://elsewhere.example")[0] == 403
        assert post(address + "/api/double", {"x": 4}, Host="elsewhere.example")[0] == 403


def fail(_):
    raise RuntimeError("no memory")


ANSWERS = {"/api/double": lambda q: {"x": 2 * q["x"]}, "/api/fail": fail, "/api/nan": lambda _: {"x": math.nan}}
BAD_QUESTIONS = [
    ("/api/double", b"[]", 400, "a question must be a JSON object"),
    ("/api/double", b"{}", 400, "the question has no 'x'"),
    ("/api/double", b"{", 400, "Expecting property name"),
    ("/api/double", b"[" * 100000, 400, "recursion"),
    ("/api/times", b'{"settings": [], "dim": 8}', 400, "'get'"),
    ("/api/times", b'{"settings": {"kernel": "elu"}, "dim": 1e999}', 400, "infinity"),
    ("/api/fail", b"{}", 500, "the answer failed: RuntimeError no memory"),
    ("/api/nan", b"{}", 400, "not JSON compliant"),
]


def test_bad_questions_are_told_what_is_wrong(capfd):
    with served("", {**ANSWERS, "/api/times": explore._times}) as address:
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=10)
        for path, body, status, said in BAD_QUESTIONS:  # all through one connection
            connection.request("POST", path, body)
            answer = connection.getresponse()
            assert (answer.status, said in json.load(answer)["error"]) == (status, True), body[:40]
        for length in ("-1", "many", "9" * 5000, str(2**30)):
            connection.request("POST", "/api/double", b"", {"Content-Length": length})
            answer = connection.getresponse()
            assert answer.status == 404
            answer.read()
        connection.close()
    assert capfd.readouterr().err == ""


def test_a_reader_who_leaves_is_no_error(capfd, monkeypatch):
    asked, ended = threading.Event(), threading.Event()
    close = ExplorerServer.shutdown_request
    monkeypatch.setattr(ExplorerServer, "shutdown_request", lambda *given: (close(*given), ended.set()))

    def slow(_):
        asked.set()
        time.sleep(0.05)
        return {"x": "y" * 5_000_000}

    with served("", {"/api/slow": slow}) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as reader:
            reader.sendall(f"POST /api/slow HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            assert asked.wait(10)
        assert ended.wait(10)
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_named():
    with served("", {}) as address, pytest.raises(ValueError, match=r"port \d+ cannot be used: .* by --port"):
        make_server("", {}, int(address.rpartition(":")[2]))


def test_times_are_measured_for_the_settings_of_the_page():
    for kernel in ("positive", "delta", "nearfar"):
        found = measure_times({"kernel": kernel, "features": 8, "causal": True}, 8, lengths=(16, 32), seconds=0)
        assert found["lengths"] == [16, 32]
        assert min(found["exact"] + found["kernel"]) > 0
    with pytest.raises(ValueError, match="features must be a whole number"):
        kernel_of({"kernel": "positive", "features": 10**9}, 8)
    with pytest.raises(ValueError, match="unknown kernel"):
        kernel_of({"kernel": "__import__"}, 8)


def test_a_model_reads_the_readers_text(tiny_model):
    transformers = pytest.importorskip("transformers")
    from linattn.hf.heads import read_heads

    reader = explore._Reader(str(tiny_model), 64)
    page = explorer_page(heads=reader.heads("a b c", None), live={"model": "tiny", "times": True})
    answers = {
        "/api/heads": reader.answer,
        "/api/times": lambda _: measure_times({"kernel": "elu"}, 8, lengths=(16, 32), seconds=0),
    }
    with served(page, answers) as address, chromium() as browser, watched_page(browser) as tab:
        tab.goto(address)
        tab.wait_for_function("globalThis.linattn && linattn.ready && !linattn.busy")
        tab.locator("#c-layer").select_option("1")
        tab.locator("#c-text").fill("a b c d e f g a b c")
        tab.wait_for_function("linattn.data.n === 10 && linattn.heads.layers[1]")
        shown = torch.tensor(tab.evaluate("[...linattn.result.exact]")).reshape(10, 10)
        tab.locator("#measure").click()
        tab.wait_for_selector("#chart-times svg")
        head = tab.evaluate("linattn.settings.head")
    ids = reader.tokenizer("a b c d e f g a b c", return_tensors="pt").input_ids
    q, k, _, causal = read_heads(reader.model, ids, [1])[1]
    right = linattn.implied_attention(q, k, "softmax", is_causal=causal)[head]
    assert torch.allclose(shown, right.float(), atol=1e-5)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager").eval()
    weights = model(ids, output_attentions=True).attentions[1][0, head]
    assert torch.allclose(right, weights, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "3"], "go with --model"),
        (["--model", "smolm2"], "did you mean 'smollm2'"),
        (["--times"], "--times goes with --save"),
        (["--save", "page.png"], "--save writes .html"),
    ],
)
def test_what_cannot_be_is_one_line(words, message, capsys):
    assert linattn.cli.main(["explore", *words]) == 2
    assert message in capsys.readouterr().err
