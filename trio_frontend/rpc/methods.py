"""From purerpc's services to methods that can be called: one record per method, made once, with the way to run its cardinality.

Rules that hold here:

* A request of the wrong number of messages is UNIMPLEMENTED (gRPC's status code document, "request cardinality violation"); one that
  does not parse is INTERNAL. Neither reaches the handler.
* A streaming handler is a coroutine that sends through its call, or an async generator (purerpc's form), which is closed when it is
  left, however it is left.
* A unary handler runs when its request is complete and known to be the only message.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from purerpc.rpc import Cardinality

from trio_frontend.rpc.status import StatusCode, StatusError

if TYPE_CHECKING:
    from purerpc.server import Service, Servicer

    from trio_frontend.rpc.call import Call

__all__ = ["Method", "methods_of"]

Handler = Callable[..., Any]


class Method:
    """One method: ``path`` is ``/service/method``, ``serve(call)`` receives, runs the handler and sends what it answers."""

    __slots__ = ("_handler", "name", "parse", "path", "request_stream", "response_stream", "serve", "service")

    def __init__(self, service: str, name: str, handler: Handler, cardinality: Cardinality, request_type: Any) -> None:
        self.service = service
        self.name = name
        self.path = f"/{service}/{name}"
        self.parse: Callable[[bytes], Any] = request_type.FromString
        self._handler = handler
        self.request_stream = cardinality in (Cardinality.STREAM_UNARY, Cardinality.STREAM_STREAM)
        self.response_stream = cardinality in (Cardinality.UNARY_STREAM, Cardinality.STREAM_STREAM)
        self.serve: Callable[[Call], Awaitable[None]] = {
            Cardinality.UNARY_UNARY: self._unary_unary,
            Cardinality.UNARY_STREAM: self._unary_stream,
            Cardinality.STREAM_UNARY: self._stream_unary,
            Cardinality.STREAM_STREAM: self._stream_stream,
        }[cardinality]

    async def _unary_unary(self, call: Call) -> None:
        message = call.take_only_message()
        if message is None:
            message = await _only_message(call)
        await call.send_only(await self._handler(message, request=call))

    async def _unary_stream(self, call: Call) -> None:
        message = call.take_only_message()
        if message is None:
            message = await _only_message(call)
        await _send_all(call, self._handler(message, request=call))

    async def _stream_unary(self, call: Call) -> None:
        await call.send_only(await self._handler(call, request=call))

    async def _stream_stream(self, call: Call) -> None:
        await _send_all(call, self._handler(call, request=call))

    def __repr__(self) -> str:
        return f"<Method {self.path}>"


async def _only_message(call: Call) -> Any:
    message = await call.receive()
    if message is None:
        raise StatusError(StatusCode.UNIMPLEMENTED, "the method takes one message, the request has none")
    if await call.receive() is not None:
        raise StatusError(StatusCode.UNIMPLEMENTED, "the method takes one message, the request has more")
    return message


async def _send_all(call: Call, answer: Awaitable[None] | AsyncIterator[Any]) -> None:
    if isinstance(answer, AsyncGenerator):
        async with aclosing(answer):
            async for message in answer:
                await call.send(message)
    elif isinstance(answer, AsyncIterator):
        async for message in answer:
            await call.send(message)
    else:
        await answer


def methods_of(services: Iterable[Service | Servicer]) -> tuple[dict[bytes, Method], frozenset[bytes]]:
    """The methods of purerpc ``services`` (or servicers) by path, and the services' names.

    Raises ValueError for two services of one name, and TypeError for something that is neither.
    """
    methods: dict[bytes, Method] = {}
    names: set[bytes] = set()
    for given in services:
        service = getattr(given, "service", given)
        if not isinstance(getattr(service, "methods", None), dict):
            raise TypeError(f"{given!r} is no purerpc Service or Servicer")
        if service.name.encode() in names:
            raise ValueError(f"service {service.name} is given twice")
        names.add(service.name.encode())
        for name, bound in service.methods.items():
            signature = bound.signature
            method = Method(service.name, name, bound.method_fn, signature.cardinality, signature.request_type)
            methods[method.path.encode()] = method
    return methods, frozenset(names)
