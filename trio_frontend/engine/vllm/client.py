"""The engine that services see: any number of vLLM engine cores behind one :class:`trio_frontend.engine.base.Engine`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import trio
import zmq
from trio_util import AsyncValue

from trio_frontend.engine.base import (
    Capabilities,
    Engine,
    EngineHealth,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineState,
    EngineUnavailableError,
    FinishReason,
    OutputStream,
    UtilityCallError,
)
from trio_frontend.engine.outputs import RequestOutputs
from trio_frontend.engine.vllm import wire
from trio_frontend.engine.vllm.add_request import encode_add
from trio_frontend.engine.vllm.balancing import Balancer
from trio_frontend.engine.vllm.connection import EngineConnection, Step
from trio_frontend.engine.vllm.endpoints import Endpoints, bound_to_this_host, is_this_host
from trio_frontend.engine.vllm.handshake import Handshake
from trio_frontend.engine.vllm.health import HealthBoard
from trio_frontend.engine.vllm.joining import Joining
from trio_frontend.engine.vllm.sockets import Addresses, Heartbeats
from trio_frontend.engine.vllm.utility import PendingCall

__all__ = ["MissingStep", "VllmEngine", "VllmOptions"]

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT: Final = 0.9
"""Seconds: a vanished host is to be noticed within one, and the ends of its requests take a moment too."""

MAX_HEARTBEAT_TIMEOUT: Final = 3600.0
"""Seconds. ZeroMQ counts milliseconds in an int."""

STEPS = (Step.HELLO, Step.READY_RESPONSE, Step.OUTPUT_CONNECTION, Step.READY)


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Knobs of the engine client. Times are in seconds.

    ``data_parallel_size``: engine cores to wait for. ``advertise_host``: the address of this machine that engines are given; None: the host they said HELLO to.
    ``heartbeat_timeout``: of an engine on another host no sign of life came for so long: it is taken for lost, even if it comes back, so
    a network or a host that stalls wants more; None: never. An engine on this host needs no heartbeats: the end of its process is seen.
    ``stall_timeout``: requests run and nothing comes for so long: NOT_SERVING until something does; None: never.
    ``client_index``: this frontend's place among several that share the engines; ``other_frontends``: where those others meet
    the engines, in the order of their places, each with its addresses by rank (only for the one that does the handshake).
    ``max_logprobs`` and ``supports_multimodal`` are what an engine does not say of itself (vLLM's --max-logprobs, the model).
    """

    data_parallel_size: int = 1
    advertise_host: str | None = None
    engine_reconnect: bool = True
    heartbeat_timeout: float | None = HEARTBEAT_TIMEOUT
    stall_timeout: float | None = None
    utility_timeout: float = 60.0
    client_index: int = 0
    other_frontends: tuple[tuple[Addresses, ...], ...] = ()
    max_logprobs: int = 20
    supports_multimodal: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.data_parallel_size <= 2**16:
            raise ValueError(f"data_parallel_size is {self.data_parallel_size}, it must be from 1 to 65536")
        if self.client_index < 0:
            raise ValueError(f"client_index is {self.client_index}, it must not be negative")
        for addresses in self.other_frontends:
            if len(addresses) != self.data_parallel_size:
                raise ValueError(
                    f"other_frontends has {len(addresses)} pairs of addresses for {self.data_parallel_size} engines"
                )
        if self.heartbeat_timeout is not None and self.heartbeat_timeout > MAX_HEARTBEAT_TIMEOUT:
            raise ValueError(
                f"heartbeat_timeout is {self.heartbeat_timeout}, it must be at most {MAX_HEARTBEAT_TIMEOUT:g} seconds"
            )
        for name in ("heartbeat_timeout", "utility_timeout", "stall_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, it must be more than 0 seconds")


@dataclass(frozen=True, slots=True)
class MissingStep:
    """What a start still waits for: ``step`` of the engine of ``rank``, since ``seconds``."""

    rank: int
    step: Step
    seconds: float

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.step.value}, for {self.seconds:.0f} s"


class Generation:
    """``VllmEngine.generate``'s scope. A class, because a decorated generator costs a tenth of all that a short request does."""

    __slots__ = ("_engine", "_life", "_outputs", "_request")

    def __init__(self, engine: VllmEngine, request: EngineRequest) -> None:
        self._engine = engine
        self._request = request

    async def __aenter__(self) -> RequestOutputs:
        self._life, self._outputs = self._engine.start(self._request)
        return self._outputs

    async def __aexit__(self, *_: object) -> None:
        self._life.abort(self._request.request_id)
        self._outputs.close()


