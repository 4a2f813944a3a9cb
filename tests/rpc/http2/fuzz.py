"""Fuzz rpc/http2 with mutated recordings of real clients: `python -m tests.rpc.http2.fuzz --inputs 1000000`.

An input is a recording, mutated as bytes and as frames, cut into reads of any size, with a server's calls in between. Checked for each:
nothing but events leaves `receive_data`; events follow the states of their streams; nothing comes after a failure; what is sent
consists of whole frames and stays within the peer's windows; what is held stays within the limits; and the time is bounded.
Input number i of a seed is always the same: `--only i` runs it alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trio_frontend.rpc import http2

RECORDED = Path(__file__).parent / "recorded"

# Small enough that mutated recordings reach them.
LIMITS = http2.Limits(
    max_concurrent_streams=5,
    stream_window=65_535,
    connection_window=65_535,
    max_header_block=2_000,
    max_continuations=3,
    max_header_list_size=1_000,
    header_cache_size=1_000,
    max_unsent=5_000,
    resets=http2.Rate(10.0, 10),
    settings=http2.Rate(10.0, 10),
    empty_data=http2.Rate(10.0, 10),
    window_updates=http2.Rate(10.0, 50),
    ignored=http2.Rate(10.0, 10),
)
MAX_SECONDS = 10.0

_PREFACE = 24
_DEFAULT_WINDOW = 65_535
_HEADERS = http2.encode_headers([(b":status", b"200")])
_TRAILERS = http2.encode_headers([(b"grpc-status", b"0")])
_INTERESTING = (0, 1, 2, 3, 4, 5, 7, 8, 9, 0x20, 0x40, 0x7F, 0x80, 0x82, 0xBE, 0xFF)
_WORDS = (0, 1, 5, 0xFFFF, 0x3FFF, 0x4000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_FRAME_BITS = (0x0, 0x1, 0x4, 0x5, 0x8, 0x20, 0x2D)


class Finding(AssertionError):
    """What an input has shown to be wrong."""


def recordings() -> list[bytes]:
    return [path.read_bytes() for path in sorted(RECORDED.glob("*.bin"))]


def split(record: bytes) -> list[bytes]:
    """The frames of a recording, without its preface."""
    frames = []
    position = _PREFACE
    while position < len(record):
        stop = position + 9 + int.from_bytes(record[position : position + 3], "big")
        frames.append(record[position:stop])
        position = stop
    return frames


class Mutator:
    """Makes inputs out of recordings."""

    def __init__(self, records: Sequence[bytes]) -> None:
        self._preface = records[0][:_PREFACE]
        self._conversations = [split(record) for record in records]
        self._frames = [frame for frames in self._conversations for frame in frames if len(frame) < 1_000]

    def make(self, rng: random.Random) -> bytes:
        frames = list(rng.choice(self._conversations))
        for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
            self._mutate_frames(rng, frames)
        out = bytearray(self._preface if rng.random() < 0.98 else b"")
        out += b"".join(frames)
        for _ in range(rng.choice((0, 0, 0, 1, 3))):
            self._mutate_bytes(rng, out)
        return bytes(out)

    def _mutate_frames(self, rng: random.Random, frames: list[bytes]) -> None:
        position = rng.randrange(len(frames)) if frames else 0
        match rng.randrange(9):
            case 0 if frames:
                del frames[position]
            case 1 if frames:
                frames[position:position] = [frames[position]] * rng.choice((1, 2, 20, 60))
            case 2 if frames:
                other = rng.randrange(len(frames))
                frames[position], frames[other] = frames[other], frames[position]
            case 3:
                frames.insert(position, rng.choice(self._frames))
            case 4:
                frames.insert(position, _random_frame(rng))
            case 5 if frames:
                frames[position] = _with_new_header(rng, frames[position])
            case 6 if frames:
                frames[position] = _with_new_payload(rng, frames[position])
            case 7 if frames:
                frames[position:] = _split_block(rng, frames[position]) + frames[position + 1 :]
            case _:
                frames.extend(rng.choices(self._frames, k=rng.randrange(1, 6)))

    @staticmethod
    def _mutate_bytes(rng: random.Random, out: bytearray) -> None:
        position = rng.randrange(len(out) + 1)
        match rng.randrange(4):
            case 0 if position < len(out):
                out[position] = rng.choice(_INTERESTING)
            case 1 if position < len(out):
                out[position] ^= 1 << rng.randrange(8)
            case 2:
                del out[position : position + rng.choice((1, 2, 4, 9, 50))]
            case _:
                out[position:position] = rng.randbytes(rng.choice((1, 2, 4, 9, 50)))


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def _random_frame(rng: random.Random) -> bytes:
    kind = rng.choice((*range(11), rng.randrange(256)))
    if kind in (3, 8):
        payload = rng.choice(_WORDS).to_bytes(4, "big")
    elif kind == 4:
        payload = b"".join(
            rng.randrange(8).to_bytes(2, "big") + rng.choice(_WORDS).to_bytes(4, "big") for _ in range(rng.randrange(4))
        )
    elif kind == 0:
        payload = bytes(rng.choice((0, 0, 1, 16_384)))
    else:
        payload = rng.randbytes(rng.choice((0, 1, 4, 5, 6, 8, 8, 12, 100)))
    return _frame(kind, rng.choice(_FRAME_BITS), rng.choice((0, 0, 1, 3, 5, 2, 99, 2**31 - 1)), payload)


def _with_new_header(rng: random.Random, frame: bytes) -> bytes:
    kind, flags, stream_id = frame[3], frame[4], int.from_bytes(frame[5:9], "big")
    match rng.randrange(3):
        case 0:
            kind = rng.randrange(11)
        case 1:
            flags = rng.choice((*_FRAME_BITS, rng.randrange(256)))
        case _:
            stream_id = rng.choice((0, 1, 2, stream_id + 2, stream_id ^ 1, rng.randrange(2**32))) & 0xFFFFFFFF
    return _frame(kind, flags, stream_id, frame[9:])


def _with_new_payload(rng: random.Random, frame: bytes) -> bytes:
    payload = bytearray(frame[9:])
    position = rng.randrange(len(payload) + 1)
    match rng.randrange(4):
        case 0:
            del payload[position:]
        case 1 if position < len(payload):
            payload[position] = rng.choice(_INTERESTING)
        case 2:
            payload[position:position] = rng.randbytes(rng.randrange(1, 10))
        case _:
            payload[position:position] = bytes((rng.choice(_INTERESTING),)) * rng.choice((1, 3, 500, 3_000))
    return _frame(frame[3], frame[4], int.from_bytes(frame[5:9], "big"), bytes(payload))


def _split_block(rng: random.Random, frame: bytes) -> list[bytes]:
    """A frame as HEADERS and CONTINUATIONs of the same payload."""
    payload = frame[9:]
    cut = rng.randrange(len(payload) + 1)
    stream_id = int.from_bytes(frame[5:9], "big")
    return [_frame(1, frame[4] & ~4, stream_id, payload[:cut]), _frame(9, 4, stream_id, payload[cut:])]


class Application:
    """A server's calls, in the order the rules allow, and a check of everything that comes and goes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._connection = http2.Connection(LIMITS)
        self._open: dict[int, bool] = {}  # announced streams: whether their request is unfinished
        self._begun: set[int] = set()
        self._unread: dict[int, int] = {}
        self._failed = False
        self._now = 1_000.0
        self._take()

    def receive(self, read: bytes) -> None:
        self._now += self._rng.choice((0.0, 0.0, 0.01, 2.0))
        events = self._connection.receive_data(read, self._now)
        if self._failed and events:
            raise Finding(f"{events} after a failure")
        for event in events:
            self._check(event)
        self._check_held()
        if not self._failed:
            self._act()
        self._take()

    def end(self) -> None:
        for event in self._connection.receive_eof():
            self._check(event)
        self._take()

    def _check(self, event: http2.Event) -> None:
        if self._failed:
            raise Finding(f"{event} after a failure")
        match event:
            case http2.RequestReceived(stream_id, headers, end_stream):
                if stream_id in self._open or not stream_id & 1 or not headers:
                    raise Finding(f"{event} of a known stream, of ours, or without fields")
                self._open[stream_id] = not end_stream
            case http2.DataReceived(stream_id, data, length, end_stream):
                if not self._open.get(stream_id) or len(data) > length:
                    raise Finding(f"{event} of a stream that takes none")
                self._unread[stream_id] = self._unread.get(stream_id, 0) + length
                self._open[stream_id] = not end_stream
            case http2.TrailersReceived(stream_id, _):
                if not self._open.get(stream_id):
                    raise Finding(f"{event} of a stream that takes none")
                self._open[stream_id] = False
            case http2.StreamReset(stream_id, _, _):
                if stream_id not in self._open:
                    raise Finding(f"{event} of a stream that is not open")
                self._close(stream_id)
            case http2.ConnectionFailed(error):
                if not isinstance(error, http2.ProtocolError) or not error.reason.isascii():
                    raise Finding(f"{event} without a typed error")
                self._failed = True
                self._open.clear()
            case http2.WindowUpdated(stream_id):
                if stream_id and stream_id not in self._open:
                    raise Finding(f"{event} of a stream that is not open")

    def _close(self, stream_id: int) -> None:
        del self._open[stream_id]
        self._unread.pop(stream_id, None)
        self._begun.discard(stream_id)

    def _check_held(self) -> None:
        connection = self._connection
        if connection.open_streams != len(self._open) or connection.open_streams > LIMITS.max_concurrent_streams:
            raise Finding(f"{connection.open_streams} streams open, {len(self._open)} announced")
        if len(connection._buffer) > LIMITS.max_frame_size + 9:
            raise Finding(f"{len(connection._buffer)} bytes held of one frame")
        if sum(self._unread.values()) > LIMITS.connection_window:
            raise Finding("more unread than the connection's window")

    def _act(self) -> None:
        rng, connection = self._rng, self._connection
        for stream_id in list(self._open):
            match rng.randrange(7):
                case 0:
                    n = rng.randrange(self._unread.get(stream_id, 0) + 1)
                    self._unread[stream_id] = self._unread.get(stream_id, 0) - n
                    connection.acknowledge(stream_id, n)
                case 1 if stream_id not in self._begun:
                    connection.send_headers(stream_id, _HEADERS)
                    self._begun.add(stream_id)
                case 2 if stream_id in self._begun:
                    sendable = connection.sendable(stream_id)
                    sent = connection.try_send_message(stream_id, b"\0\0\0\0\x0a", b"x" * 10)
                    if sent and sendable < 15:
                        raise Finding(f"15 bytes sent through a window of {sendable}")
                case 3 if stream_id in self._begun:
                    connection.send_data(stream_id, b"x" * min(max(connection.sendable(stream_id), 0), 100))
                case 4:
                    connection.send_headers(stream_id, _TRAILERS, end_stream=True)
                    self._close(stream_id)
                case 5 if rng.random() < 0.3:
                    connection.reset_stream(stream_id, 8)
                    self._close(stream_id)
        if rng.random() < 0.02:
            connection.ping(b"12345678")
        if rng.random() < 0.01:
            connection.go_away(0, rng.choice((None, 1, 2**31 - 1)))

    def _take(self) -> None:
        output = self._connection.take_output()
        position = 0
        while position < len(output):
            length = int.from_bytes(output[position : position + 3], "big")
            if length > 16_384 or position + 9 + length > len(output):
                raise Finding("an output that is not whole frames")
            position += 9 + length


