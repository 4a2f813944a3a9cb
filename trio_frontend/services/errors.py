"""Why a generate request is refused or fails, and the one function that makes a status of it.

Rules that hold here:

* Everything that refuses a request raises a :class:`RequestError`. Its message names the field, the value and what is allowed.
* :func:`as_status` is the only place of ``services.inference`` where an exception becomes a status. What it does not know is a bug
  of ours: it stays what it is, and the call ends with INTERNAL and a log line (``rpc.status``).
"""

from __future__ import annotations

from trio_frontend.engine.base import DataParallelRankError, EngineError, EngineUnavailableError
from trio_frontend.rpc.status import StatusCode, StatusError

__all__ = ["InvalidRequestError", "PreconditionError", "RequestError", "UnknownNameError", "as_status", "shown"]


class RequestError(Exception):
    """The request cannot be served, and no engine has seen it."""


class InvalidRequestError(RequestError):
    """A field is wrong, whatever the server's state: INVALID_ARGUMENT."""


class UnknownNameError(RequestError):
    """A name (of a model, of a LoRA adapter) that this server does not serve: NOT_FOUND."""


class PreconditionError(RequestError):
    """What the request asks for is switched off in the engine: FAILED_PRECONDITION."""


def as_status(error: Exception) -> StatusError | None:
    """The status that ``error`` ends a call with; None for what is no answer to a request but a fault.

    An engine's own statement of what went wrong (``RequestError`` of vLLM 0.33: code, message, retryable) is passed on.
    """
    match error:
        case InvalidRequestError() | DataParallelRankError():
            return StatusError(StatusCode.INVALID_ARGUMENT, str(error))
        case UnknownNameError():
            return StatusError(StatusCode.NOT_FOUND, str(error))
        case PreconditionError():
            return StatusError(StatusCode.FAILED_PRECONDITION, str(error))
        case EngineUnavailableError():
            return StatusError(StatusCode.UNAVAILABLE, str(error))
        case EngineError(code="validation_error"):
            return StatusError(StatusCode.INVALID_ARGUMENT, error.message)
        case EngineError(retryable=True):
            return StatusError(StatusCode.UNAVAILABLE, error.message)
        case EngineError():
            return StatusError(StatusCode.INTERNAL, error.message)
        case _:
            return None


def shown(value: object, limit: int = 60) -> str:
    """``value`` for a message: not longer than ``limit`` characters, so that a status stays readable and small."""
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
