"""Protects what the server sends: order, the fast path against the plain one, and what a caller's own fault gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.rpc.http2.wire import (
    DATA,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    RESPONSE,
    TRAILERS,
    Client,
    data,
    headers,
    settings,
    window_update,
)
from trio_frontend.rpc import http2


@pytest.fixture
def client() -> Client:
    client = Client()
    client.open(1)
    return client


def test_taken_output_is_no_longer_there(client: Client) -> None:
    client.connection.send_data(1, b"abc")
    out = client.connection.out
    assert client.connection.unsent == 12
    assert client.connection.take_output() == b"\0\0\3\0\0\0\0\0\1abc"
    assert client.connection.unsent == 0
    assert client.connection.out is out
    assert client.connection.take_output() == b""


def test_data_before_headers_is_the_callers_fault(client: Client) -> None:
    client.send(headers(3))
    with pytest.raises(http2.LocalProtocolError, match="before headers on stream 3"):
        client.connection.send_data(3, b"x")
    assert not client.connection.try_send_message(3, b"\0\0\0\0\1", b"x")
    assert client.sent() == []


def test_response_headers_twice_are_the_callers_fault(client: Client) -> None:
    with pytest.raises(http2.LocalProtocolError, match="twice on stream 1"):
        client.connection.send_headers(1, RESPONSE)


def test_nothing_can_be_sent_after_the_end(client: Client) -> None:
    client.send(data(1, b"", END_STREAM))
    client.connection.send_headers(1, TRAILERS, end_stream=True)
    client.sent()
    with pytest.raises(http2.StreamClosed):
        client.connection.send_headers(1, TRAILERS, end_stream=True)
    with pytest.raises(http2.StreamClosed):
        client.connection.send_data(1, b"")
    assert not client.connection.try_send_message(1, b"\0\0\0\0\0", b"")
    assert client.sent() == []


def test_empty_data_that_ends_nothing_is_not_sent(client: Client) -> None:
    client.connection.send_data(1, b"")
    assert client.sent() == []


def test_a_message_goes_out_as_one_frame(client: Client) -> None:
    assert client.connection.try_send_message(1, b"\0\0\0\0\5", b"hello")
    assert client.sent() == [(DATA, 0, 1, b"\0\0\0\0\5hello")]
    assert client.connection.sendable(1) == 65_525


@pytest.mark.parametrize("fast", [True, False])
def test_what_one_stream_sends_is_taken_from_the_connections_window_for_all(client: Client, fast: bool) -> None:
    client.open(3)
    if fast:
        assert client.connection.try_send_message(1, b"\0\0\0\0\5", b"hello")
    else:
        client.connection.send_data(1, b"\0\0\0\0\5hello")
    assert client.connection.sendable(3) == 65_525
    client.send(window_update(0, 10))
    assert client.connection.sendable(3) == 65_535
    assert client.connection.sendable(1) == 65_525


@pytest.mark.parametrize("which", ["stream", "connection"])
def test_a_message_that_does_not_fit_a_window_is_declined_whole(client: Client, which: str) -> None:
    if which == "stream":
        client.send(settings([(INITIAL_WINDOW_SIZE, 9)]))
    else:
        client.connection.send_data(1, b"x" * 65_526)
        client.send(window_update(1, 100_000))
    client.sent()
    assert not client.connection.try_send_message(1, b"\0\0\0\0\5", b"hello")
    assert client.connection.unsent == 0
    assert client.connection.sendable(1) == 9
    client.send(window_update(0, 1), window_update(1, 1))
    assert client.connection.try_send_message(1, b"\0\0\0\0\5", b"hello")


def test_a_message_longer_than_a_frame_is_declined(client: Client) -> None:
    assert not client.connection.try_send_message(1, b"\0\0\0\x3f\xfc", b"x" * 16_380)
    assert client.connection.try_send_message(1, b"\0\0\0\x3f\xfb", b"x" * 16_379)


@pytest.mark.parametrize("max_unsent", [96, 100, 119])
def test_messages_are_declined_while_too_much_is_unsent(max_unsent: int) -> None:
    client = Client(max_unsent=max_unsent)
    client.open(1)
    sent = 0
    while client.connection.try_send_message(1, b"\0\0\0\0\x0a", b"x" * 10):
        sent += 1
    assert sent == 5
    assert client.connection.unsent == 5 * 24
    client.sent()
    assert client.connection.try_send_message(1, b"\0\0\0\0\x0a", b"x" * 10)


@hypothesis_settings(deadline=None)
@given(st.lists(st.binary(max_size=5_000), max_size=30), st.integers(0, 70_000))
def test_the_fast_path_sends_what_the_plain_one_sends(messages: list[bytes], window: int) -> None:
    fast, plain = Client(), Client()
    for client in (fast, plain):
        client.send(settings([(INITIAL_WINDOW_SIZE, window)]))
        client.open(1)
    for message in messages:
        prefix = b"\0" + len(message).to_bytes(4, "big")
        fits = len(message) + 5 <= plain.connection.sendable(1)
        if fits:
            plain.connection.send_data(1, prefix + message)
        assert fast.connection.try_send_message(1, prefix, message) is fits
    assert fast.connection.take_output() == plain.connection.take_output()
    assert fast.connection.sendable(1) == plain.connection.sendable(1)


def test_a_trailers_only_response_is_one_frame(client: Client) -> None:
    client.send(headers(3), data(3, b"", END_STREAM))
    client.connection.send_headers(3, TRAILERS, end_stream=True)
    assert [(f.kind, f.stream_id) for f in client.sent()] == [(HEADERS, 3)]
    assert client.connection.open_streams == 1
