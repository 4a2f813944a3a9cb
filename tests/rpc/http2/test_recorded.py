"""Protects what real clients need: recorded connections of grpcio, curl, nghttp and h2load, however their bytes are cut."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.rpc.http2.fuzz import RECORDED
from tests.rpc.http2.wire import ends_request
from trio_frontend.rpc import http2


def replay(record: bytes, size: int) -> list[http2.Event]:
    """The events of a recording. Every request is answered when it is whole, as it was when it was recorded."""
    connection = http2.Connection(http2.Limits())
    events = []
    for start in range(0, len(record), size):
        for event in connection.receive_data(record[start : start + size], 0.0):
            events.append(event)
            if ends_request(event):
                connection.send_headers(event.stream_id, b"\x88", end_stream=True)
    return events


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.bin")), ids=lambda path: path.stem)
def test_a_recorded_connection_has_no_fault(path: Path) -> None:
    record = path.read_bytes()
    events = replay(record, len(record))
    assert not [event for event in events if isinstance(event, http2.ConnectionFailed)]
    assert not [event for event in events if isinstance(event, http2.StreamReset) and not event.by_peer]
    requests = [event for event in events if isinstance(event, http2.RequestReceived)]
    assert all(dict(event.headers)[b":path"].startswith(b"/pkg.Service/") for event in requests)
    for size in (1, 9, 100):
        assert replay(record, size) == events


def test_the_recordings_hold_what_they_are_said_to_hold() -> None:
    kinds = {
        path.stem: Counter(type(event).__name__ for event in replay(path.read_bytes(), 2**20))
        for path in RECORDED.glob("*.bin")
    }
    assert kinds["h2load"]["RequestReceived"] == 20
    assert kinds["grpcio-unary"]["RequestReceived"] == 6
    assert kinds["grpcio-streaming"]["RequestReceived"] >= 3
    assert kinds["nghttp-trailers"]["TrailersReceived"] == 2
    assert kinds["nghttp"]["RequestReceived"] == 3
    assert kinds["curl"]["DataReceived"] == 1
