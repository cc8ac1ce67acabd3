"""The web application: routes, errors, and the page."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from .. import __version__
from ..pages import render_page
from . import completions, states
from .errors import ApiError
from .middleware import Guard, Observe
from .service import Service

logger = logging.getLogger("linattn.serve")
# The page loads nothing from elsewhere.
POLICY = "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def create_app(
    service: Service, *, key: str | None = None, loopback: bool = True, origins: tuple[str, ...] = ()
) -> Starlette:
    """The ASGI application of a service, which it starts and stops. The options are those of middleware.Guard."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    middleware = [Middleware(Observe, metrics=service.metrics)]
    if origins:
        allowed: Any = {"allow_methods": ["GET", "POST", "DELETE"], "allow_headers": ["Authorization", "Content-Type"]}
        middleware.append(Middleware(CORSMiddleware, allow_origins=list(origins), **allowed))
    middleware.append(Middleware(Guard, key=key, loopback=loopback, origins=origins, limits=service.limits))
    app = Starlette(
        routes=[
            Route("/", page),
            Route("/page.js", script),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/status", status),
            Route("/v1/models", models),
            Route("/v1/models/{name}", models),
            Route("/v1/chat/completions", completions.chat, methods=["POST"]),
            Route("/v1/completions", completions.completions, methods=["POST"]),
            Route("/v1/states", states.create, methods=["POST"]),
            Route("/v1/states", states.list_all, methods=["GET"]),
            Route("/v1/states/{name}", states.get, methods=["GET"]),
            Route("/v1/states/{name}", states.delete, methods=["DELETE"]),
        ],
        middleware=middleware,
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _unexpected,
        },
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.key_needed = key is not None
    return app


async def health(request: Request) -> Response:
    service: Service = request.app.state.service
    return JSONResponse({"status": "ok", "model": service.name, "version": __version__})


async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    service.metrics.states(len(service.store), service.store.memory)
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


async def status(request: Request) -> Response:
    """What the page shows live."""
    service: Service = request.app.state.service
    about = {"model": service.name, "kernel": service.model.choice.kernel, "context": service.limits.context}
    stored = {"stored": len(service.store), "state_bytes": service.store.memory, "state_budget": service.store.budget}
    return JSONResponse({**about, **service.metrics.summary(), **stored})


async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    model = {"id": service.name, "object": "model", "created": 0, "owned_by": "linattn"}
    name = request.path_params.get("name")
    if name is None:
        return JSONResponse({"object": "list", "data": [model]})
    if name != service.name:
        raise ApiError(404, f"the model {name!r} is not served here; {service.name!r} is.", code="model_not_found")
    return JSONResponse(model)


async def page(request: Request) -> Response:
    service: Service = request.app.state.service
    template = Path(__file__).with_name("page.html.j2")
    text = render_page(template, title=f"{service.name}, served by linattn", key_needed=request.app.state.key_needed)
    return HTMLResponse(text, headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-store"})


async def script(request: Request) -> Response:
    text = (files(__package__) / "page.js").read_text(encoding="utf-8")
    return Response(text, media_type="text/javascript; charset=utf-8", headers={"Cache-Control": "no-store"})


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: f"there is no {request.url.path[:200]}.", 405: f"{request.method} is not possible here."}
    response = ApiError(error.status_code, messages.get(error.status_code, str(error.detail))).response()
    response.headers.update(error.headers or {})  # such as Allow, the methods that are possible
    return response


async def _gone(*_: object) -> Response:
    return Response(status_code=499)


async def _unexpected(_: Request, error: Exception) -> Response:
    logger.error("unexpected %s", type(error).__name__, exc_info=error)
    return ApiError(500, "the server failed; its log says why.", code="internal_error").response()
