"""Protects the orderly end: shutdown in its order, connection age and idleness, and keepalive's judgement of who has gone."""

from __future__ import annotations

import math
import random

import pytest
import trio
import trio.testing
from google.protobuf.wrappers_pb2 import BytesValue

from tests.rpc.harness import Recorder, Serving, Statuses, service, serving, value
from tests.rpc.http2 import wire
from trio_frontend import rpc
from trio_frontend.rpc.timers import Due, Timers

MockClock = trio.testing.MockClock
ALL_STREAMS = 2**31 - 1


async def test_shutdown_says_goaway_twice_and_lets_calls_finish(autojump_clock: MockClock) -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        first = await client.open(b"")
        await recorder.until_started()
        client.answers = False
        serve.server.begin_shutdown(60)
        await client.until(lambda: bool(client.goaways))
        assert client.goaways == [(ALL_STREAMS, 0, b"")]
        # Sent before the client answers the PING, so perhaps before it knew: served.
        second = await client.open(b"")
        await client.send(wire.ping(b"draining", wire.ACK))
        await client.until(lambda: len(client.goaways) == 2)
        assert client.goaways[1] == (second, 0, b"")
        assert serve.server.live_connections == 1
        await trio.sleep(30)
        recorder.release.set()
        for stream_id in (first, second):
            assert (await client.response(stream_id)).messages == [b"done"]
        await client.leave()
        await serve.server.shutdown(60)
        assert serve.server.live_connections == 0


async def test_shutdown_returns_as_soon_as_nothing_is_left(autojump_clock: MockClock) -> None:
    async with serving(service(Recorder())) as serve:
        client = await serve.connect()
        serve.nursery.start_soon(client.leave)
        await trio.testing.wait_all_tasks_blocked()
        start = trio.current_time()
        await serve.server.shutdown(1000)
        assert trio.current_time() == start


async def test_requests_after_the_last_goaway_are_not_served(autojump_clock: MockClock) -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        first = await client.open(b"")
        await recorder.until_started()
        serve.server.begin_shutdown(60)
        await client.until(lambda: len(client.goaways) == 2)
        await client.open(b"")
        await trio.testing.wait_all_tasks_blocked()
        assert recorder.started == 1
        recorder.release.set()
        assert (await client.response(first)).messages == [b"done"]


async def test_a_client_that_does_not_answer_the_ping_is_told_to_go_all_the_same(autojump_clock: MockClock) -> None:
    recorder = Recorder()
    async with serving(service(recorder), limits=rpc.ServerLimits(drain_ping_timeout=3)) as serve:
        client = await serve.connect()
        await client.open(b"")
        await recorder.until_started()
        client.answers = False
        start = trio.current_time()
        serve.server.begin_shutdown(60)
        await client.until(lambda: len(client.goaways) == 2)
        assert trio.current_time() - start == 3
        recorder.release.set()


async def test_after_the_grace_the_rest_end_with_unavailable(autojump_clock: MockClock) -> None:
    recorder, statuses = Recorder(), Statuses()
    async with serving(service(recorder), interceptors=[statuses]) as serve:
        client = await serve.connect()
        stream_id = await client.open(b"")
        await recorder.until_started()
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.leave)
            await serve.server.shutdown(7)
        assert trio.current_time() - start == 7
        response = client.responses[stream_id]
        assert (response.status, response.message) == (14, "server is shutting down")
        assert recorder.ends == ["Cancelled"]
        assert statuses.names == ["UNAVAILABLE"]


async def test_a_second_shutdown_shortens_the_first_and_never_lengthens_it(autojump_clock: MockClock) -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        await client.open(b"")
        await recorder.until_started()
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.leave)
            nursery.start_soon(serve.server.shutdown, 100)
            await trio.sleep(5)
            nursery.start_soon(serve.server.shutdown, 2)
            await trio.sleep(1)
            nursery.start_soon(serve.server.shutdown, 50)
        assert trio.current_time() - start == 7


async def test_cancelling_the_wait_for_a_shutdown_does_not_stop_it(autojump_clock: MockClock) -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        await client.open(b"")
        await recorder.until_started()
        serve.nursery.start_soon(client.leave)
        with trio.move_on_after(1):
            await serve.server.shutdown(10)
        assert recorder.ends == []
        await trio.sleep(10)
        assert recorder.ends == ["Cancelled"]


