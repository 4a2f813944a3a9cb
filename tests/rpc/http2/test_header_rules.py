"""Protects what makes a request well-formed (RFC 9113 8.1.1, 8.2, 8.3): a malformed one costs its stream and nothing more."""

from __future__ import annotations

import pytest

from tests.rpc.http2.wire import (
    END_HEADERS,
    END_STREAM,
    PROTOCOL_ERROR,
    REQUEST,
    Client,
    Fields,
    data,
    headers,
    reset_code,
)
from trio_frontend.rpc import http2

PSEUDO = REQUEST[:4]


@pytest.fixture
def client() -> Client:
    return Client()


def without(name: bytes) -> Fields:
    return [field for field in REQUEST if field[0] != name]


def instead(name: bytes, value: bytes) -> Fields:
    return [(name, value) if field[0] == name else field for field in REQUEST]


MALFORMED: dict[str, Fields] = {
    "no fields": [],
    "no method": without(b":method"),
    "no scheme": without(b":scheme"),
    "no path": without(b":path"),
    "an empty method": instead(b":method", b""),
    "an empty scheme": instead(b":scheme", b""),
    "an empty path": instead(b":path", b""),
    "two methods": [REQUEST[0], *REQUEST],
    "two schemes": [REQUEST[1], *REQUEST],
    "two paths": [REQUEST[2], *REQUEST],
    "two authorities": [REQUEST[3], *REQUEST],
    "a pseudo-header field after a regular one": [*without(b":path"), (b":path", b"/")],
    "an unknown pseudo-header field": [(b":extra", b"x"), *REQUEST],
    "a response's pseudo-header field": [(b":status", b"200"), *REQUEST],
    "a protocol, which we have not allowed": [(b":protocol", b"websocket"), *instead(b":method", b"CONNECT")],
    "an upper-case pseudo-header field": [(b":Method", b"POST"), *without(b":method")],
    "a pseudo-header field with NUL": instead(b":path", b"/a\0b"),
    "a pseudo-header field with a line break": instead(b":authority", b"a\r\nb"),
    "an upper-case name": [*REQUEST, (b"X-Upper", b"x")],
    "a name with a space": [*REQUEST, (b"x y", b"x")],
    "a name with a tab": [*REQUEST, (b"x\ty", b"x")],
    "a name with NUL": [*REQUEST, (b"x\0y", b"x")],
    "a name with a line break": [*REQUEST, (b"x\ny", b"x")],
    "a name that ends in a line break": [*REQUEST, (b"x\n", b"x")],
    "a name with a colon": [*REQUEST, (b"x:y", b"x")],
    "a name with DEL": [*REQUEST, (b"x\x7fy", b"x")],
    "a name that is not ASCII": [*REQUEST, (b"x\xc3\xbc", b"x")],
    "an empty name": [*REQUEST, (b"", b"x")],
    "a value with CR": [*REQUEST, (b"x", b"a\rb")],
    "a value with LF": [*REQUEST, (b"x", b"a\nb")],
    "a value with NUL": [*REQUEST, (b"x", b"a\0b")],
    "a value that ends in LF": [*REQUEST, (b"x", b"a\n")],
    "a value with a leading space": [*REQUEST, (b"x", b" a")],
    "a value with a trailing space": [*REQUEST, (b"x", b"a ")],
    "a value with a leading tab": [*REQUEST, (b"x", b"\ta")],
    "connection": [*REQUEST, (b"connection", b"close")],
    "proxy-connection": [*REQUEST, (b"proxy-connection", b"close")],
    "keep-alive": [*REQUEST, (b"keep-alive", b"timeout=5")],
    "transfer-encoding": [*REQUEST, (b"transfer-encoding", b"chunked")],
    "upgrade": [*REQUEST, (b"upgrade", b"h2c")],
    "te other than trailers": [*without(b"te"), (b"te", b"gzip")],
    "te with more than trailers": [*without(b"te"), (b"te", b"trailers, gzip")],
    "two hosts": [*without(b":authority"), (b"host", b"a"), (b"host", b"a")],
    "a host that differs from the authority": [*REQUEST, (b"host", b"elsewhere")],
    "a content-length that is no number": [*REQUEST, (b"content-length", b"x")],
    "a negative content-length": [*REQUEST, (b"content-length", b"-1")],
    "a signed content-length": [*REQUEST, (b"content-length", b"+1")],
    "an empty content-length": [*REQUEST, (b"content-length", b"")],
    "a content-length list": [*REQUEST, (b"content-length", b"5, 5")],
    "a content-length of 5,000 digits": [*REQUEST, (b"content-length", b"9" * 5_000)],
    "a content-length in other digits": [*REQUEST, (b"content-length", "٣".encode())],
    "two content-lengths": [*REQUEST, (b"content-length", b"5"), (b"content-length", b"5")],
    "CONNECT with a path": instead(b":method", b"CONNECT"),
    "CONNECT without an authority": [(b":method", b"CONNECT")],
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_request_costs_its_stream_only(client: Client, fields: Fields) -> None:
    client.open(1)
    assert client.send(headers(3, fields)) == [], "what was malformed from the start is never announced"
    assert reset_code(client.sent(), 3) == PROTOCOL_ERROR
    assert client.send(data(1, b"x")) == [http2.DataReceived(1, b"x", 1, False)]
    assert client.send(data(3, b"x" * 10)) == [], "its body is ignored"
    assert client.sent() == []
    assert client.still_serves(5)


WELL_FORMED: dict[str, Fields] = {
    "what gRPC sends": REQUEST,
    "no authority": without(b":authority"),
    "host in place of authority": [*without(b":authority"), (b"host", b"a")],
    "host equal to authority": [*REQUEST, (b"host", b"LOCALHOST:50051")],
    "pseudo-header fields in another order": [*reversed(PSEUDO), *REQUEST[4:]],
    "another method": instead(b":method", b"GET"),
    "another scheme": instead(b":scheme", b"https"),
    "CONNECT": [(b":method", b"CONNECT"), (b":authority", b"a:1")],
    "te in upper case": [*without(b"te"), (b"te", b"Trailers")],
    "an empty value": [*REQUEST, (b"x", b"")],
    "a value that is not ASCII": [*REQUEST, (b"x", b"\xff\xfe \xc3\xbc")],
    "a value with spaces and tabs inside": [*REQUEST, (b"x", b"a \t b")],
    "a name of all allowed characters": [*REQUEST, (b"!#$%&'*+-.^_`|~09az", b"x")],
    "a field many times": [*REQUEST, *[(b"x", b"y")] * 50],
    "a content-length of 0": [*REQUEST, (b"content-length", b"0")],
    "a path that gRPC will refuse": instead(b":path", b"no-slash"),
}


@pytest.mark.parametrize("fields", WELL_FORMED.values(), ids=WELL_FORMED.keys())
def test_a_well_formed_request_comes_through_as_it_was_sent(client: Client, fields: Fields) -> None:
    assert client.send(headers(1, fields, END_HEADERS | END_STREAM)) == [http2.RequestReceived(1, fields, True)]


@pytest.mark.parametrize(
    "fields",
    [
        [(b":path", b"/")],
        [(b":unknown", b"x")],
        [(b"X", b"x")],
        [(b"x", b"a\nb")],
        [(b"", b"")],
        [(b"connection", b"close")],
        [(b"te", b"gzip")],
    ],
)
def test_malformed_trailers_cost_their_stream_only(client: Client, fields: Fields) -> None:
    client.open(1)
    assert client.send(headers(1, fields, END_HEADERS | END_STREAM)) == [http2.StreamReset(1, PROTOCOL_ERROR, False)]
    assert reset_code(client.sent(), 1) == PROTOCOL_ERROR
    assert client.still_serves(3)


class TestContentLength:
    """RFC 9113 8.1.1: it must fit the DATA frames, their padding left out."""

    def fields(self, length: int) -> Fields:
        return [*REQUEST, (b"content-length", b"%d" % length)]

    def test_a_body_that_fits_comes_through(self, client: Client) -> None:
        events = client.send(headers(1, self.fields(5)), data(1, b"ab"), data(1, b"\x03cde" + bytes(3), 0x8 | END_STREAM))
        assert [type(event) for event in events] == [http2.RequestReceived, http2.DataReceived, http2.DataReceived]

    def test_a_body_that_is_too_long_costs_the_stream_at_its_first_byte_too_many(self, client: Client) -> None:
        client.send(headers(1, self.fields(5)), data(1, b"abcde"))
        assert client.send(data(1, b"f")) == [http2.StreamReset(1, PROTOCOL_ERROR, False)]
        assert client.still_serves(3)

    def test_a_body_that_is_too_short_costs_the_stream_at_its_end(self, client: Client) -> None:
        client.send(headers(1, self.fields(5)), data(1, b"abc"))
        assert client.send(data(1, b"d", END_STREAM)) == [http2.StreamReset(1, PROTOCOL_ERROR, False)]
        assert client.still_serves(3)

    def test_trailers_end_a_body_too(self, client: Client) -> None:
        client.send(headers(1, self.fields(5)), data(1, b"abc"))
        trailers = headers(1, [(b"a", b"b")], END_HEADERS | END_STREAM)
        assert client.send(trailers) == [http2.StreamReset(1, PROTOCOL_ERROR, False)]
        client.send(headers(3, self.fields(3)), data(3, b"abc"))
        trailers = headers(3, [(b"a", b"b")], END_HEADERS | END_STREAM)
        assert client.send(trailers) == [http2.TrailersReceived(3, [(b"a", b"b")])]

    def test_a_request_without_a_body_has_none(self, client: Client) -> None:
        assert client.send(headers(1, self.fields(5), END_HEADERS | END_STREAM)) == []
        assert reset_code(client.sent(), 1) == PROTOCOL_ERROR
