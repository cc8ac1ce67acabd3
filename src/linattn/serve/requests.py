"""Bodies of requests: read within limits, checked, and given up when the client goes away."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from .errors import ApiError, from_validation

BODY_SECONDS = 60.0  # for the arrival of a body
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request) -> bytes:
    """The whole body; ApiError if it is too large or takes too long."""
    return await arriving(request.body())


async def arriving(body: Coroutine[Any, Any, T]) -> T:
    """What is read of a request; ApiError if it takes too long to arrive."""
    try:
        return await asyncio.wait_for(body, BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s.", code="body_timeout") from None


async def read_json(request: Request, schema: type[M]) -> M:
    """A JSON body of the given schema; ApiError if it is anything else."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the body must be JSON, with Content-Type: application/json.", code="not_json")
    body = await read_body(request)
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON.", code="not_json") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object.", code="not_json")
    return check(schema, content)


def check(schema: type[M], content: dict[str, Any]) -> M:
    """The content as the schema has it; ApiError if it is anything else, or holds text that no answer or tokenizer can take."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "the request holds text that is not valid Unicode: half of a surrogate pair."
        raise ApiError(400, message, code="not_unicode") from None
    except RecursionError:
        raise ApiError(400, "the request is nested too deeply.", code="not_json") from None
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise from_validation(error) from None


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
