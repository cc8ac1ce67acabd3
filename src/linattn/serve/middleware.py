"""Around every request: the key, where it may come from, the size of its body, the log line and the counters."""

import hmac
import ipaddress
import logging
import time
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .limits import Limits
from .metrics import Metrics

logger = logging.getLogger("linattn.serve")
OPEN = ("/", "/health", "/page.js")  # paths that need no key: they show nothing of anybody


class Guard:
    """Refuses requests without the key, from other sites' pages, for other hosts, or with too large a body.

    Args:
        key: that clients must send as a bearer token; None asks for none.
        loopback: the server listens to this machine only, so that other host names mean DNS rebinding.
        origins: of pages on other sites that may call the server; "*" for all.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, loopback: bool, origins: tuple[str, ...], limits: Limits):
        self.app, self.key, self.loopback, self.origins, self.limits = app, key, loopback, origins, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check(scope["path"], scope["method"], headers)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self.app(scope, self._limited(receive), send)

    def _check(self, path: str, method: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if self.loopback and not is_loopback(_split(f"//{host}").hostname or ""):
            raise ApiError(403, f"this server answers to localhost only, not to {host[:100]!r}.", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and _split(origin).netloc != host and not {"*", origin} & set(self.origins):
            message = "pages of other sites may not call this server: start it with --cors-origin for them."
            raise ApiError(403, message, code="wrong_origin")
        if self.key is not None and path not in OPEN and method != "OPTIONS":
            given = headers.get("authorization", "").encode("latin-1")  # as it was sent
            if not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
                raise ApiError(401, "this server needs its key as a bearer token.", code="invalid_api_key")
        length = headers.get("content-length", "")
        if length.isdigit():
            self.limits.body(int(length))

    def _limited(self, receive: Receive) -> Receive:
        """`receive` that counts bytes: a body need not say how long it is."""
        total = 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            self.limits.body(total)
            return message

        return counted


class Observe:
    """Counts requests and writes one line for each, without any of the users' words."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 499  # of a client that went away before the answer began

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.metrics.request(path, status)
            usage = scope.get("state", {}).get("usage")
            counts = "" if usage is None else f" prompt={usage.prompt} cached={usage.cached} written={usage.written}"
            logger.info(
                "%s %s %d %.0f ms%s", scope["method"], path, status, 1e3 * (time.perf_counter() - begun), counts
            )


def _split(address: str) -> SplitResult:
    """The parts of an address; none of one that cannot be read."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


def is_loopback(host: str) -> bool:
    """True for localhost and the addresses of this machine itself."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
