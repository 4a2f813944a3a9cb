"""Protects the small pure parts: statuses, metadata, timeouts, messages and limits, each rule by itself."""

from __future__ import annotations

import gzip
import math
import urllib.parse

import pytest
import trio
from google.protobuf.any_pb2 import Any
from google.protobuf.wrappers_pb2 import StringValue
from hypothesis import given
from hypothesis import strategies as st
from purerpc.grpclib.exceptions import RpcFailedError

from trio_frontend import rpc
from trio_frontend.rpc.messages import GzipMessage, MessageReader, gzip_compress
from trio_frontend.rpc.metadata import encode_metadata
from trio_frontend.rpc.status import (
    MAX_ENCODED_MESSAGE,
    Status,
    StatusCode,
    StatusError,
    details_of,
    percent_encode,
    status_of,
    status_trailers,
)
from trio_frontend.rpc.timeout import parse_timeout


@given(st.text(max_size=200))
def test_a_percent_encoded_message_is_printable_and_decodes_to_itself(message: str) -> None:
    encoded = percent_encode(message).decode("ascii")
    assert all(" " <= character <= "~" for character in encoded)
    assert encoded == encoded.strip()
    assert urllib.parse.unquote(encoded) == message.encode("utf-8", "replace").decode()


@given(st.text(alphabet="aé€😀% ", max_size=3000))
def test_a_long_message_is_cut_between_characters(message: str) -> None:
    encoded = percent_encode(message)
    assert len(encoded) <= MAX_ENCODED_MESSAGE
    assert message.startswith(urllib.parse.unquote(encoded.decode(), errors="strict"))


def test_plain_text_is_encoded_as_it_is() -> None:
    assert percent_encode("model 'x' (v1.0) not found: ~/+&?") == b"model 'x' (v1.0) not found: ~/+&?"


def test_details_are_a_google_rpc_status() -> None:
    error = StatusError(StatusCode.INVALID_ARGUMENT, "bad", [StringValue(value="a"), Any(type_url="t/x", value=b"y")])
    expected = b"\x08\x03\x12\x03bad"
    packed = Any()
    packed.Pack(StringValue(value="a"))
    for detail in (packed, Any(type_url="t/x", value=b"y")):
        serialized = detail.SerializeToString()
        expected += b"\x1a" + bytes([len(serialized)]) + serialized
    assert details_of(error) == expected


def test_trailers_of_a_status() -> None:
    assert status_trailers(Status(StatusCode.OK)) == [(b"grpc-status", b"0")]
    assert status_trailers(Status(StatusCode.ABORTED, "x")) == [(b"grpc-status", b"10"), (b"grpc-message", b"x")]
    # A number that is no code of gRPC's is UNKNOWN.
    assert status_trailers(Status(99)) == [(b"grpc-status", b"2")]


def test_a_status_error_cannot_be_ok() -> None:
    with pytest.raises(ValueError, match="OK"):
        StatusError(StatusCode.OK)


ABORTED = StatusError(StatusCode.ABORTED, "a")


@pytest.mark.parametrize(
    ("exc", "code"),
    [
        (ABORTED, StatusCode.ABORTED),
        (RpcFailedError(Status(StatusCode.NOT_FOUND)), StatusCode.NOT_FOUND),
        (RpcFailedError(Status(StatusCode.OK)), StatusCode.INTERNAL),
        (ValueError("x"), StatusCode.INTERNAL),
        (trio.TooSlowError(), StatusCode.INTERNAL),
        (ExceptionGroup("", [ABORTED]), StatusCode.ABORTED),
        (ExceptionGroup("", [ExceptionGroup("", [ABORTED])]), StatusCode.ABORTED),
        (ExceptionGroup("", [ABORTED, StatusError(StatusCode.NOT_FOUND)]), StatusCode.ABORTED),
        (ExceptionGroup("", [ValueError(), ABORTED]), StatusCode.INTERNAL),
        (BaseExceptionGroup("", [KeyboardInterrupt(), ABORTED]), StatusCode.INTERNAL),
    ],
)
def test_an_exception_becomes_a_status(exc: BaseException, code: StatusCode) -> None:
    assert status_of(exc)[0].status_code is code


async def test_cancelled_beside_a_status_error_says_nothing() -> None:
    caught = []
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:
            caught.append(status_of(BaseExceptionGroup("", [cancelled, ABORTED]))[0])
            raise
    assert [status.status_code for status in caught] == [StatusCode.ABORTED]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"1H", 3600),
        (b"2M", 120),
        (b"3S", 3),
        (b"40m", 0.04),
        (b"50u", 0.00005),
        (b"6n", 6e-9),
        (b"99999999H", 99999999 * 3600),
        (b"00000000S", 0),
    ],
)
def test_every_unit_of_a_timeout_is_understood(value: bytes, seconds: float) -> None:
    assert parse_timeout(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value", [b"", b"S", b"1", b"1s", b"123456789S", b"1.5S", b"-1S", b"+1S", b" 1S", b"1S ", b"1SS", "١S".encode()]
)
def test_what_is_no_timeout_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="grpc-timeout"):
        parse_timeout(value)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("Upper", "x", ValueError),
        ("", "x", ValueError),
        ("a b", "x", ValueError),
        ("naïve", "x", ValueError),
        (":status", "200", ValueError),
        ("grpc-status", "0", ValueError),
        ("grpc-anything-bin", b"0", ValueError),
        ("content-type", "text/plain", ValueError),
        ("te", "trailers", ValueError),
        ("connection", "close", ValueError),
        ("x", "a\r\nset-cookie: b", ValueError),
        ("x", "a\0", ValueError),
        ("x", "é", ValueError),
        ("x", " padded", ValueError),
        ("x", "padded ", ValueError),
        ("x", b"bytes", TypeError),
        ("x-bin", "text", TypeError),
        (b"x", "y", ValueError),
    ],
)
def test_metadata_that_cannot_be_sent_is_refused_by_name(name: str, value: str | bytes, error: type[Exception]) -> None:
    with pytest.raises(error, match="metadata"):
        encode_metadata([(name, value)])