class VllmEngine(Engine):
    """Engine cores over ZeroMQ. Made by :func:`open_engine`, which closes it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], nursery: trio.Nursery, options: VllmOptions) -> None:
        self._context = context
        self._nursery = nursery
        self._options = options
        self._heartbeats = Heartbeats.within(options.heartbeat_timeout) if options.heartbeat_timeout is not None else None
        self._ranks = range(options.data_parallel_size)
        self._board = HealthBoard(self._ranks)
        self._balancer = Balancer()
        self._lives: dict[int, EngineConnection] = {}
        self._epochs = dict.fromkeys(self._ranks, 0)
        self._infos: dict[int, EngineInfo] = {}
        self._serving: list[EngineConnection] = []
        self._closed = False
        self._opened_at = trio.current_time()
        self.health: AsyncValue[EngineHealth] = self._board.value
        self.changed = trio.Event()
        """Is set, and replaced, when ``missing`` may have changed."""
        self._members: Handshake | Joining
        self._capabilities = Capabilities(
            0, (), supports_multimodal=options.supports_multimodal, max_logprobs=options.max_logprobs
        )

    def listen(self, handshake_address: str, endpoints: Endpoints) -> None:
        """Take in the engines that say HELLO to ``handshake_address``. OSError if it cannot be bound."""
        if self._options.client_index > len(self._options.other_frontends):
            raise ValueError(f"client_index is {self._options.client_index}, and other_frontends are fewer")
        self._members = Handshake(
            self._context,
            handshake_address,
            self._ranks,
            partial(self._connect, endpoints),
            heartbeats=None if bound_to_this_host(handshake_address) else self._heartbeats,
            reconnect=self._options.engine_reconnect,
        )
        self._nursery.start_soon(self._members.run)

    def join(self, addresses: Sequence[Addresses]) -> None:
        """Take in the engines that were told ``addresses``, one pair for each rank. OSError if one cannot be bound."""
        if len(addresses) != len(self._ranks):
            raise ValueError(f"there are {len(addresses)} pairs of addresses for {len(self._ranks)} engines")
        steps = (Step.READY_RESPONSE, Step.OUTPUT_CONNECTION)
        open_life = partial(self._open_life, steps=steps)
        self._members = Joining(addresses, open_life, reconnect=self._options.engine_reconnect)
        self._nursery.start_soon(self._members.run)

    @property
    def handshake_address(self) -> str:
        """Where engines say HELLO, with the port that the system chose if none was named; or where they join without."""
        return self._members.address

    # Lives.

    def _connect(self, endpoints: Endpoints, rank: int, peer: str | None) -> tuple[EngineConnection, bytes]:
        life = self._open_life(rank, endpoints.bind(rank, self._epochs[rank] + 1), STEPS, peer)
        self._nursery.start_soon(life.run)
        told = [others[rank] for others in self._options.other_frontends]
        told.insert(self._options.client_index, endpoints.told(life.addresses, peer))
        return life, wire.encode_init([pair.input for pair in told], [pair.output for pair in told])

    def _open_life(self, rank: int, bind: Addresses, steps: Sequence[Step], peer: str | None = None) -> EngineConnection:
        self._epochs[rank] += 1
        options = self._options
        here = bound_to_this_host(bind.input) or (peer is not None and is_this_host(peer))
        life = EngineConnection(
            self._context,
            rank,
            self._epochs[rank],
            bind,
            heartbeats=None if here else self._heartbeats,
            stall_timeout=options.stall_timeout,
            missing=steps,
            owner=self,
        )
        self._lives[rank] = life
        return life

    def step_done(self, life: EngineConnection) -> None:
        self._change()
        if not life.serving or life.info is None:
            return
        logger.info("rank %d serves: %s", life.rank, _described(life.info))
        self._infos[life.rank] = life.info
        infos = tuple(self._infos[rank] for rank in sorted(self._infos))
        self._capabilities = Capabilities(
            max_model_len=min(info.max_model_len for info in infos),
            engines=infos,
            supports_lora=all(info.supports_lora for info in infos),
            supports_multimodal=self._options.supports_multimodal,
            max_logprobs=self._options.max_logprobs,
        )
        self._serving = [life for life in self._lives.values() if life.serving]
        self._board.serving(life.rank)

    def failed(self, life: EngineConnection, state: EngineState, detail: str) -> None:
        self._serving = [other for other in self._serving if other is not life]
        if life.missing:
            logger.warning("rank %d failed before it served: %s", life.rank, detail)
        else:
            self._board.failed(life.rank, state, detail)
        self._change()
        self._members.life_ended(life.rank)

    def _change(self) -> None:
        changed, self.changed = self.changed, trio.Event()
        changed.set()

    def stalled(self, life: EngineConnection, detail: str) -> None:
        self._board.stalled(life.rank, detail)

    def flowing(self, life: EngineConnection) -> None:
        self._board.flowing(life.rank)

    def fail_all(self, state: EngineState, detail: str) -> None:
        """Every engine is gone at once: the process that ran them has ended."""
        for life in list(self._lives.values()):
            life.fail(state, detail)

    def end(self) -> None:
        """Say no more of the engines: they are about to be stopped, and that is no failure. Live requests end."""
        self._closed = True
        self._serving = []
        for life in self._lives.values():
            life.end()

    def missing(self) -> list[MissingStep]:
        """What the start still waits for; empty once every engine has joined."""
        now = trio.current_time()
        found = []
        for rank in self._ranks:
            life = self._lives.get(rank)
            if life is None or not (life.serving or life.starting):
                found.append(MissingStep(rank, Step.HELLO, now - self._opened_at))
            else:
                found += [MissingStep(rank, step, now - since) for step, since in life.missing.items()]
        return found

    @property
    def strangers(self) -> Sequence[str]:
        """What came to the handshake address lately and was no engine of ours."""
        return tuple(self._members.strangers)

    def reported_requests(self) -> dict[int, tuple[int, int]]:
        """By rank, how many requests each engine that serves said last that it runs, and how many wait there."""
        return {life.rank: (life.load.running, life.load.waiting) for life in self._serving}

    # Engine.

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def live_requests(self) -> int:
        return sum(life.in_flight for life in self._lives.values())

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[OutputStream]:
        return Generation(self, request)

    def start(self, request: EngineRequest) -> tuple[EngineConnection, RequestOutputs]:
        """Send ``request`` to one of the engines. Where it went, and what comes of it; to be ended with :meth:`EngineConnection.abort`.

        Raises as :meth:`generate`, and ValueError for a request that an engine could not take.
        """
        serving = self._serving
        if not serving:
            raise EngineUnavailableError(self._unavailable())
        life = self._balancer.pick(serving, request.data_parallel_rank, trio.current_time())
        for other in serving:
            if other.has(request.request_id):
                raise ValueError(f"request_id {request.request_id!r} is that of a live request")
        assert life.info is not None  # it serves
        body = encode_add(request, life.info, client_index=self._options.client_index, arrival_time=time.time())
        outputs = RequestOutputs(request.sampling.max_tokens)
        life.add(request.request_id, body, outputs)
        return life, outputs

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for life in self._serving:
                outputs = life.abort(request_id)
                if outputs is not None:
                    outputs.put(EngineOutput((), finish_reason=FinishReason.ABORT))
                    break

    async def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        limit = self._options.utility_timeout if timeout is None else timeout
        lives = [life for rank in self._ranks if (life := self._lives.get(rank)) is not None and life.serving]
        if len(lives) < len(self._ranks):
            raise EngineUnavailableError(self._unavailable())
        calls: list[tuple[EngineConnection, PendingCall]] = []
        results: list[Any] = []
        try:
            for life in lives:
                calls.append((life, life.call(method, args, self._options.client_index)))
            with trio.fail_after(limit):
                for _, call in calls:
                    results.append(await call.wait())
        except trio.TooSlowError:
            raise UtilityCallError(method, f"no answer from rank {lives[len(results)].rank} within {limit:g} s") from None
        finally:
            for life, call in calls:
                life.calls.forget(call)
        return results

    def _unavailable(self) -> str:
        if self._closed:
            return "the engine's client is closed"
        health = self.health.value
        return f"no engine: {health.state.value}{', ' + health.detail if health.detail else ''}"


def _described(info: EngineInfo) -> str:
    return f"vLLM {info.vllm_version or '?'}, max_model_len {info.max_model_len}, {info.num_gpu_blocks} KV blocks"
