"""Protects HPACK in and out (RFC 7541): broken blocks, the cache of repeated ones, and that our encoding is understood by another."""

from __future__ import annotations

import logging
import re

import hpack
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.rpc.http2.wire import (
    COMPRESSION_ERROR,
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    HEADERS,
    REQUEST,
    Client,
    block,
    frame,
    headers,
    integer,
    literal,
    read_frames,
    reset_code,
)
from trio_frontend.rpc import http2
from trio_frontend.rpc.http2.hpack_decoder import HpackDecoder

INDEXED = 0x40


def request(stream_id: int, encoded: bytes) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, encoded)


@pytest.fixture
def client() -> Client:
    return Client()


BROKEN = {
    "a literal that ends after its first byte": b"\0",
    "an indexed literal that ends after its first byte": b"\x40",
    "a name longer than the block": b"\0\x05ab",
    "no value": b"\0\x01a",
    "a value longer than the block": b"\0\x01a\x05b",
    "an index that does not end": b"\xff\x80",
    "an index of 0": b"\x80",
    "an index beyond the table": b"\xbe",
    "an index far beyond the table": b"\xff\xff\xff\xff\x07",
    "an index of 5,000 bytes": b"\xff" + b"\xff" * 5_000 + b"\0",
    "a name index beyond the table": b"\x0f\x7f\x01a",
    "a length of 5,000 bytes": b"\0\x7f" + b"\x80" * 5_000 + b"\0",
    "Huffman padding of zeros": b"\0\x01a\x81\x18",
    "Huffman padding of 8 bits": b"\0\x01a\x82\x1f\xff",
    "Huffman EOS": b"\0\x01a\x84\xff\xff\xff\xff",
    "a table size above ours": b"\x3f\xe2\x1f",
    "a table size update after a field": b"\x82\x20",
    "three table size updates": b"\x20\x20\x20",
}


