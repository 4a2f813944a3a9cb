"""One life of one engine core: its pair of sockets, its requests and utility calls, from its HELLO to its loss.

Rules that hold here:

* A life has sockets of its own and is never revived: an engine that comes back says HELLO and gets a new
  :class:`EngineConnection`, and nothing that the old one still says can be heard.
* One task reads outputs. It decodes each message once, hands every output to its request without waiting, and lets the other
  tasks run after a turn's worth of them. Once it has not seen the end of what waits for ``BEHIND``, outputs of several messages
  merge, which makes them cheaper (``merging``), until it has.
* ``fail`` is how a life ends badly, once: health first, then every request and utility call.
* What is sent is ``outgoing``'s business, and when.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Sequence
from typing import Final, Protocol

import trio
import zmq

from trio_frontend.engine.base import (
    EngineError,
    EngineInfo,
    EngineOutput,
    EngineState,
    FinishReason,
)
from trio_frontend.engine.outputs import RequestOutputs
from trio_frontend.engine.vllm import wire
from trio_frontend.engine.vllm.balancing import Load
from trio_frontend.engine.vllm.conversion import FINISH_REASONS, engine_error, engine_output
from trio_frontend.engine.vllm.health import Activity, watch_stall
from trio_frontend.engine.vllm.merging import MERGED_MESSAGES, Held, merge, release
from trio_frontend.engine.vllm.outgoing import Outgoing
from trio_frontend.engine.vllm.sockets import RECEIVE_HWM, Addresses, EngineSockets, Heartbeats
from trio_frontend.engine.vllm.transport import source_fd, speaks_current_protocol
from trio_frontend.engine.vllm.utility import PendingCall, PendingCalls

__all__ = ["EngineConnection", "Owner", "Step"]

logger = logging.getLogger(__name__)

TURN: Final = 64
"""Outputs handled before other tasks run: one step of a full batch, so that its tokens are written before the next is read."""

FEW: Final = 3
"""Messages in a row before each of which the socket is asked whether one waits; where there are more, most likely there is one."""

BEHIND: Final = 0.05
"""Seconds in which more outputs came than were handled, and from which on they merge: two or three steps of an engine."""

LAST_WORDS_TIMEOUT: Final = 0.1
"""Seconds to wait for the rest of the outputs when the input connection is lost first: a dying engine closes both."""

LINGER: Final = 0.5
"""Seconds that the last aborts may take to leave when we close."""


class Step(enum.Enum):
    """What an engine does to join, in this order, but for the last three which come as they come."""

    HELLO = "HELLO"
    READY_RESPONSE = "ready response (sent once the model is loaded)"
    OUTPUT_CONNECTION = "connection to the output address"
    READY = "READY"


class Owner(Protocol):
    """Who keeps the lives of all ranks. Called from within a connection's tasks: it must not block and not raise."""

    def step_done(self, life: EngineConnection) -> None:
        """A step of the handshake was seen; ``life.serving`` tells whether it was the last."""

    def failed(self, life: EngineConnection, state: EngineState, detail: str) -> None:
        """``life`` is over. Its requests are still open."""

    def stalled(self, life: EngineConnection, detail: str) -> None:
        """Requests run there and nothing comes."""

    def flowing(self, life: EngineConnection) -> None:
        """A stall is over."""


