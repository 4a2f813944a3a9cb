"""ZeroMQ sockets on Trio lose no message and no wake-up, and tell who connects and who goes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
import trio.lowlevel
import trio.testing
import zmq

from trio_frontend.engine.vllm.transport import Monitor, Socket, open_context

PATIENCE = 5.0
Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
async def context() -> AsyncIterator[Context]:
    async with open_context() as opened:
        yield opened


async def test_every_message_of_a_burst_arrives_in_order(context: Context) -> None:
    pull, push = Socket(context, zmq.PULL), Socket(context, zmq.PUSH, hwm=0)
    push.zmq.connect(pull.bind("tcp://127.0.0.1:*"))
    received: list[int] = []

    async def read() -> None:
        while len(received) < 5000:
            received.append(int((await pull.receive())[0].bytes))

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for number in range(5000):
                push.send_nowait([str(number).encode()])
                if number % 500 == 0:
                    await trio.lowlevel.checkpoint()
    assert received == list(range(5000))
    push.close()
    pull.close()


async def test_a_message_that_came_before_anyone_waited_is_received(context: Context) -> None:
    pull, push = Socket(context, zmq.PULL), Socket(context, zmq.PUSH)
    push.zmq.connect(pull.bind("tcp://127.0.0.1:*"))
    push.send_nowait([b"early", b"second frame"])
    with trio.fail_after(PATIENCE):
        frames = await pull.receive()
    assert [frame.bytes for frame in frames] == [b"early", b"second frame"]
    push.close()
    pull.close()


async def test_a_wait_for_a_message_can_be_cancelled_and_begun_again(context: Context) -> None:
    pull, push = Socket(context, zmq.PULL), Socket(context, zmq.PUSH)
    push.zmq.connect(pull.bind("tcp://127.0.0.1:*"))
    with trio.move_on_after(0.01) as scope:
        await pull.receive()
    assert scope.cancelled_caught
    push.send_nowait([b"later"])
    with trio.fail_after(PATIENCE):
        assert (await pull.receive())[0].bytes == b"later"
    push.close()
    pull.close()


async def test_a_full_queue_refuses_instead_of_blocking(context: Context) -> None:
    push = Socket(context, zmq.PUSH, hwm=3)
    push.zmq.connect("tcp://127.0.0.1:1")  # nobody is there
    for _ in range(3):
        push.send_nowait([b"x"])
    with pytest.raises(trio.WouldBlock):
        push.send_nowait([b"x"])
    push.close()


async def test_a_router_says_that_a_peer_is_not_there(context: Context) -> None:
    router = Socket(context, zmq.ROUTER)
    router.zmq.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.bind("tcp://127.0.0.1:*")
    with pytest.raises(OSError, match="cannot send"):
        router.send_nowait([b"\0\0", b"x"])
    router.close()


async def test_a_monitor_reports_a_connection_and_its_loss(context: Context) -> None:
    pull, push = Socket(context, zmq.PULL), Socket(context, zmq.PUSH)
    monitor = Monitor(context, pull)
    push.zmq.connect(pull.bind("tcp://127.0.0.1:*"))
    with trio.fail_after(PATIENCE):
        accepted = await monitor.receive()
        greeted = await monitor.receive()
        push.close()
        gone = await monitor.receive()
    assert [event.kind for event in (accepted, greeted, gone)] == [
        zmq.EVENT_ACCEPTED,
        zmq.EVENT_HANDSHAKE_SUCCEEDED,
        zmq.EVENT_DISCONNECTED,
    ]
    assert accepted.fd == gone.fd >= 0
    await monitor.aclose()
    pull.close()


async def test_a_silent_peer_is_disconnected_by_heartbeats(context: Context) -> None:
    pull = Socket(context, zmq.PULL)
    pull.set_heartbeats(0.05, 0.1)
    monitor = Monitor(context, pull)
    port = int(pull.bind("tcp://127.0.0.1:*").rpartition(":")[2])
    # Greets as ZMTP 3.1 wants it (NULL mechanism, then READY of a PUSH socket), and never answers a ping.
    greeting = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" * 32
    body = b"\x05READY" + b"\x0bSocket-Type" + (4).to_bytes(4, "big") + b"PUSH"
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    with trio.fail_after(PATIENCE):
        await stream.send_all(greeting + b"\x04" + bytes([len(body)]) + body)
        kinds = [(await monitor.receive()).kind for _ in range(3)]
    assert kinds == [zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED]
    await stream.aclose()
    monitor.close()
    pull.close()


async def test_an_address_that_is_taken_is_named(context: Context) -> None:
    first, second = Socket(context, zmq.PULL), Socket(context, zmq.PULL)
    address = first.bind("tcp://127.0.0.1:*")
    with pytest.raises(OSError, match=f"cannot bind {address}: Address already in use"):
        second.bind(address)
    first.close()
    second.close()


async def test_closing_wakes_who_waits(context: Context) -> None:
    pull = Socket(context, zmq.PULL)
    pull.bind("tcp://127.0.0.1:*")

    async def wait(task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        with pytest.raises(trio.ClosedResourceError):
            await pull.receive()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            await nursery.start(wait)
            await trio.testing.wait_all_tasks_blocked()
            pull.close()
