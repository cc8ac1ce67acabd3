"""The local server of `linattn explore`: the page, heads of a model on the reader's text, and times of this machine."""

import json
import socket
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

LARGEST_REQUEST = 2**20  # bytes
PATIENCE = 60.0  # seconds for the arrival of a request
LOCAL = ("127.0.0.1", "localhost", "[::1]")

# The page's question -> the answer, both plain data; ValueError for a question that cannot be answered.
Answer = Callable[[dict[str, Any]], dict[str, Any]]


class ExplorerServer(ThreadingHTTPServer):
    """A page at "/", and answers to its questions.

    Attributes:
        page: the HTML text.
        answers: path -> function, for POST requests with JSON.
        lock: held while a question is answered, so that one is at a time.
    """

    def __init__(self, page: str, answers: dict[str, Answer], port: int):
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ValueError(f"port {port} cannot be used: {error.strerror}. Choose another by --port.") from error
        self.page, self.answers, self.lock = page, answers, Lock()

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        """A reader who has left, or closed the page before its answer came, is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def make_server(page: str, answers: dict[str, Answer], port: int) -> ExplorerServer:
    """A server on the loopback interface, not started yet. port: 0 for any that is free."""
    return ExplorerServer(page, answers, port)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    server: ExplorerServer

    def do_GET(self) -> None:
        if not self._from_here():
            return
        if self.path.partition("?")[0] == "/":
            self._send(HTTPStatus.OK, self.server.page.encode(), "text/html; charset=utf-8")
        elif self.path == "/favicon.ico":  # every browser asks for one
            self._send(HTTPStatus.NO_CONTENT, b"", "image/x-icon")
        else:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": f"there is no {self.path[:80]}."})

    def do_POST(self) -> None:
        if not self._from_here():
            return
        answer = self.server.answers.get(self.path)
        given = self.headers.get("Content-Length") or "0"
        length = int(given) if given.isdecimal() and len(given) < 10 else LARGEST_REQUEST + 1
        if answer is None or length > LARGEST_REQUEST:
            self.close_connection = True
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "there is no such question, or it is too long."})
            return
        body = self.rfile.read(length)
        try:
            status, found = HTTPStatus.OK, self._found(answer, body)
        except KeyError as error:
            status, found = HTTPStatus.BAD_REQUEST, {"error": f"the question has no {error}."}
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            status, found = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except Exception as error:  # such as a lack of memory: the page is told, and the server goes on
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            found = {"error": f"the answer failed: {type(error).__name__} {str(error)[:200]}"}
        self._send_json(status, found)

    def _found(self, answer: Answer, body: bytes) -> dict[str, Any]:
        question = json.loads(body)
        if not isinstance(question, dict):
            raise ValueError("a question must be a JSON object.")
        with self.server.lock:
            found = answer(question)
        json.dumps(found, allow_nan=False)  # ValueError if a browser could not read it
        return found

    def _from_here(self) -> bool:
        """Refuses requests that another site makes through the reader's browser."""
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        origin = self.headers.get("Origin")
        if host in LOCAL and (origin is None or origin == f"http://{self.headers['Host']}"):
            return True
        self.close_connection = True
        self._send_json(HTTPStatus.FORBIDDEN, {"error": "this server answers its own page only."})
        return False

    def _send_json(self, status: HTTPStatus, data: dict[str, Any]) -> None:
        self._send(status, json.dumps(data).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the page shows what went wrong."""