@pytest.mark.parametrize("encoded", BROKEN.values(), ids=BROKEN.keys())
def test_a_block_that_cannot_be_decoded_ends_the_connection(
    client: Client, encoded: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    client.open(1)
    client.send(request(3, encoded))
    assert client.failure() == COMPRESSION_ERROR
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("encoded", BROKEN.values(), ids=BROKEN.keys())
def test_so_does_one_in_trailers_or_on_a_stream_that_is_ignored(encoded: bytes) -> None:
    client = Client()
    client.open(1)
    client.send(request(1, encoded))
    assert client.failure() == COMPRESSION_ERROR
    client = Client()
    client.open(1)
    client.connection.reset_stream(1, 0)
    client.send(request(1, encoded))
    assert client.failure() == COMPRESSION_ERROR


def test_the_dynamic_table_is_followed(client: Client) -> None:
    inserting = b"".join(literal(name, value, INDEXED) for name, value in REQUEST)
    indexed = bytes(0x80 | 62 + i for i in reversed(range(len(REQUEST))))
    assert client.send(request(1, inserting)) == [http2.RequestReceived(1, REQUEST, True)]
    assert client.send(request(3, indexed)) == [http2.RequestReceived(3, REQUEST, True)]


@pytest.mark.parametrize("length", [126, 127, 128, 254, 255, 256, 16_000])
def test_strings_of_any_length_are_taken(client: Client, length: int) -> None:
    """RFC 7541 5.1: 255 has a continuation byte without a bit of value."""
    [event] = client.send(request(1, block([*REQUEST[:4], (b"x", b"y" * length)])))
    assert event == http2.RequestReceived(1, [*REQUEST[:4], (b"x", b"y" * length)], True)


def test_a_table_size_update_to_0_empties_the_table(client: Client) -> None:
    client.send(request(1, block(REQUEST) + literal(b"x", b"y", INDEXED)))
    client.send(request(3, b"\x20\x3f\xe1\x1f" + block(REQUEST)))
    client.send(request(5, block(REQUEST) + b"\xbe"))
    assert client.failure() == COMPRESSION_ERROR


def test_an_entry_larger_than_the_table_empties_it(client: Client) -> None:
    client.send(request(1, block(REQUEST) + literal(b"x", b"y", INDEXED)))
    client.send(request(3, block(REQUEST) + literal(b"x", b"y" * 4_096, INDEXED)))
    client.send(request(5, block(REQUEST) + b"\xbe"))
    assert client.failure() == COMPRESSION_ERROR


class TestRepeatedBlocks:
    @pytest.fixture
    def decoded(self, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
        """The blocks that were decoded."""
        seen: list[bytes] = []
        decode = HpackDecoder.decode

        def spy(self: HpackDecoder, block: bytes) -> object:
            seen.append(block)
            return decode(self, block)

        monkeypatch.setattr(HpackDecoder, "decode", spy)
        return seen

    def test_a_block_that_leaves_the_table_alone_is_decoded_once(self, client: Client, decoded: list[bytes]) -> None:
        events = [client.send(request(stream_id, block(REQUEST))) for stream_id in (1, 3, 5)]
        assert [event.headers for [event] in events] == [REQUEST] * 3  # type: ignore[union-attr]
        assert len(decoded) == 1

    def test_an_inserted_entry_changes_what_the_same_bytes_mean(self, client: Client, decoded: list[bytes]) -> None:
        insert = [block(REQUEST) + literal(b"x", value, INDEXED) for value in (b"1", b"2")]
        newest = block(REQUEST) + b"\xbe"
        got = []
        for stream_id, encoded in enumerate([insert[0], newest, newest, insert[1], newest, insert[0], newest]):
            [event] = client.send(request(2 * stream_id + 1, encoded))
            assert isinstance(event, http2.RequestReceived)
            got.append(event.headers[-1][1])
        assert got == [b"1", b"1", b"1", b"2", b"2", b"1", b"1"]
        assert len(decoded) == 6

    @pytest.mark.parametrize("where", ["trailers", "a refused stream", "an ignored stream", "a malformed request"])
    def test_an_entry_inserted_elsewhere_counts_too(self, where: str) -> None:
        client = Client(max_concurrent_streams=2)
        client.open(1)
        client.send(request(3, block(REQUEST) + literal(b"x", b"old", INDEXED)))
        newest = block(REQUEST) + b"\xbe"
        client.connection.reset_stream(3, 0)
        [event] = client.send(request(5, newest))
        inserted = literal(b"x", b"new", INDEXED)
        if where == "trailers":
            client.send(request(1, inserted))
        elif where == "a refused stream":
            client.send(request(7, block(REQUEST) + inserted))
        elif where == "an ignored stream":
            client.send(request(3, inserted))
        else:
            client.connection.reset_stream(1, 0)
            client.send(request(7, inserted))
        client.connection.reset_stream(1, 0)
        client.connection.reset_stream(5, 0)
        [event] = client.send(request(9, newest))
        assert isinstance(event, http2.RequestReceived)
        assert event.headers[-1] == (b"x", b"new")

    def test_a_malformed_request_stays_malformed(self, client: Client) -> None:
        for stream_id in (1, 3):
            assert client.send(request(stream_id, block(REQUEST[1:]))) == []
            assert reset_code(client.sent(), stream_id) == 1

    def test_a_content_length_is_remembered_with_its_block(self, client: Client) -> None:
        encoded = block([*REQUEST, (b"content-length", b"1")])
        for stream_id in (1, 3):
            client.send(frame(HEADERS, END_HEADERS, stream_id, encoded))
            assert client.send(frame(0, 0, stream_id, b"ab")) == [http2.StreamReset(stream_id, 1, False)]

    def test_what_is_kept_is_bounded(self, decoded: list[bytes]) -> None:
        client = Client(header_cache_size=1_000)
        blocks = [block([*REQUEST, (b"x", b"%d" % i)]) for i in range(50)]
        for stream_id, encoded in enumerate([*blocks, blocks[-1], blocks[0]]):
            client.send(request(2 * stream_id + 1, encoded))
        assert len(decoded) == 51
        client = Client(header_cache_size=0)
        client.send(request(1, blocks[0]), request(3, blocks[0]))
        assert len(decoded) == 53

    def test_after_a_change_of_the_table_or_an_overflow_there_is_room_again(self, decoded: list[bytes]) -> None:
        """Two of the blocks have room at a time."""
        blocks = [block([*REQUEST, (b"x", b"%d" % i)]) for i in range(4)]
        client = Client(header_cache_size=1_200)
        for stream_id, encoded in enumerate([*blocks, blocks[2], blocks[3]]):
            client.send(request(2 * stream_id + 1, encoded))
        assert len(decoded) == 4
        client.send(request(21, block(REQUEST) + literal(b"x", b"y", INDEXED)))
        for stream_id, encoded in enumerate([blocks[0], blocks[1], blocks[0], blocks[1]]):
            client.send(request(2 * stream_id + 23, encoded))
        assert len(decoded) == 7


class TestListSize:
    def fields(self, size: int) -> list[tuple[bytes, bytes]]:
        """A request whose list is `size` bytes as RFC 9113 6.5.2 counts."""
        used = sum(len(name) + len(value) + 32 for name, value in REQUEST)
        return [*REQUEST, (b"x", b"y" * (size - used - 33))]

    def test_a_list_of_the_limit_comes_through(self) -> None:
        client = Client(max_header_list_size=8_000)
        [event] = client.send(headers(1, self.fields(8_000)))
        assert isinstance(event, http2.RequestReceived)

    def test_a_longer_one_costs_its_stream(self) -> None:
        client = Client(max_header_list_size=8_000)
        client.open(1)
        assert client.send(headers(3, self.fields(8_001))) == []
        assert reset_code(client.sent(), 3) == ENHANCE_YOUR_CALM
        trailers = headers(1, [(b"x", b"y" * 8_000)], END_HEADERS | END_STREAM)
        assert client.send(trailers) == [http2.StreamReset(1, ENHANCE_YOUR_CALM, False)]
        assert client.still_serves(5)

    def test_one_of_more_than_four_times_the_limit_costs_the_connection(self) -> None:
        client = Client(max_header_list_size=1_000)
        client.send(headers(1, self.fields(4_000)))
        assert reset_code(client.sent(), 1) == ENHANCE_YOUR_CALM
        client.send(headers(3, self.fields(4_001)))
        assert client.failure() == ENHANCE_YOUR_CALM


BLOCKS = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.sampled_from([b"x", b"te", b":path", b"y" * 3_000]), st.binary(max_size=40), st.booleans()),
            max_size=8,
        ),
        st.booleans(),
        st.sampled_from([None, 0, 100, 4_096]),
    ),
    max_size=5,
)