async def test_shutdown_takes_bounded_time_with_clients_that_never_close_and_never_read(
    autojump_clock: MockClock,
) -> None:
    recorder = Recorder()
    server = rpc.Server([service(recorder)], limits=rpc.ServerLimits(close_timeout=4))
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [])
        silent = Serving(server, nursery)
        for _ in range(3):
            client = await silent.connect()
            await client.open(b"")
        await recorder.until_started(3)
        silent.connect_silently()
        start = trio.current_time()
        await server.shutdown(10)
        assert trio.current_time() - start <= 14
        assert server.live_connections == 0


async def test_a_drain_need_not_wait_for_services_whose_calls_last_for_ever(autojump_clock: MockClock) -> None:
    calls, watches, statuses = Recorder(), Recorder(), Statuses()
    async with serving(service(calls), service(watches, name="test.Watch"), interceptors=[statuses]) as serve:
        client = await serve.connect()
        call, watch = await client.open(b""), await client.open(b"", path=b"/test.Watch/Call")
        await calls.until_started()
        await watches.until_started()
        serve.server.begin_shutdown(math.inf)
        with trio.move_on_after(10) as waiting:
            await serve.server.wait_drained(but={"test.Watch"})
        assert waiting.cancelled_caught
        assert serve.server.cut_off(but={"test.Watch"}) == 1
        await serve.server.wait_drained(but={"test.Watch"})
        assert (await client.response(call)).status == 14
        assert not client.responses[watch].closed
        watches.release.set()
        assert (await client.response(watch)).messages == [b"done"]
        await serve.server.wait_drained()
    assert statuses.names == ["UNAVAILABLE", "OK"]


async def test_a_server_serves_once() -> None:
    server = rpc.Server([service(Recorder())])
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, [])
        with pytest.raises(RuntimeError, match="serves once"):
            await server.serve([])
        await server.shutdown(0)
    with pytest.raises(RuntimeError, match="serves once"):
        await server.serve([])


async def test_a_connection_that_comes_during_the_drain_is_closed() -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        holding = await serve.connect()
        await holding.open(b"")
        await recorder.until_started()
        serve.server.begin_shutdown(60)
        late = await serve.connect()
        await late.read_to_the_end()
        recorder.release.set()


@pytest.mark.parametrize("grace", [-1, math.nan])
async def test_a_grace_that_is_none_is_refused(grace: float) -> None:
    server = rpc.Server([service(Recorder())])
    with pytest.raises(ValueError, match="grace"):
        await server.shutdown(grace)


async def test_an_idle_connection_is_told_to_go(autojump_clock: MockClock) -> None:
    recorder = Recorder()
    recorder.release.set()
    async with serving(service(recorder), limits=rpc.ServerLimits(max_connection_idle=50, keepalive_time=1000)) as serve:
        client = await serve.connect()
        start = trio.current_time()
        await trio.sleep(40)
        await client.call(b"")
        await client.leave()
        assert 90 <= trio.current_time() - start < 92
        assert client.goaways[0] == (ALL_STREAMS, 0, b"")


async def test_a_connection_with_a_call_is_not_idle(autojump_clock: MockClock) -> None:
    recorder = Recorder()
    async with serving(service(recorder), limits=rpc.ServerLimits(max_connection_idle=50)) as serve:
        client = await serve.connect()
        await client.open(b"")
        with trio.move_on_after(500):
            await client.read_to_the_end()
        assert client.goaways == []
        recorder.release.set()


async def test_an_old_connection_is_told_to_go_and_its_calls_have_their_grace(autojump_clock: MockClock) -> None:
    recorder, statuses = Recorder(), Statuses()
    limits = rpc.ServerLimits(max_connection_age=100, max_connection_age_grace=20)
    async with serving(service(recorder), limits=limits, interceptors=[statuses]) as serve:
        client = await serve.connect()
        stream_id = await client.open(b"")
        start = trio.current_time()
        await client.until(lambda: bool(client.goaways))
        told = trio.current_time() - start
        assert 90 <= told <= 110
        response = await client.response(stream_id)
        assert trio.current_time() - start == pytest.approx(told + 20)
        assert (response.status, response.message) == (14, "connection is too old")
        await client.leave()