class EngineConnection:
    """See the module. ``run`` is its task; everything else is called from the same Trio run.

    ``epoch`` counts the lives of this rank. ``missing`` are the steps that have not been seen; with none left it serves.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        rank: int,
        epoch: int,
        bind: Addresses,
        *,
        heartbeats: Heartbeats | None,
        stall_timeout: float | None,
        missing: Sequence[Step],
        owner: Owner,
    ) -> None:
        self.rank = rank
        self.epoch = epoch
        self.identity = rank.to_bytes(2, "little")
        self.info: EngineInfo | None = None
        self.load = Load()
        self.activity = Activity()
        self.calls = PendingCalls()
        self.missing: dict[Step, float] = dict.fromkeys(missing, trio.current_time())
        self.failure: str | None = None
        self._owner = owner
        self._stall_timeout = stall_timeout
        self._requests: dict[str, RequestOutputs] = {}
        self._held: Held | None = None
        self._ended = trio.Event()
        self._output_lost = trio.Event()
        self._stranger_seen = False
        self._sockets = EngineSockets(context, bind, heartbeats)
        self._outgoing = Outgoing(rank, self.identity, self._sockets.input)
        self.addresses = self._sockets.addresses

    def __repr__(self) -> str:
        return f"<EngineConnection rank {self.rank} life {self.epoch}{' failed' if self.failure else ''}>"

    @property
    def serving(self) -> bool:
        return not self.missing and self.failure is None and not self._ended.is_set()

    @property
    def starting(self) -> bool:
        return bool(self.missing) and self.failure is None and not self._ended.is_set()

    @property
    def in_flight(self) -> int:
        """Requests of ours that this engine has."""
        return len(self._requests)

    # Life.

    async def run(self) -> None:
        """Serve this connection until it fails, is ended, or is cancelled; then tell the engine to stop what we had there."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive_ready)
                nursery.start_soon(self._receive_outputs)
                nursery.start_soon(self._watch_input)
                nursery.start_soon(self._watch_output)
                nursery.start_soon(self._outgoing.run)
                nursery.start_soon(self._watch_stall)
                await self._ended.wait()
                nursery.cancel_scope.cancel()
        finally:
            if self.failure is None:
                self._outgoing.abort(self._requests)
                self._end_all("the engine's client was closed")
                self._outgoing.flush()
            self._ended.set()
            self._sockets.close(0.0 if self.failure else LINGER)

    def end(self) -> None:
        """End this life without calling it a failure: it never served, or the client is closing."""
        self._ended.set()

    def fail(self, state: EngineState, detail: str) -> None:
        """End this life. Health is published before any request ends; what was delivered to requests stays delivered."""
        if self.failure is not None or self._ended.is_set():
            return
        self._deliver_held()
        self.failure = detail
        self._owner.failed(self, state, detail)
        self._end_all(detail)
        self._ended.set()

    def done(self, step: Step) -> None:
        """The engine has taken ``step``; the last one missing makes it serve."""
        if self.failure is None and self.missing.pop(step, None) is not None:
            self._owner.step_done(self)

    def _end_all(self, reason: str) -> None:
        requests, self._requests = self._requests, {}
        self.activity.idle()
        for outputs in requests.values():
            outputs.close_with_error(EngineError(f"engine failed during generation: {reason}"))
        self.calls.fail_all(reason)

    def close(self) -> None:
        """Close the sockets of a life that never ran."""
        self._ended.set()
        self._sockets.close()

    # Requests and calls, from the tasks that make them.

    def add(self, request_id: str, body: bytes, outputs: RequestOutputs) -> None:
        """Send an ADD, soon. EngineUnavailableError if the engine does not read."""
        self._outgoing.add(body)
        if not self._requests:
            self.activity.busy(trio.current_time())
        self._requests[request_id] = outputs

    def has(self, request_id: str) -> bool:
        return request_id in self._requests

    def abort(self, request_id: str) -> RequestOutputs | None:
        """Take the request out and tell the engine soon. None if it has ended, or never was here."""
        outputs = self._forget(request_id)
        if outputs is not None:
            self._outgoing.abort((request_id,))
        return outputs

    def _forget(self, request_id: str) -> RequestOutputs | None:
        outputs = self._requests.pop(request_id, None)
        if outputs is not None and not self._requests:
            self.activity.idle()
        return outputs

    def call(self, method: str, args: Sequence[object], client_index: int) -> PendingCall:
        """Send a utility call. ValueError if ``args`` cannot be encoded, EngineUnavailableError as ``add``."""
        call = self.calls.start(method)
        try:
            try:
                body = wire.encode([client_index, call.call_id, method, list(args)])
            except (TypeError, OverflowError, RecursionError) as error:
                raise ValueError(f"the arguments of {method} cannot be sent: {error}") from error
            self._outgoing.utility(body)
        except BaseException:
            self.calls.forget(call)
            raise
        return call

    # Tasks.

    async def _receive_ready(self) -> None:
        """The engine's ready response. Then this task ends, and the socket is only sent on."""
        while Step.READY_RESPONSE in self.missing:
            frames = await self._sockets.input.receive()
            if len(frames) != 2 or frames[0].bytes != self.identity:
                logger.warning("rank %d: a stranger sent to its input address: %s", self.rank, frames[0].bytes[:16].hex())
                continue
            try:
                self.info = wire.decode_ready(frames[1], self.rank)
            except wire.WireError as error:
                self.fail(EngineState.UNHEALTHY, str(error))
                return
            self._sockets.input_peers.engine_fd = source_fd(frames[1])
            self.done(Step.READY_RESPONSE)

    async def _watch_input(self) -> None:
        async for event in self._sockets.input_monitor:
            if self._sockets.input_peers.gone(event):
                with trio.move_on_after(LAST_WORDS_TIMEOUT):
                    await self._output_lost.wait()
                self._lost()

    async def _watch_output(self) -> None:
        async for event in self._sockets.output_monitor:
            if self._sockets.output_peers.gone(event):
                self._output_lost.set()
                self._lost()
            elif self._sockets.output_peers.connected:
                self.done(Step.OUTPUT_CONNECTION)

    async def _watch_stall(self) -> None:
        if self._stall_timeout is not None:
            owner = self._owner
            await watch_stall(
                self.activity, self._stall_timeout, lambda detail: owner.stalled(self, detail), lambda: owner.flowing(self)
            )

    def _lost(self) -> None:
        """Its connection went: hear what it said before, which may say more than that."""
        output = self._sockets.output
        for _ in range(RECEIVE_HWM):  # as many as can wait: an engine whose input alone is lost may go on for ever
            if self.failure is not None or (frames := output.take()) is None:
                break
            self._handle(frames)
        self.fail(EngineState.LOST, "the connection to the engine was lost")

    async def _receive_outputs(self) -> None:
        socket = self._sockets.output
        while True:
            handled = taken = 0
            began = math.inf
            while taken >= FEW or socket.readable():
                frames = socket.take()
                if frames is None:
                    break
                taken += 1
                handled += self._handle(frames)
                if self.failure is not None:
                    return
                if handled >= TURN:
                    handled = 0
                    began = min(began, trio.current_time())
                    await trio.lowlevel.checkpoint()
                    if trio.current_time() - began > BEHIND:
                        self._catch_up()
                        if self.failure is not None:
                            return
            await socket.wait()

    def _catch_up(self) -> None:
        """Take several messages in as one."""
        self._held = {}
        for _ in range(MERGED_MESSAGES):
            frames = self._sockets.output.take()
            if frames is None:
                break
            self._handle(frames)
            if self.failure is not None:
                return
        self._deliver_held()

    def _deliver_held(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._deliver(release(held), ())

    def _handle(self, frames: Sequence[zmq.Frame]) -> int:
        """Take one message in. The number of outputs in it, at least 1."""
        frame = frames[0]
        if len(frame) == len(wire.ENGINE_CORE_DEAD) and frame.bytes == wire.ENGINE_CORE_DEAD:
            self._fail_unless_stranger(frame, "the engine said that it is dead")
            return 1
        try:
            message = wire.decode_outputs(frames)
            self._deliver(message.outputs if self._held is None else merge(self._held, message.outputs), frames)
        except wire.WireError as error:
            self._fail_unless_stranger(frame, str(error))
            return 1
        if self._sockets.output_peers.engine_fd is None:
            self._sockets.output_peers.engine_fd = source_fd(frame)
        now = trio.current_time()
        if message.outputs:
            self.activity.output(now)
        if message.scheduler_stats is not None:
            self.load.report(message.scheduler_stats, now)
        if message.utility_output is not None:
            self.calls.answer(message.utility_output)
        return len(message.outputs) or 1

    def _fail_unless_stranger(self, frame: zmq.Frame, detail: str) -> None:
        """``frame`` ends this life if it is the engine's: anyone can connect to its port, and ZeroMQ takes what a port scanner says there
        for messages of its first protocol."""
        engine_fd = self._sockets.output_peers.engine_fd
        if speaks_current_protocol(frame) and (engine_fd is None or source_fd(frame) in (engine_fd, None)):
            self.fail(EngineState.UNHEALTHY, detail)
        elif not self._stranger_seen:
            self._stranger_seen = True
            logger.warning("rank %d: a stranger sent to its output address, which is ignored: %s", self.rank, detail)

    def _deliver(self, outputs: Sequence[wire.Output], frames: Sequence[zmq.Frame]) -> None:
        """The hot path: a plain output costs a lookup, an object and its delivery."""
        requests = self._requests
        for output in outputs:
            stream = requests.get(output.request_id)
            if stream is None:
                continue  # aborted a moment ago
            if output.finish_reason is not None:
                self._finish(output, stream, frames)
            elif output.new_logprobs is None and output.new_prompt_logprobs_tensors is None:
                if output.new_token_ids:
                    stream.put(EngineOutput(output.new_token_ids))
            else:
                stream.put(engine_output(output, frames, None))

    def _finish(self, output: wire.Output, stream: RequestOutputs, frames: Sequence[zmq.Frame]) -> None:
        self._forget(output.request_id)
        reason = FINISH_REASONS.get(output.finish_reason)
        if reason is not None and reason is not FinishReason.ERROR:
            stream.put(engine_output(output, frames, reason))
            return
        if output.new_token_ids:
            stream.put(engine_output(output, frames, None))
        stream.close_with_error(engine_error(output))
