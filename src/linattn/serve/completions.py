"""POST /v1/chat/completions and /v1/completions."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from .answers import ChatForm, CompletionForm, Form, Usage
from .errors import ApiError
from .jobs import Delta, Progress
from .prompts import Prompt
from .requests import read_json, until_disconnect
from .sampling import SamplingOptions
from .schemas import ChatRequest, CompletionRequest, Generation
from .service import Service


async def chat(request: Request) -> Response:
    service: Service = request.app.state.service
    asked = await read_json(request, ChatRequest)
    _check_model(service, asked)
    prompt = await asyncio.to_thread(service.chat_prompt, asked.messages, asked.state)
    top = (asked.top_logprobs or 0) if asked.logprobs else None
    form = ChatForm(_id("chatcmpl"), service.name, service.model.tokenizer)
    return await _answer(request, asked, [prompt], top, form)


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    asked = await read_json(request, CompletionRequest)
    _check_model(service, asked)
    given = asked.prompts()
    if not given or len(given) > service.limits.max_concurrent:
        raise ApiError(400, f"give 1 to {service.limits.max_concurrent} prompts.", param="prompt")
    prompts = [await asyncio.to_thread(service.text_prompt, text, asked.state) for text in given]
    form = CompletionForm(_id("cmpl"), service.name, service.model.tokenizer)
    return await _answer(request, asked, prompts, asked.logprobs, form)


def _check_model(service: Service, asked: Generation) -> None:
    if asked.model is not None and asked.model != service.name:
        message = f"the model {asked.model!r} is not served here; {service.name!r} is."
        raise ApiError(404, message, code="model_not_found", param="model")


async def _answer(
    request: Request, asked: Generation, prompts: list[Prompt], top_logprobs: int | None, form: Form
) -> Response:
    service: Service = request.app.state.service
    longest = max(len(prompt.tokens) for prompt in prompts)
    param = "messages" if isinstance(asked, ChatRequest) else "prompt"
    most = service.limits.answer_tokens(longest, asked.limit, param=param)
    options, answers = asked.options(most, top_logprobs), asked.n or 1
    if answers * len(prompts) > service.limits.max_concurrent:
        message = f"{answers * len(prompts)} answers are more than {service.limits.max_concurrent} (--max-concurrent)."
        raise ApiError(400, message, code="too_many_answers", param="n")
    usage = Usage(sum(len(prompt.tokens) for prompt in prompts))
    request.state.usage = usage
    events = _shown(service, prompts, options, answers, usage)
    if asked.stream:
        # Errors before the first token still have a status, and a client may go away while its prompt is read.
        first = await until_disconnect(request, _first(events))
        wants_usage = asked.stream_options is not None and asked.stream_options.include_usage
        stream = _stream(first, events, form, answers * len(prompts), usage if wants_usage else None)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def collect() -> dict[str, Any]:
        async with aclosing(events):
            async for delta in events:
                form.add(delta)
        return form.whole(answers * len(prompts), usage)

    return JSONResponse(await until_disconnect(request, collect()))


async def _shown(
    service: Service, prompts: list[Prompt], options: SamplingOptions, answers: int, usage: Usage
) -> AsyncGenerator[Delta, None]:
    """The pieces of all answers, numbered through all prompts; counts tokens on the way."""
    cached = [0] * len(prompts)
    async with aclosing(service.run(prompts, options, answers)) as events:
        async for i, event in events:
            if isinstance(event, Progress):
                cached[i] = event.cached
                usage.cached = sum(cached)
            elif isinstance(event, Delta):
                usage.written += event.tokens
                yield Delta(i * answers + event.index, event.text, event.choices, event.finish, event.tokens)


async def _first(events: AsyncGenerator[Delta, None]) -> Delta | None:
    return await anext(events, None)


async def _stream(
    first: Delta | None, events: AsyncGenerator[Delta, None], form: Form, answers: int, usage: Usage | None
) -> AsyncGenerator[str, None]:
    """Server-sent events, to [DONE]; an error ends them with an event of its own."""
    async with aclosing(events):
        for chunk in form.opening(answers):
            yield _event(chunk)
        try:
            if first is not None:
                yield _event(form.chunk(first))
            async for delta in events:
                yield _event(form.chunk(delta))
        except ApiError as error:
            yield _event(error.body)
            return
        if usage is not None:
            yield _event(form.usage_chunk(usage))
        yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


def _id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