async def test_connections_opened_together_do_not_grow_old_together() -> None:
    random.seed(1)
    timers = [Timers(rpc.ServerLimits(max_connection_age=100, keepalive_time=1e9), 0.0) for _ in range(100)]
    for timer in timers:
        timer.preface_by = math.inf
    ages = [timer.next() for timer in timers]
    assert 90 <= min(ages) < 93
    assert 107 < max(ages) <= 110


async def test_a_silent_client_is_asked_and_then_closed(autojump_clock: MockClock) -> None:
    recorder, statuses = Recorder(), Statuses()
    limits = rpc.ServerLimits(keepalive_time=30, keepalive_timeout=10)
    async with serving(service(recorder), limits=limits, interceptors=[statuses]) as serve:
        client = await serve.connect()
        await client.open(b"")
        client.answers = False
        start = trio.current_time()
        await client.read_to_the_end()
        assert trio.current_time() - start == 40
        assert client.pings == 1
        assert recorder.ends == ["Cancelled"]
        assert statuses.names == ["CANCELLED"]


async def test_a_client_that_answers_pings_is_kept(autojump_clock: MockClock) -> None:
    recorder = Recorder()
    async with serving(service(recorder), limits=rpc.ServerLimits(keepalive_time=30, keepalive_timeout=10)) as serve:
        client = await serve.connect()
        await client.open(b"")
        with trio.move_on_after(1000):
            await client.read_to_the_end()
        assert client.pings == 33
        recorder.release.set()


async def test_a_client_that_talks_is_not_asked(autojump_clock: MockClock) -> None:
    recorder = Recorder()
    recorder.release.set()
    async with serving(service(recorder), limits=rpc.ServerLimits(keepalive_time=30)) as serve:
        client = await serve.connect()
        for _ in range(100):
            await client.call(b"")
            await trio.sleep(20)
        assert client.pings == 0


async def test_pings_of_the_client_are_answered_and_too_many_end_the_connection(autojump_clock: MockClock) -> None:
    recorder = Recorder()
    async with serving(service(recorder)) as serve:
        client = await serve.connect()
        await client.open(b"")
        await recorder.until_started()
        for _ in range(5):
            await client.send(wire.ping())
            await trio.sleep(2)
        assert not client.closed
        await client.send(*[wire.ping()] * 10)
        await client.leave()
        assert [goaway[1:] for goaway in client.goaways] == [(wire.ENHANCE_YOUR_CALM, b"too_many_pings")]
        assert recorder.ends == ["Cancelled"]


def test_what_is_due_is_due_once_and_in_its_time() -> None:
    limits = rpc.ServerLimits(
        preface_timeout=10, headers_timeout=5, keepalive_time=60, keepalive_timeout=20, max_connection_idle=300
    )
    timers = Timers(limits, 0.0)
    assert timers.next() == 10
    assert timers.due(9.9) is None
    timers.preface_by = math.inf
    timers.read(50, unfinished=True, progress=False)
    assert timers.next() == 55
    timers.read(52, unfinished=True, progress=False)  # a byte more is no progress
    assert timers.next() == 55
    timers.read(54, unfinished=True, progress=True)  # another frame has begun
    assert timers.next() == 59
    assert timers.due(59) is Due.FRAME
    assert timers.due(59) is None
    timers.read(60, unfinished=False, progress=True)
    assert timers.due(119.9) is None
    assert timers.due(120) is Due.PING
    assert timers.next() == 140
    timers.read(130, unfinished=False, progress=False)
    assert timers.due(140) is None
    assert timers.due(190) is Due.PING
    assert timers.due(210) is Due.SILENCE
    assert timers.due(300) is Due.IDLE
    assert timers.due(1e9) is None
    assert timers.next() == math.inf


async def test_a_call_of_a_drained_connection_may_still_send(autojump_clock: MockClock) -> None:
    from tests.rpc.harness import SERVER_STREAM

    async def slow(message: BytesValue, request: rpc.Call) -> None:
        for i in range(5):
            await trio.sleep(1)
            await request.send(value(b"%d" % i))

    async with serving(service(slow, SERVER_STREAM)) as serve:
        client = await serve.connect()
        stream_id = await client.open(b"")
        await trio.sleep(0.5)
        serve.server.begin_shutdown(60)
        assert (await client.response(stream_id)).messages == [b"0", b"1", b"2", b"3", b"4"]
        await client.leave()