@hypothesis_settings(deadline=None)
@given(BLOCKS)
def test_what_another_encoder_encodes_is_decoded(
    blocks: list[tuple[list[tuple[bytes, bytes, bool]], bool, int | None]],
) -> None:
    """Fields indexed or not, Huffman-coded or not, the table resized and overrun in between."""
    encoder, decoder = hpack.Encoder(), HpackDecoder(100_000)
    for fields, huffman, table_size in blocks:
        if table_size is not None:
            encoder.header_table_size = table_size
        headers, size = decoder.decode(encoder.encode(fields, huffman))
        assert headers == [(name, value) for name, value, _ in fields]
        assert size == sum(len(name) + len(value) + 32 for name, value, _ in fields)


REPRESENTATIONS = st.one_of(
    st.integers(0, 70).map(lambda index: integer(index, 7, 0x80)),
    st.sampled_from([0, 30, 4_096, 4_097]).map(lambda size: integer(size, 5, 0x20)),
    st.builds(literal, st.binary(max_size=5), st.binary(max_size=5), st.sampled_from([0, 0x10, 0x40])),
    st.builds(
        lambda index, text, first: integer(index, 6 if first else 4, first) + integer(len(text), 7, 0x80) + text,
        st.integers(1, 65),
        st.binary(max_size=4),
        st.sampled_from([0, 0x40]),
    ),
    st.binary(max_size=4),
)


