"""One call: what its handler sees of it, and the task that it is.

Rules that hold here:

* A call is one task and one cancel scope. Whatever ends the call before its handler does (the client's cancel, the deadline, a lost
  connection, a drain) first states why, then cancels the scope; the first reason stands.
* A handler that is cancelled unwinds first, then the status goes out. How long a connection waits for that is bounded
  (``ServerLimits.close_timeout``).
* Every call ends with exactly one status. A handler's own failure is logged here, once, and its text goes nowhere else.
* Cancelled and whatever is no Exception pass through.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import trio

from trio_frontend.rpc.call_stream import RESPONSE_BLOCK, CallStream
from trio_frontend.rpc.http2 import encode_headers
from trio_frontend.rpc.interceptors import serve_intercepted
from trio_frontend.rpc.metadata import Metadata, MetadataValue, encode_metadata
from trio_frontend.rpc.status import OK, RpcFailedError, Status, StatusCode, status_of, status_trailers

if TYPE_CHECKING:
    from trio_frontend.rpc.connection import Connection
    from trio_frontend.rpc.dispatch import Request
    from trio_frontend.rpc.methods import Method

__all__ = ["CANCELLED", "Call"]

logger = logging.getLogger(__name__)

CANCELLED: Final = Status(StatusCode.CANCELLED, "cancelled by the client")
DEADLINE_EXCEEDED: Final = Status(StatusCode.DEADLINE_EXCEEDED, "deadline exceeded")
SHUTTING_DOWN: Final = Status(StatusCode.UNAVAILABLE, "server is shutting down")
NO_ANSWER: Final = Status(StatusCode.INTERNAL, "the method sent no answer")

_OK_BLOCK: Final = encode_headers(status_trailers(OK))
_MAX_TRAILERS: Final = 8192
"""Bytes of trailers: more than this, clients drop a status or the whole response (grpc-core's default is 8 KiB)."""


class Call(CallStream):
    """One call, as its handler sees it: purerpc's second parameter, ``request``.

    ``status`` is what the call ended with, None while it runs; interceptors find it set when they are left. A Call is an async iterator
    over its request's messages; a unary method's handler has been given the only one.
    """

    __slots__ = ("_ordered", "_scope", "_trailing", "status")

    def __init__(self, connection: Connection, stream_id: int, request: Request, now: float) -> None:
        super().__init__(connection, stream_id, request)
        self._scope = trio.CancelScope(deadline=now + request.timeout)
        self._ordered: Status | None = None
        self._trailing: list[tuple[bytes, bytes]] | None = None
        self.status: Status | None = None

    # --- what the handler asks ---

    @property
    def method(self) -> Method:
        return self._request.method

    @property
    def path(self) -> str:
        """``/service/method``."""
        return self._request.method.path

    @property
    def service_name(self) -> str:
        return self._request.method.service

    @property
    def method_name(self) -> str:
        return self._request.method.name

    @property
    def metadata(self) -> Metadata:
        """What the caller sent with the call."""
        return self._request.metadata

    @property
    def custom_metadata(self) -> tuple[tuple[str, MetadataValue], ...]:
        """The metadata as pairs, under the name that purerpc's request has for it."""
        return self._request.metadata.pairs()

    @property
    def authority(self) -> str:
        """What the caller called the server; empty if it did not say."""
        return self._request.authority

    @property
    def peer(self) -> str:
        """The caller's address: ``ipv4:1.2.3.4:5``, ``ipv6:[::1]:5`` or ``unix:/path``."""
        return self._connection.transport.peer

    @property
    def peer_certificate(self) -> Mapping[str, Any] | None:
        """The caller's certificate as ssl.SSLSocket.getpeercert() gives it; None without TLS, or if the caller showed none."""
        return self._connection.transport.peer_certificate

    @property
    def deadline(self) -> float:
        """When the call ends by itself, in seconds of Trio's clock; math.inf if the caller gave no time."""
        return self._scope.deadline

    def time_remaining(self) -> float:
        """Seconds until the deadline: 0 once it has passed, math.inf without one."""
        return math.inf if self._scope.deadline == math.inf else max(0.0, self._scope.deadline - trio.current_time())

    def set_trailing_metadata(self, metadata: Mapping[str, MetadataValue] | Iterable[tuple[str, MetadataValue]]) -> None:
        """Send ``metadata`` with the status, in place of what was set before. Raises ValueError or TypeError naming the field."""
        self._trailing = encode_metadata(metadata)

    # --- how it ends ---

    def end(self, status: Status) -> None:
        """End the call with ``status`` as soon as its handler has unwound. The first status given stands."""
        if self._ordered is None and self._open:
            self._ordered = status
            self._scope.cancel()

    def cut(self, status: Status) -> None:
        """Like :meth:`end`, for a call whose stream is gone: nothing is sent, ``status`` is for the record."""
        self.end(status)  # first, so that what waits is cancelled and not woken
        self.stream_closed()

    def end_now(self) -> None:
        """Send the status that the call was told to end with, without waiting any longer for its handler."""
        if self._open and self._ordered is not None:
            self._finish(self._ordered, None)

    @property
    def ended(self) -> bool:
        return self._ordered is not None

    async def run(self) -> None:
        """The call's task, from its request to its status."""
        connection = self._connection
        failure: BaseException | None = None
        try:
            with self._scope:
                if self._ordered is not None:
                    await trio.lowlevel.checkpoint()  # raises Cancelled: it ended before it began
                elif connection.interceptors:
                    await serve_intercepted(self, connection.interceptors, self._request.method.serve)
                else:
                    await self._request.method.serve(self)
        except Exception as exc:  # noqa: BLE001 - where a handler's failure becomes a status
            failure = exc
        except BaseException as exc:  # noqa: BLE001 - raised again, but for the handler's part
            failure = exc
            # What is left of a group is Cancelled, from around the connection, or the end of the program; the handler's part ends here.
            rest = exc.split(Exception)[1] if isinstance(exc, BaseExceptionGroup) else exc
            raise rest or exc from None
        finally:
            if failure is None and self._scope.cancelled_caught:
                self._finish(self._ordered or DEADLINE_EXCEEDED, None)
            else:
                self._finish(*self._outcome(failure))
                if failure is not None:
                    self._log(failure)
                    failure = None  # its traceback holds this frame: a cycle, which only a garbage collection would free
            connection.call_ended(self)

    def state_outcome(self, failure: BaseException | None) -> None:
        """Set ``status`` to what the call is about to end with, for the interceptors that are left next."""
        self.status = self._outcome(failure)[0]

    def _outcome(self, failure: BaseException | None) -> tuple[Status, RpcFailedError | None]:
        """The status that the call ends with, and the error that has its details."""
        if failure is None and (self._open or self._ordered is None):
            if self._broken:
                return Status(StatusCode.INTERNAL, "a message was cut"), None
            if not self._sent and not self._request.method.response_stream:
                return NO_ANSWER, None
            return OK, None
        if self._ordered is not None:
            return self._ordered, None
        if self._scope.cancel_called:
            return DEADLINE_EXCEEDED, None
        if isinstance(failure, Exception):
            return status_of(failure)
        return SHUTTING_DOWN, None

    def _finish(self, status: Status, error: RpcFailedError | None) -> None:
        """Send ``status`` if the stream still takes it. Does not wait: trailers are not flow-controlled (RFC 9113 section 5.2)."""
        self.status = status
        if not self._open:
            return
        block = _OK_BLOCK if status is OK and self._trailing is None else encode_headers(self._trailers(status, error))
        if not self._headers_sent:
            block = RESPONSE_BLOCK + block  # gRPC's Trailers-Only
        self._connection.core.send_headers(self.stream_id, block, True)
        self._connection.outbox.schedule()
        self.stream_closed()

    def _trailers(self, status: Status, error: RpcFailedError | None) -> list[tuple[bytes, bytes]]:
        trailers = status_trailers(status, error)
        if self._trailing is not None:
            trailers += self._trailing
        if sum(len(name) + len(value) + 32 for name, value in trailers) > _MAX_TRAILERS and error is not None:
            logger.warning("details of a status of %s are over %d bytes and were left out", self.path, _MAX_TRAILERS)
            trailers = [field for field in trailers if field[0] != b"grpc-status-details-bin"]
        return trailers

    def _log(self, failure: BaseException) -> None:
        own: BaseException | None = failure
        if isinstance(failure, BaseExceptionGroup):
            own = failure.split(Exception)[0]
        elif not isinstance(failure, Exception):
            own = None
        if self._ordered is not None and isinstance(own, trio.BrokenResourceError):
            return  # it waited behind a shield, and heard that the call has ended
        if own is not None and status_of(own)[1] is None:
            logger.error("handler of %s failed", self.path, exc_info=own)
