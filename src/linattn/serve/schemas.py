"""The requests of OpenAI's protocol that the server understands. What it does not understand is refused, never ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator

from .sampling import SamplingOptions

Stop = StrictStr | list[StrictStr] | None
MOST_STOPS, MOST_ANSWERS = 16, 16
Number = Annotated[float, Field(allow_inf_nan=False)]


class Request(BaseModel):
    """Fields are checked strictly; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Request):
    include_usage: StrictBool = False


class TextPart(Request):
    type: Literal["text"]
    text: StrictStr


class ChatMessage(Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | list[TextPart]
    name: StrictStr | None = None
    # Empty fields of an answer that a client sends back as it got it.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class Generation(Request):
    """What chats and completions have in common.

    state: the id of a saved state that the request continues.
    """

    model: StrictStr | None = None
    state: StrictStr | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_ANSWERS)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None
    # Accepted where they change nothing.
    presence_penalty: Annotated[Number, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=0, le=0)] | None = None
    logit_bias: dict[str, Any] | None = None

    @field_validator("stop")
    @classmethod
    def _stop(cls, stop: Stop) -> Stop:
        found = [stop] if isinstance(stop, str) else stop or []
        if len(found) > MOST_STOPS or not all(found):
            raise ValueError(f"stop takes up to {MOST_STOPS} texts that are not empty")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, bias: dict[str, Any] | None) -> dict[str, Any] | None:
        if bias:
            raise ValueError("logit_bias is not supported")
        return bias

    @model_validator(mode="after")
    def _usage(self) -> "Generation":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream=true")
        return self

    @property
    def limit(self) -> int | None:
        """The tokens of the answer that the request asks for, at most."""
        return self.max_tokens

    def options(self, most: int, top_logprobs: int | None) -> SamplingOptions:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingOptions(
            max_tokens=min(most, self.limit or most),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            stop=stop,
            top_logprobs=top_logprobs,
        )


class ChatRequest(Generation):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None

    @field_validator("response_format")
    @classmethod
    def _format(cls, wanted: dict[str, Any] | None) -> dict[str, Any] | None:
        if wanted is not None and wanted != {"type": "text"}:
            raise ValueError("only the response format text is supported")
        return wanted

    @model_validator(mode="after")
    def _logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Generation):
    prompt: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: StrictInt | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _best(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must be n")
        return self

    def prompts(self) -> list[str | list[int]]:
        """One or more texts, or tokens."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        tokens = [i for i in given if isinstance(i, int)]
        return [tokens] if tokens else [text for text in given if not isinstance(text, int)]


class StateRequest(Request):
    """What to read: a text or messages. format "chat" makes the text the beginning of the user's first message."""

    text: StrictStr | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    name: Annotated[StrictStr, Field(max_length=200)] | None = None
    format: Literal["chat", "plain"] | None = None
    stream: StrictBool = False

    @model_validator(mode="after")
    def _one(self) -> "StateRequest":
        if (self.text is None) == (self.messages is None):
            raise ValueError("give either text or messages")
        if self.text is not None and not self.text.strip():
            raise ValueError("text is empty")
        if self.messages is not None and self.format == "plain":
            raise ValueError("format plain is for text")
        return self