@hypothesis_settings(deadline=None)
@given(st.lists(st.lists(REPRESENTATIONS, max_size=6).map(b"".join), max_size=4))
def test_any_blocks_mean_what_the_library_says_they_mean(blocks: list[bytes]) -> None:
    """Up to the first that either refuses; ours alone may refuse long integers and a third table size update."""
    ours, library = HpackDecoder(65_536), hpack.Decoder()
    for encoded in blocks:
        try:
            expected = [tuple(field) for field in library.decode(encoded, raw=True)]
        except (hpack.HPACKError, IndexError, ValueError):
            with pytest.raises(http2.ProtocolError):
                ours.decode(encoded)
            return
        try:
            headers, _ = ours.decode(encoded)
        except http2.ProtocolError:
            assert sum(byte & 0xE0 == 0x20 for byte in encoded) > 2 or re.search(rb"[\x80-\xff]{4}", encoded)
            return
        assert headers == expected


def test_fields_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = Client()
    for i in range(100):
        secret = literal(b"authorization", b"secret %100d" % i, INDEXED)
        client.send(request(2 * i + 1, block(REQUEST) + secret))
    assert client.connection.open_streams == 100
    assert "secret" not in caplog.text


def test_the_generation_changes_with_the_table_and_only_then() -> None:
    decoder = HpackDecoder(65_536)
    generations = []
    for encoded in (
        b"\x82",
        b"\xbe"[:0],
        literal(b"x", b"y"),
        literal(b"x", b"y", 0x10),
        literal(b"x", b"y", INDEXED),
        b"\xbe",
        b"\x20",
    ):
        decoder.decode(encoded)
        generations.append(decoder.generation)
    assert generations == [0, 0, 0, 0, 1, 1, 2]


class TestEncoding:
    def test_another_decoder_reads_it(self) -> None:
        fields = [
            (b":status", b"200"),
            (b"content-type", b"application/grpc"),
            (b"x", b""),
            (b"long-bin", b"v" * 126),
            (b"longer-bin", b"v" * 127),
            (b"longest-bin", b"\xff" * 20_000),
            (b"n" * 300, b"v"),
        ]
        decoder = hpack.Decoder(max_header_list_size=2**20)
        assert decoder.decode(http2.encode_headers(fields), raw=True) == fields
        assert not decoder.header_table.dynamic_entries
        assert decoder.decode(http2.encode_headers([(b":status", b"415")]), raw=True) == [(b":status", b"415")]

    def test_a_status_of_200_takes_one_byte(self) -> None:
        assert http2.encode_headers([(b":status", b"200")]) == b"\x88"

    @pytest.mark.parametrize("name", [b"", b"Upper", b"a b", b"a:b", b":path", b"a\nb", b"\xff"])
    def test_a_bad_name_is_refused_by_name(self, name: bytes) -> None:
        with pytest.raises(ValueError, match="header name"):
            http2.encode_headers([(name, b"x")])

    @pytest.mark.parametrize("value", [b"a\r\nb", b"a\nb", b"\0", b" a", b"a\t"])
    def test_a_bad_value_is_refused_by_the_name_of_its_header(self, value: bytes) -> None:
        with pytest.raises(ValueError, match="header b'grpc-message'"):
            http2.encode_headers([(b"grpc-message", value)])

    def test_a_long_block_is_split_into_continuations(self, client: Client) -> None:
        client.open(1)
        encoded = http2.encode_headers([(b"x", b"y" * 40_000)])
        client.connection.send_headers(1, encoded, end_stream=True)
        frames = read_frames(client.connection.take_output())[:-1]
        assert [(f.kind, f.flags) for f in frames] == [
            (HEADERS, END_STREAM),
            (CONTINUATION, 0),
            (CONTINUATION, END_HEADERS),
        ]
        assert b"".join(f.payload for f in frames) == encoded

    def test_integers_of_the_tests_own_builder_agree(self) -> None:
        assert integer(1_337, 5) == b"\x1f\x9a\x0a"  # RFC 7541 C.1.2
