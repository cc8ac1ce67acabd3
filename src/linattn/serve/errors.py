"""Errors in OpenAI's form."""

from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer with an error status. param: the field of the request that is wrong."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status == 429 else None
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else headers
        return JSONResponse(self.body, self.status, headers)


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that pydantic found wrong, in one sentence."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown or unsupported parameter: {param}.", code="unsupported_parameter", param=param)
    where, said = f"{param}: " if param else "", first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where}{said}.", code="invalid_value", param=param)
