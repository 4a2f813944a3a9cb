"""The stream of one request's outputs: what lies between an engine's reader and the task that consumes them.

Rules that hold here:

* ``put`` never blocks. The channel has room for every output that a request of ``max_tokens`` can have: one for each token
  and one more for an end without a token. An engine that sends more broke its protocol, and the request ends with an error.
* Order is kept: an output goes past the channel into the sink only while the consumer is parked on an empty channel.
* The stream ends once: with the output that has a finish_reason, or with the first error. What comes after is dropped.

Reader and consumer are tasks of one Trio run; nothing here may be called from another thread.
"""

from __future__ import annotations

import logging

import trio

from trio_frontend.engine.base import EngineError, EngineOutput, OutputStream, Sink

__all__ = ["RequestOutputs"]

logger = logging.getLogger(__name__)


class RequestOutputs(OutputStream):
    """An :class:`OutputStream` with the reader's end of it: ``put``, ``close_with_error`` and ``close``.

    ``max_tokens`` is the request's; it bounds the channel.
    """

    __slots__ = ("_error", "_finished", "_parked", "_queued", "_receive", "_send", "_sink")

    def __init__(self, max_tokens: int) -> None:
        self._send: trio.MemorySendChannel[EngineOutput]
        self._receive: trio.MemoryReceiveChannel[EngineOutput]
        self._send, self._receive = trio.open_memory_channel(max_tokens + 1)
        self._sink: Sink | None = None
        self._error: EngineError | None = None
        self._finished = False
        # True while the consumer is parked in the channel's receive() and has been given nothing yet.
        self._parked = False
        # Outputs that were put and not received; the channel's own count costs an object per look.
        self._queued = 0

    # The reader's end.

    @property
    def finished(self) -> bool:
        """The last output or an error was put, or the consumer has gone: whatever is put from here on is dropped."""
        return self._finished

    def put(self, output: EngineOutput) -> None:
        """Deliver ``output``: to the sink if the consumer is parked and it takes it, into the channel otherwise."""
        if self._finished:
            return
        if self._parked and self._sink is not None and output.finish_reason is None:
            try:
                if self._sink(output):
                    return
            except Exception:
                # One consumer's bug must not end the reader, which serves all requests.
                logger.exception("an output sink raised; its request is ended")
                self.close_with_error(EngineError("the consumer of the outputs failed"))
                return
            if self._finished:  # by the sink
                return
        self._parked = False
        try:
            self._send.send_nowait(output)
        except trio.WouldBlock:
            self.close_with_error(EngineError("the engine sent more outputs than max_tokens allows"))
            return
        self._queued += 1
        if output.finish_reason is not None:
            self._finished = True
            self._send.close()

    def close_with_error(self, error: EngineError) -> None:
        """End the stream: the consumer gets what is queued, then ``error``. Nothing happens if it has ended already."""
        if self._finished:
            return
        self._finished = True
        self._error = error
        self._parked = False
        self._send.close()

    def close(self) -> None:
        """The consumer has gone: free what is queued, drop what still comes. May be called again."""
        self._finished = True
        self._sink = None
        self._send.close()
        self._receive.close()

    # The consumer's end.

    def __aiter__(self) -> RequestOutputs:
        return self

    async def __anext__(self) -> list[EngineOutput]:
        self._parked = not self._queued
        try:
            outputs = [await self._receive.receive()]
        except trio.EndOfChannel:
            if self._error is not None:
                raise self._error from None
            raise StopAsyncIteration from None
        finally:
            self._parked = False
        receive_nowait = self._receive.receive_nowait
        for _ in range(self._queued - 1):
            outputs.append(receive_nowait())
        self._queued = 0
        return outputs

    def set_sink(self, sink: Sink | None) -> None:
        self._sink = sink