def run(data: bytes, rng: random.Random) -> None:
    """One input through one connection; raises Finding, or whatever else the code under test raised."""
    began = time.process_time()
    application = Application(rng)
    size = (
        rng.choice((1, 8, 9, 30, 200, 2_000, 100_000, 100_000)) if len(data) < 4_000 else rng.choice((300, 5_000, 100_000))
    )
    for start in range(0, len(data), size):
        application.receive(data[start : start + size])
    application.end()
    if time.process_time() - began > MAX_SECONDS:
        raise Finding(f"more than {MAX_SECONDS} s of CPU")


def run_input(mutator: Mutator, seed: int, number: int) -> None:
    rng = random.Random(seed << 40 | number)
    run(mutator.make(rng), rng)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run the input of this number only")
    arguments = parser.parse_args()
    mutator = Mutator(recordings())
    numbers = range(arguments.inputs) if arguments.only is None else range(arguments.only, arguments.only + 1)
    began, cpu = time.monotonic(), time.process_time()
    for number in numbers:
        try:
            run_input(mutator, arguments.seed, number)
        except BaseException:
            sys.stderr.write(f"input {number} of seed {arguments.seed}:\n")
            raise
        if number % 50_000 == 49_999:
            sys.stdout.write(f"{number + 1} inputs, {time.monotonic() - began:.0f} s\n")
            sys.stdout.flush()
    sys.stdout.write(
        f"{len(numbers)} inputs, no finding, {time.monotonic() - began:.0f} s, {time.process_time() - cpu:.0f} s of CPU\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
