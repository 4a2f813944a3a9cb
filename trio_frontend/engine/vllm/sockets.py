"""The pair of sockets of one engine's life, their monitors, and what these tell of the engine's connections."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import zmq

from trio_frontend.engine.vllm.health import PeerWatch
from trio_frontend.engine.vllm.transport import Monitor, Socket

__all__ = ["Addresses", "EngineSockets", "Heartbeats"]

SEND_HWM: Final = 20_000
"""Messages that may wait for an engine that does not read: more than a frontend has requests, so only a stuck engine meets it."""

RECEIVE_HWM: Final = 1000
"""Messages (engine steps) that may wait in this process; beyond that TCP holds the engine's sender back."""

STRANGERS_HWM: Final = 16
"""An engine sends one message to its input address, its ready response. What else comes stays unread, and this bounds it."""


STRANGERS_MESSAGE: Final = 2**24
"""Bytes of one such message: a ready response has a few thousand."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where one engine core and one frontend process meet: requests go to ``input``, answers come from ``output``."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """Seconds between pings, and of silence after one until the peer counts as vanished."""

    interval: float
    timeout: float

    @classmethod
    def within(cls, seconds: float) -> Heartbeats:
        """A peer that vanishes is noticed after ``seconds`` at the latest."""
        return cls(seconds / 4, seconds * 3 / 4)


class EngineSockets:
    """``input`` (ROUTER) and ``output`` (PULL), bound to ``addresses``. OSError if they cannot be, and then nothing stays open."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], bind: Addresses, heartbeats: Heartbeats | None) -> None:
        with ExitStack() as opened:
            self.input = Socket(context, zmq.ROUTER, hwm=SEND_HWM)
            opened.callback(self.input.close)
            self.input.zmq.setsockopt(zmq.RCVHWM, STRANGERS_HWM)
            self.input.zmq.setsockopt(zmq.MAXMSGSIZE, STRANGERS_MESSAGE)
            # A message for a peer that is not there is an error instead of lost.
            self.input.zmq.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.output = Socket(context, zmq.PULL, hwm=RECEIVE_HWM)
            opened.callback(self.output.close)
            if heartbeats is not None:
                for socket in (self.input, self.output):
                    socket.set_heartbeats(heartbeats.interval, heartbeats.timeout)
            self.input_monitor = Monitor(context, self.input)
            opened.callback(self.input_monitor.close)
            self.output_monitor = Monitor(context, self.output)
            opened.callback(self.output_monitor.close)
            self.addresses = Addresses(self.input.bind(bind.input), self.output.bind(bind.output))
            opened.pop_all()
        self.input_peers = PeerWatch()
        self.output_peers = PeerWatch()

    def close(self, linger: float = 0.0) -> None:
        """Close all. What is queued for the engine may still leave for ``linger`` seconds."""
        self.input_monitor.close()
        self.output_monitor.close()
        self.input.close(linger)
        self.output.close()
