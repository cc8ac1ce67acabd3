"""POST, GET and DELETE /v1/states: texts that are read once and asked often."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from .errors import ApiError
from .jobs import Finished, Progress
from .prompts import Prompt, PromptError
from .requests import arriving, check, read_body, read_json, until_disconnect
from .sampling import SamplingOptions
from .schemas import StateRequest
from .service import Service


async def create(request: Request) -> Response:
    """Reads a text, a file or messages, and keeps the state. With stream=true, progress comes as server-sent events."""
    service: Service = request.app.state.service
    asked = await _read_request(request)
    prompt, about = await asyncio.to_thread(_prompt, service, asked)
    if not prompt.tokens:
        raise ApiError(400, "there is nothing to read.", code="empty_prompt", param="text")
    if len(prompt.tokens) >= service.limits.context:
        message = f"the text has {len(prompt.tokens)} tokens; the model takes {service.limits.context} (--context)."
        raise ApiError(400, message, code="context_length_exceeded", param="text")
    reading = _read(service, prompt, about)
    if asked.stream:
        first = await until_disconnect(request, _next(reading))
        return StreamingResponse(_events(first, reading), media_type="text/event-stream")

    async def last() -> dict[str, Any]:
        async with aclosing(reading):
            return [found async for found in reading][-1]

    return JSONResponse(await until_disconnect(request, last()), 201)


async def list_all(request: Request) -> Response:
    service: Service = request.app.state.service
    return JSONResponse({"object": "list", "data": [state.public() for state in service.saved.all()]})


async def get(request: Request) -> Response:
    service: Service = request.app.state.service
    saved = service.saved.get(request.path_params["name"])
    if saved is None:
        raise ApiError(404, "there is no state of this id.", code="state_not_found")
    return JSONResponse(saved.public())


async def delete(request: Request) -> Response:
    service: Service = request.app.state.service
    name = request.path_params["name"]
    if not service.saved.delete(name):
        raise ApiError(404, "there is no state of this id.", code="state_not_found")
    return JSONResponse({"id": name, "object": "state.deleted", "deleted": True})


async def _read_request(request: Request) -> StateRequest:
    """JSON, a text file as the body, or a form with a file."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return await read_json(request, StateRequest)
    fields: dict[str, Any] = {}
    if kind == "multipart/form-data":
        fields = await _read_form(request)
    elif kind == "text/plain":
        fields = {**request.query_params, "text": _decoded(await read_body(request))}
    else:
        message = "send JSON (application/json), a text (text/plain) or a form with a file (multipart/form-data)."
        raise ApiError(415, message, code="unsupported_media_type")
    if "stream" in fields:  # a word here, which must be one of two
        fields["stream"] = {"true": True, "false": False}.get(fields["stream"], fields["stream"])
    return check(StateRequest, fields)


async def _read_form(request: Request) -> dict[str, Any]:
    """The fields of a form; its file is the text."""
    try:
        form = await arriving(_form(request))
    except MultiPartException as error:
        raise ApiError(400, f"the form cannot be read: {error.message}", code="bad_form") from error
    fields: dict[str, Any] = {}
    try:
        for name, given in form.multi_items():
            if isinstance(given, UploadFile):
                name = "text"
                fields.setdefault("name", (given.filename or "")[:200])
                given = _decoded(await given.read())
            elif name == "name":
                fields.pop("name", None)  # before that of a file
            if name in fields:
                raise ApiError(400, f"give one {name}: there are several.", code="bad_form", param=name)
            fields[name] = given
    finally:
        await form.close()
    return fields


async def _form(request: Request) -> FormData:
    return await request.form(max_files=1, max_fields=8)


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ApiError(400, "the file is not a text in UTF-8.", code="not_text", param="text") from None


def _prompt(service: Service, asked: StateRequest) -> tuple[Prompt, dict[str, Any]]:
    """What to read, and what is stored beside its state."""
    about: dict[str, Any] = {"name": asked.name, "model": service.model.choice.model}
    try:
        if asked.messages is not None:
            messages = [message.plain() for message in asked.messages]
            return service.prompts.read_messages(messages), {**about, "kind": "messages", "messages": messages}
        assert asked.text is not None
        if asked.format == "plain":
            return service.prompts.text(asked.text), {**about, "kind": "text"}
        return service.prompts.document(asked.text), {**about, "kind": "document"}
    except PromptError as error:
        raise ApiError(400, str(error), code="invalid_messages", param="messages") from error


async def _read(service: Service, prompt: Prompt, about: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """Progress, then the state."""
    options = SamplingOptions(max_tokens=1)
    async with aclosing(service.run([prompt], options, 0)) as events:
        async for _, event in events:
            if isinstance(event, Progress):
                read = {"read": event.read, "cached": event.cached, "tokens": len(prompt.tokens)}
                yield {"object": "state.progress", **read}
            elif isinstance(event, Finished) and event.snapshot is not None:
                event.snapshot.about.update(about)
                yield (await service.keep(event.snapshot)).public()


async def _next(reading: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    return await anext(reading)


async def _events(first: dict[str, Any], reading: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[str, None]:
    async with aclosing(reading):
        try:
            yield f"data: {json.dumps(first)}\n\n"
            async for found in reading:
                yield f"data: {json.dumps(found)}\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.body)}\n\n"
            return
        yield "data: [DONE]\n\n"
