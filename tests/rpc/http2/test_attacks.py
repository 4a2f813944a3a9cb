"""Protects the bounds: whatever a client sends, it loses at most its own connection, and costs no more than limits.py says.

Costs are counted in frames answered, bytes allocated and blocks decoded; time only where a bound is generous by orders of magnitude.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hpack.table import HeaderTable

from tests.rpc.http2.wire import (
    ACK,
    CANCEL,
    COMPRESSION_ERROR,
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FRAME_SIZE_ERROR,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    REQUEST,
    RST_STREAM,
    SETTINGS,
    TRAILERS,
    Client,
    block,
    data,
    frame,
    goaway,
    headers,
    literal,
    padded,
    ping,
    rst_stream,
    settings,
    window_update,
)
from trio_frontend.rpc import http2
from trio_frontend.rpc.http2.hpack_decoder import HpackDecoder

KIB = 1_024
MIB = 1_024 * KIB

WHOLE_REQUEST = END_HEADERS | END_STREAM


@contextmanager
def allocating_at_most(bytes_at_peak: int, bytes_kept: int | None = None) -> Iterator[None]:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before <= bytes_at_peak
    if bytes_kept is not None:
        assert after - before <= bytes_kept


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the blocks that were decoded."""
    lengths: list[int] = []
    decode = HpackDecoder.decode

    def spy(self: HpackDecoder, block: bytes) -> object:
        lengths.append(len(block))
        return decode(self, block)

    monkeypatch.setattr(HpackDecoder, "decode", spy)
    return lengths


def flood(client: Client, make: Callable[[int], bytes], count: int, *, per_read: int = 1, seconds: float = 0.0) -> int:
    """Send up to `count` of what `make` makes, taking the output after each read; returns how many were sent before the failure."""
    for start in range(0, count, per_read):
        events = client.send(*(make(i) for i in range(start, start + per_read)))
        if events and isinstance(events[-1], http2.ConnectionFailed):
            return start + per_read
        client.sent()
        client.events.clear()
        client.now += seconds
    return count


class TestFrames:
    def test_a_frame_of_16_mb_is_refused_before_its_body(self) -> None:
        client = Client()
        with allocating_at_most(16 * KIB):
            client.send(b"\xff\xff\xff\x00\x00\x00\x00\x00\x01")
        assert client.failure() == FRAME_SIZE_ERROR

    def test_a_long_frame_in_small_reads_takes_time_in_proportion_to_its_length(self) -> None:
        """4 MB in 64-byte reads: a tenth of a second, or a minute if every read moves what is there already."""
        client = Client(max_frame_size=2**22, connection_window=2**23, stream_window=2**23)
        client.open(1)
        whole = data(1, bytes(2**22))
        began = time.process_time()
        for start in range(0, len(whole), 64):
            client.send(whole[start : start + 64])
        assert time.process_time() - began < 10
        assert len(client.events) == 2

    def test_no_more_than_a_frame_is_held(self) -> None:
        client = Client()
        client.open(1)
        with allocating_at_most(256 * KIB, bytes_kept=64 * KIB):
            for _ in range(100):
                client.send(data(1, b"x" * 16_000) + data(1, b"y" * 16_384)[:-1])
                client.send(b"y")
                client.connection.acknowledge(1, 16_000 + 16_384)
                client.events.clear()
                client.sent()


