"""Errors of all programs, and the shapes in which clients see them.

    PrefixpoolError
    ├── SettingsError        a setting is missing or wrong: which one, what was found, what would be right
    ├── WireError            a peer speaks another version or nonsense
    └── RequestError         a client's request cannot be served as it is; carries HTTP status, type, code, param

Third-party exceptions are converted at the seam with `from`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class PrefixpoolError(Exception):
    """Root of the tree; the message is written for a person."""


class SettingsError(PrefixpoolError):
    """Names the setting, the value found, and what is accepted."""


class WireError(PrefixpoolError):
    """A peer's message could not be understood."""


class Dialect(StrEnum):
    """Which API a client speaks, hence how it must be told of errors."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"

    @classmethod
    def of_path(cls, path: str) -> Dialect:
        return cls.ANTHROPIC if path.startswith("/v1/messages") else cls.OPENAI


# HTTP status -> error types of both dialects, as their official SDKs expect them.
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class RequestError(PrefixpoolError):
    """A clear answer to a client. `retry_after_s` becomes the `Retry-After` header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


def error_type(status: int, dialect: Dialect) -> str:
    """The `type` field for an HTTP status."""
    if dialect is Dialect.ANTHROPIC:
        return _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(error: RequestError, dialect: Dialect) -> bytes:
    """JSON in the shape of the client's API."""
    kind = error_type(error.status, dialect)
    if dialect is Dialect.ANTHROPIC:
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})
    return msgspec.json.encode({"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}})


def error_event(error: RequestError, dialect: Dialect) -> bytes:
    """Server-sent event that ends a stream which broke after its first byte."""
    body = error_body(error, dialect)
    return (b"event: error\n" if dialect is Dialect.ANTHROPIC else b"") + b"data: " + body + b"\n\n"