def test_metadata_that_can_be_sent() -> None:
    sent = encode_metadata({"x-a_b.c": "one two", "empty": "", "raw-bin": b"\0\xff"})
    assert sent == [(b"x-a_b.c", b"one two"), (b"empty", b""), (b"raw-bin", b"AP8")]


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4))
def test_binary_metadata_comes_back_as_it_went(values: list[bytes]) -> None:
    fields = encode_metadata([("x-bin", value) for value in values])
    assert rpc.Metadata.from_headers(fields).get_all("x-bin") == values
    joined = [(b"x-bin", b",".join(value for _, value in fields))]
    assert rpc.Metadata.from_headers(joined).get_all("x-bin") == values


def test_metadata_is_a_mapping_that_shows_no_values() -> None:
    metadata = rpc.Metadata([("authorization", "secret"), ("a", "1"), ("a", "2")])
    assert dict(metadata) == {"authorization": "secret", "a": "1"}
    assert (len(metadata), "a" in metadata, metadata.get("b")) == (2, True, None)
    assert metadata.pairs() == (("authorization", "secret"), ("a", "1"), ("a", "2"))
    assert "secret" not in repr(metadata)


@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_messages_come_out_as_they_went_in_however_they_are_cut(messages: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(b"\0" + len(message).to_bytes(4, "big") + message for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    reader = MessageReader(1000)
    got, released = [], 0
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        reader.feed(stream[start:stop], stop - start)
        while reader.ready:
            taken = reader.take()
            assert taken is not None
            got.append(taken[1])
            released += reader.release(waiting=False)
        if data.draw(st.booleans()):
            released += reader.release(waiting=True)
    reader.ended = True
    assert reader.ready
    assert reader.take() is None
    released += reader.release(waiting=True)
    assert got == messages
    assert released == len(stream)


def test_what_is_not_taken_is_not_released() -> None:
    reader = MessageReader(1000)
    reader.feed(b"\0\0\0\0\4abcd" + b"\0\0\0\0\3x", 30)  # 15 of data, 15 of padding
    assert reader.release(waiting=False) == 15
    assert reader.take() == (0, b"abcd")
    assert reader.release(waiting=False) == 9
    assert not reader.ready
    assert reader.release(waiting=True) == 6
    reader.feed(b"yz", 2)
    assert reader.take() == (0, b"xyz")
    assert reader.release(waiting=False) == 2


@given(st.binary(max_size=2000), st.integers(0, 2000))
def test_gzip_comes_back_as_it_went_within_its_limit(message: bytes, limit: int) -> None:
    unpacking = GzipMessage(gzip_compress(message), limit)
    assert gzip.decompress(gzip_compress(message)) == message
    if len(message) <= limit:
        assert unpacking.begin() == message
    else:
        with pytest.raises(StatusError, match="over the limit"):
            unpacking.begin()


def test_large_gzip_takes_two_steps() -> None:
    message = bytes(1_000_000)
    unpacking = GzipMessage(gzip_compress(message), 1_000_000)
    assert unpacking.begin() is None
    assert unpacking.finish() == message
    unpacking = GzipMessage(gzip_compress(message), 999_999)
    assert unpacking.begin() is None
    with pytest.raises(StatusError, match="over the limit"):
        unpacking.finish()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_connections", 0),
        ("max_message_size", -1),
        ("send_buffer", 0),
        ("preface_timeout", 0),
        ("headers_timeout", -1),
        ("send_timeout", 0),
        ("write_timeout", 0),
        ("close_timeout", math.inf),
        ("keepalive_time", 0),
        ("keepalive_timeout", math.nan),
        ("max_connection_age", 0),
        ("max_connection_age_grace", -1),
        ("max_connection_idle", 0),
        ("drain_ping_timeout", -1),
    ],
)
def test_a_limit_out_of_its_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        rpc.ServerLimits(**{name: value})  # type: ignore[arg-type]


def test_messages_must_leave_room_for_control_frames() -> None:
    with pytest.raises(ValueError, match="send_buffer"):
        rpc.ServerLimits(send_buffer=300_000)
    rpc.ServerLimits(send_buffer=300_000, http2=rpc.Http2Limits(max_unsent=400_000))