class TestHeaderBlocks:
    def test_a_block_of_more_than_16_kib_is_refused_before_decoding(self, decoded: list[int]) -> None:
        client = Client()
        with allocating_at_most(128 * KIB):
            client.send(frame(HEADERS, 0, 1, bytes(10_000)))
            client.send(frame(CONTINUATION, END_HEADERS, 1, bytes(6_385)))
        assert client.failure() == ENHANCE_YOUR_CALM
        assert decoded == []

    def test_one_of_16_kib_is_not(self) -> None:
        filler = block([*REQUEST, (b"x", b"y" * 16_000)])
        padding = literal(b"z", b"z" * (16_384 - len(filler) - 5))
        client = Client(max_header_list_size=32_768)
        assert len(filler + padding) == 16_384
        events = client.send(
            frame(HEADERS, WHOLE_REQUEST, 1, filler + padding),
            frame(HEADERS, END_STREAM, 3, filler),
            frame(CONTINUATION, END_HEADERS, 3, padding),
        )
        assert [type(event) for event in events] == [http2.RequestReceived, http2.RequestReceived]

    def test_so_is_one_in_a_single_frame_where_larger_frames_are_allowed(self, decoded: list[int]) -> None:
        client = Client(max_frame_size=20_000)
        client.send(frame(HEADERS, END_HEADERS, 1, bytes(16_385)))
        assert client.failure() == ENHANCE_YOUR_CALM
        assert decoded == []

    @pytest.mark.parametrize("size", [0, 1, 8])
    def test_endless_small_continuations_end_at_a_count(self, size: int) -> None:
        client = Client()
        client.send(frame(HEADERS, 0, 1, b"\x82"))
        with allocating_at_most(64 * KIB):
            sent = flood(client, lambda _: frame(CONTINUATION, 0, 1, b"\x84" * size), 50_000)
        assert sent == client.limits.max_continuations + 1
        assert client.failure() == ENHANCE_YOUR_CALM

    def test_one_large_entry_16000_times_is_decoded_up_to_four_list_limits(self) -> None:
        client = Client()
        client.send(frame(HEADERS, WHOLE_REQUEST, 1, block(REQUEST) + literal(b"x", b"y" * 4_000, 0x40)))
        bomb = frame(HEADERS, WHOLE_REQUEST, 3, block(REQUEST) + b"\xbe" * 16_000)
        with allocating_at_most(512 * KIB):
            client.send(bomb)
        assert client.failure() == ENHANCE_YOUR_CALM

    @pytest.mark.parametrize("entry", [b"\x40\0\0", b"\x40\x01x\0"], ids=["an empty entry", "an entry without a value"])
    def test_an_empty_entry_16000_times_counts_32_bytes_each(self, entry: bytes) -> None:
        client = Client()
        bomb = entry + b"\xbe" * 16_000
        with allocating_at_most(1 * MIB):
            client.send(frame(HEADERS, WHOLE_REQUEST, 1, bomb))
        assert client.failure() == ENHANCE_YOUR_CALM

    @pytest.mark.parametrize("bomb", [b"\xbe", b"\x20", b"\x82"], ids=["an entry", "a table size update", "a static entry"])
    def test_a_million_of_anything_do_not_fit(self, bomb: bytes, decoded: list[int]) -> None:
        client = Client()
        client.send(frame(HEADERS, 0, 1, bomb * 10_000))
        sent = flood(client, lambda _: frame(CONTINUATION, 0, 1, bomb * 10_000), 100)
        assert sent == 1
        assert client.failure() == ENHANCE_YOUR_CALM
        assert decoded == []

    def test_a_run_of_table_size_updates_is_refused_at_the_third(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = []
        monkeypatch.setattr(HeaderTable, "maxsize", property(lambda _: 4_096, lambda _, size: sizes.append(size)))
        client = Client()
        client.send(frame(HEADERS, END_HEADERS, 1, b"\x20" * 16_000))
        assert client.failure() == COMPRESSION_ERROR
        assert sizes == [0, 0]

    @pytest.mark.parametrize("first", [b"\xff", b"\x7f", b"\x3f", b"\x0f", b"\0\x7f"])
    def test_a_long_integer_is_refused_before_it_is_computed(self, first: bytes) -> None:
        client = Client()
        with allocating_at_most(64 * KIB):
            client.send(frame(HEADERS, END_HEADERS, 1, first + b"\xff" * 16_000 + b"\0"))
        assert client.failure() == COMPRESSION_ERROR

    def test_the_table_keeps_its_entries_and_not_the_blocks_they_came_in(self) -> None:
        """128 entries of a few bytes, each from a block of 16 KB."""
        client = Client()
        filler = literal(b"filler", b"f" * 16_000)
        client.now = 1.0
        with allocating_at_most(1 * MIB, bytes_kept=96 * KIB):
            for i in range(128):
                name = b"%03d" % i
                client.send(frame(HEADERS, WHOLE_REQUEST, 2 * i + 1, filler + literal(name, b"", 0x40)))
                client.events.clear()
                client.sent()
        assert client.still_serves(999)

    def test_distinct_header_blocks_leave_a_bounded_cache(self) -> None:
        client = Client()
        with allocating_at_most(1 * MIB, bytes_kept=256 * KIB):
            for i in range(2_000):
                fields = [*REQUEST, (b"x", b"%d" % i)]
                client.send(headers(2 * i + 1, fields, WHOLE_REQUEST))
                client.connection.send_headers(2 * i + 1, TRAILERS, end_stream=True)
                client.events.clear()
                client.sent()


class TestStreams:
    def test_requests_reset_at_once_end_at_a_budget(self) -> None:
        """CVE-2023-44487."""
        client = Client()
        opened = flood(client, lambda i: headers(2 * i + 1) + rst_stream(2 * i + 1), 50_000)
        assert opened == client.limits.resets.burst + 1
        assert client.failure() == ENHANCE_YOUR_CALM

    def test_all_in_one_read_they_end_there_too(self) -> None:
        client = Client()
        client.send(b"".join(headers(2 * i + 1) + rst_stream(2 * i + 1) for i in range(50_000)))
        requests = [event for event in client.events if isinstance(event, http2.RequestReceived)]
        assert len(requests) == client.limits.resets.burst + 1
        assert client.failure() == ENHANCE_YOUR_CALM

    def test_below_the_budget_they_leave_nothing_behind(self) -> None:
        client = Client()
        make = lambda i: headers(2 * i + 1) + rst_stream(2 * i + 1)  # noqa: E731
        flood(client, make, 1_000, seconds=0.1)
        with allocating_at_most(256 * KIB, bytes_kept=32 * KIB):
            assert flood(client, lambda i: make(i + 1_000), 10_000, seconds=0.1) == 10_000
        assert client.connection.open_streams == 0

    def test_calls_that_end_as_they_should_are_not_counted_and_leave_nothing_behind(self) -> None:
        client = Client()
        with allocating_at_most(256 * KIB, bytes_kept=64 * KIB):
            for i in range(10_000):
                assert client.still_serves(2 * i + 1)
                client.events.clear()

    @pytest.mark.parametrize(
        "make",
        [
            lambda i: headers(2 * i + 1, REQUEST[1:]),
            lambda i: headers(2 * i + 1) + window_update(2 * i + 1, 0),
            lambda i: headers(2 * i + 1) + frame(PRIORITY, 0, 2 * i + 1, b"1234"),
            lambda i: headers(2 * i + 1, flags=WHOLE_REQUEST) + data(2 * i + 1, b"x"),
            lambda i: headers(2 * i + 1) + window_update(2 * i + 1, 2**31 - 1),
            lambda i: headers(2 * i + 1, [*REQUEST, (b"content-length", b"1")]) + data(2 * i + 1, b"ab"),
            lambda i: headers(2 * i + 1) + headers(2 * i + 1),
        ],
        ids=[
            "a malformed request",
            "WINDOW_UPDATE of 0",
            "a short PRIORITY",
            "DATA after the end",
            "a window that overflows",
            "a body that is too long",
            "trailers that do not end",
        ],
    )
    def test_streams_that_we_are_made_to_reset_end_at_the_same_budget(self, make: Callable[[int], bytes]) -> None:
        """CVE-2025-8671."""
        client = Client()
        assert flood(client, make, 50_000) == client.limits.resets.burst + 1
        assert client.failure() == ENHANCE_YOUR_CALM

    def test_streams_over_the_limit_end_at_the_same_budget(self) -> None:
        client = Client(max_concurrent_streams=1)
        client.open(1)
        refused = 0
        for i in range(50_000):
            client.send(headers(2 * i + 3))
            answer = client.sent()
            refused += answer[0].kind == RST_STREAM and answer[0].payload[3] == REFUSED_STREAM
            if len(answer) > 1 or answer[0].kind != RST_STREAM:
                break
        assert refused == client.limits.resets.burst + 1
        assert isinstance(client.events[-1], http2.ConnectionFailed)

    def test_open_streams_take_a_bounded_amount_of_memory_each(self) -> None:
        client = Client()
        with allocating_at_most(2 * MIB):
            for i in range(1_000):
                client.send(headers(2 * i + 1))
                client.events.clear()
        assert client.connection.open_streams == 1_000

    def test_headers_on_a_stream_that_we_reset_end_at_a_budget(self) -> None:
        client = Client()
        client.open(1)
        client.connection.reset_stream(1, CANCEL)
        assert flood(client, lambda _: headers(1), 50_000) == client.limits.ignored.burst + 1
        assert client.failure() == ENHANCE_YOUR_CALM

    def test_streams_opened_after_our_goaway_end_at_a_budget(self) -> None:
        client = Client()
        client.connection.go_away(0)
        assert flood(client, lambda i: headers(2 * i + 1), 50_000) == client.limits.ignored.burst + 1
        assert client.failure() == ENHANCE_YOUR_CALM


class TestFloods:
    """Frames that flow control does not hold back, 50,000 of each."""

    def end(self, make: Callable[[int], bytes], *, per_read: int = 100) -> tuple[Client, int]:
        client = Client()
        client.open(1)
        with allocating_at_most(512 * KIB):
            sent = flood(client, make, 50_000, per_read=per_read)
        assert client.failure() == ENHANCE_YOUR_CALM
        return client, sent

    def test_settings(self) -> None:
        client, sent = self.end(lambda _: settings([(INITIAL_WINDOW_SIZE, 9)]))
        assert sent <= client.limits.settings.burst + 100

    def test_empty_data(self) -> None:
        client, sent = self.end(lambda _: data(1))
        assert sent <= client.limits.empty_data.burst + 100

    def test_data_of_padding_only(self) -> None:
        client, sent = self.end(lambda _: data(1, padded(b"", 1), PADDED))
        assert sent <= client.limits.empty_data.burst + 100

    def test_empty_data_on_a_stream_that_we_reset(self) -> None:
        client = Client()
        client.open(1)
        client.connection.reset_stream(1, CANCEL)
        assert flood(client, lambda _: data(1), 50_000) == client.limits.empty_data.burst + 1
        assert client.failure() == ENHANCE_YOUR_CALM

    def test_window_updates(self) -> None:
        client, sent = self.end(lambda i: window_update(i & 1, 1))
        assert sent <= client.limits.window_updates.burst + 100

    @pytest.mark.parametrize(
        "make",
        [
            lambda i: frame(PRIORITY, 0, 2 * i + 1, b"\0\0\0\0\1"),
            lambda i: frame(0x99, 0, i, b"x"),
            lambda _: frame(SETTINGS, ACK),
            lambda _: ping(b"abcdefgh", ACK),
            lambda _: goaway(),
        ],
        ids=["PRIORITY", "an unknown type", "SETTINGS acks", "PING acks", "GOAWAY"],
    )
    def test_frames_without_effect(self, make: Callable[[int], bytes]) -> None:
        client, sent = self.end(make)
        assert sent <= client.limits.ignored.burst + 200

    def test_resets_of_a_closed_stream(self) -> None:
        client = Client()
        client.send(headers(1), rst_stream(1))
        assert flood(client, lambda _: rst_stream(1), 50_000) == client.limits.ignored.burst + 1
        assert client.failure() == ENHANCE_YOUR_CALM

    def test_at_their_rate_none_of_them_ends_a_connection(self) -> None:
        client = Client()
        client.open(1)
        for i in range(3_000):
            client.now += 0.1
            client.send(
                settings([(INITIAL_WINDOW_SIZE, 70_000 + i)]), data(1), window_update(0, 1), frame(PRIORITY, 0, 1, bytes(5))
            )
            client.sent()
        assert client.still_serves(3)


class TestPings:
    """gRPC's keepalive rules (gRPC proposal A8): too many pings is a name that clients know."""

    def test_a_flood_ends_after_a_few_strikes_with_the_reason_that_grpc_clients_know(self) -> None:
        client = Client()
        client.open(1)
        events = client.send(*[ping()] * 50_000)
        assert [type(event) for event in events] == [http2.ConnectionFailed]
        frames = client.sent()
        assert [f.kind for f in frames[:-1]] == [PING] * (client.limits.max_ping_strikes + 1)
        assert frames[-1].payload[4:] == b"\0\0\0\x0b" + b"too_many_pings"

    def test_pings_at_the_allowed_interval_go_on_for_ever(self) -> None:
        client = Client()
        assert flood(client, lambda _: ping(), 1_000, seconds=client.limits.min_ping_interval) == 1_000

    def test_what_we_send_on_a_stream_clears_the_strikes(self) -> None:
        """Clients ping to measure the bandwidth of what they receive."""
        client = Client()
        client.open(1)
        for send in (
            lambda: client.connection.try_send_message(1, b"\0\0\0\0\0", b""),
            lambda: client.connection.send_data(1, b"x"),
            lambda: client.still_serves(3 + 2 * len(client.events)),
        ):
            for _ in range(20):
                client.send(ping(), ping())
                send()
        assert client.connection.open_streams == 1

    def test_pings_in_quick_succession_at_the_start_are_forgiven_within_the_strikes(self) -> None:
        client = Client(max_ping_strikes=5)
        assert client.send(*[ping()] * 6) == []
        client.send(ping())
        assert client.failure() == ENHANCE_YOUR_CALM


class TestSlowReaders:
    def test_a_reader_that_opens_no_window_gets_no_data(self) -> None:
        client = Client()
        client.send(settings([(INITIAL_WINDOW_SIZE, 0)]))
        client.open(1)
        assert not any(client.connection.try_send_message(1, b"\0\0\0\0\1", b"x") for _ in range(10_000))
        assert client.connection.unsent == 0

    def test_a_reader_that_opens_one_byte_at_a_time_gets_one_byte_at_a_time(self) -> None:
        client = Client()
        client.send(settings([(INITIAL_WINDOW_SIZE, 0)]))
        client.open(1)
        for _ in range(2_000):
            client.send(window_update(1, 1))
            client.events.clear()
            client.connection.send_data(1, b"x")
            assert len(client.sent()) == 1

    def test_what_waits_for_a_reader_with_huge_windows_is_bounded(self) -> None:
        client = Client()
        client.send(settings([(INITIAL_WINDOW_SIZE, 2**31 - 1)]), window_update(0, 2**31 - 1 - 65_535))
        client.open(1)
        message = b"x" * 1_000
        with allocating_at_most(2 * client.limits.max_unsent):
            while client.connection.try_send_message(1, b"\0\0\0\3\xe8", message):
                pass
        assert client.limits.max_unsent < client.connection.unsent <= client.limits.max_unsent + 1_014

    @pytest.mark.parametrize("how", ["messages", "data", "answers"])
    def test_a_reader_may_update_windows_four_times_for_every_frame_it_gets(self, how: str) -> None:
        client = Client()
        client.open(1)
        for i in range(5_000):
            if how == "messages":
                assert client.connection.try_send_message(1, b"\0\0\0\0\1", b"x")
            elif how == "data":
                client.connection.send_data(1, b"x")
            else:
                assert client.still_serves(2 * i + 3)
            assert client.send(*[window_update(0, 3), window_update(1, 3)] * 2) == []
            client.sent()
            client.events.clear()


class TestMemory:
    def test_unknown_settings_are_not_kept(self) -> None:
        client = Client()
        pairs = [(0x100 + i, i) for i in range(2_700)]
        with allocating_at_most(512 * KIB, bytes_kept=8 * KIB):
            for _ in range(24):
                client.send(settings(pairs))
                client.sent()
        assert client.still_serves(1)

    def test_data_on_a_closed_stream_is_not_kept(self) -> None:
        client = Client()
        client.open(1)
        client.connection.reset_stream(1, CANCEL)
        piece = data(1, b"x" * 16_384)
        with allocating_at_most(256 * KIB, bytes_kept=8 * KIB):
            for _ in range(200):
                client.send(piece)
                client.sent()

    def test_a_failed_connection_keeps_nothing(self) -> None:
        client = Client()
        with allocating_at_most(4 * MIB, bytes_kept=160 * KIB):
            for i in range(1_000):
                client.send(headers(2 * i + 1))
            client.events.clear()
            client.send(data(1, b"x" * 16_384) + data(1, b"y" * 16_384)[:-1])
            client.send(frame(0x99, 0, 0, b"y" * 16_384), frame(SETTINGS, 0, 1))
            client.events.clear()
            client.sent()

    @pytest.mark.parametrize("end", ["of input", "by a fault"])
    def test_nor_an_unfinished_frame_or_header_block(self, end: str) -> None:
        clients = [Client() for _ in range(10)]
        with allocating_at_most(1 * MIB, bytes_kept=64 * KIB):
            for client in clients:
                client.send(frame(HEADERS, 0, 1, bytes(15_000)))
                if end == "of input":
                    client.send(frame(CONTINUATION, 0, 1, bytes(15_000))[:-1])
                    assert len(client.connection.receive_eof()) == 1
                else:
                    client.send(ping())
                client.events.clear()

    def test_of_the_streams_that_we_reset_only_the_last_are_remembered(self) -> None:
        client = Client()
        with allocating_at_most(1 * MIB, bytes_kept=64 * KIB):
            for i in range(5_000):
                client.send(headers(2 * i + 1))
                client.connection.reset_stream(2 * i + 1, CANCEL)
                client.events.clear()
                client.sent()
        assert client.send(data(2 * (5_000 - 256) + 1, b"x")) == []
        assert client.sent() == [], "one of the last 256"
        client.send(data(2 * (5_000 - 257) + 1, b"x"))
        assert client.sent()[0].kind == RST_STREAM

    def test_an_idle_connection_is_small(self) -> None:
        limits = http2.Limits()
        http2.Connection(limits)
        with allocating_at_most(8 * KIB, bytes_kept=8 * KIB):
            connection = http2.Connection(limits)
            connection.receive_data(PREFACE + settings(), 0.0)
            connection.take_output()


def test_an_attack_costs_nothing_but_its_own_connection() -> None:
    attacked, other = Client(), Client()
    attacked.send(frame(SETTINGS, 0, 1))
    assert attacked.failure() == PROTOCOL_ERROR
    assert other.still_serves(1)
