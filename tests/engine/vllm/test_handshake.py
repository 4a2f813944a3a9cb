"""Engines join by the handshake of vLLM; a step that is missing is named with its rank, and what makes no sense changes nothing."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio
import zmq

from tests.engine.vllm.scripted import (
    PATIENCE,
    ScriptedCore,
    encode,
    engine_with_core,
    request,
    scripted_core,
    starting_engine,
    until,
)
from trio_frontend.engine.base import EngineState, EngineUnavailableError
from trio_frontend.engine.vllm import (
    Addresses,
    EngineStartError,
    MissingStep,
    VllmEngine,
    VllmOptions,
    open_engine,
    start_engine,
    wait_started,
)
from trio_frontend.engine.vllm.connection import Step
from trio_frontend.engine.vllm.endpoints import TcpEndpoints
from trio_frontend.engine.vllm.handshake import Handshake

BRIEFLY = 0.1
"""Seconds to let a message arrive that must change nothing."""


async def assert_serves(engine: VllmEngine, core: ScriptedCore) -> None:
    """A request goes out and its answer comes back."""
    with trio.fail_after(PATIENCE):
        async with engine.generate(request("probe", data_parallel_rank=core.rank)) as outputs:
            assert (await core.receive_add())[0] == "probe"
            core.finish("probe", [5])
            batches = [batch async for batch in outputs]
    assert [output.token_ids for batch in batches for output in batch] == [[5]]


async def test_an_engine_joins_and_serves() -> None:
    async with starting_engine() as engine, scripted_core(engine) as core:
        assert engine.health.value.state is EngineState.STARTING
        assert engine.capabilities.engines == ()
        await core.join(max_model_len=777)
        await wait_started(engine, PATIENCE)
        assert engine.health.value.serving
        assert engine.capabilities.max_model_len == 777
        assert engine.capabilities.engines[0].vllm_version == "0.33.0"
        await assert_serves(engine, core)


async def test_the_last_steps_may_come_in_any_order() -> None:
    async with starting_engine() as engine, scripted_core(engine) as core:
        core.hello()
        await core.receive_init()
        core.ready()
        core.connect_outputs()
        await until(lambda: [missing.step for missing in engine.missing()] == [Step.READY_RESPONSE])
        assert not engine.health.value.serving
        core.connect_inputs()
        core.send_ready_response()
        await wait_started(engine, PATIENCE)
        await assert_serves(engine, core)


async def test_several_engines_join_and_each_serves() -> None:
    async with starting_engine(data_parallel_size=3) as engine:  # noqa: SIM117
        async with scripted_core(engine, 0) as zero, scripted_core(engine, 1) as one, scripted_core(engine, 2) as two:
            await two.join(max_model_len=300, supports_lora=True)
            await zero.join(max_model_len=100, supports_lora=True)
            assert not engine.health.value.serving
            await one.join(max_model_len=200)
            await wait_started(engine, PATIENCE)
            assert [info.rank for info in engine.capabilities.engines] == [0, 1, 2]
            assert [info.max_model_len for info in engine.capabilities.engines] == [100, 200, 300]
            assert engine.capabilities.max_model_len == 100
            assert not engine.capabilities.supports_lora
            for core in (zero, one, two):
                await assert_serves(engine, core)


async def test_each_engine_gets_addresses_of_its_own() -> None:
    async with starting_engine(data_parallel_size=2) as engine:  # noqa: SIM117
        async with scripted_core(engine, 0) as zero, scripted_core(engine, 1) as one:
            for core in (zero, one):
                core.hello()
                await core.receive_init()
            addresses = [
                *zero.addresses["inputs"],
                *zero.addresses["outputs"],
                *one.addresses["inputs"],
                *one.addresses["outputs"],
            ]
            assert len(set(addresses)) == 4
            assert all(re.fullmatch(r"tcp://127\.0\.0\.1:\d+", address) for address in addresses)


@pytest.mark.parametrize(
    ("bind", "advertise", "told"),
    [
        ("tcp://127.0.0.1:*", None, "127.0.0.1"),
        ("tcp://127.0.0.1:*", "10.1.2.3", "10.1.2.3"),
        ("tcp://127.0.0.1:*", "fd00::1", "[fd00::1]"),
        ("tcp://*:*", None, "127.0.0.1"),
        ("tcp://0.0.0.0:*", "frontend.example", "frontend.example"),
        ("tcp://localhost:*", None, "localhost"),
    ],
)
async def test_engines_are_told_a_host_that_they_can_reach(bind: str, advertise: str | None, told: str) -> None:
    async with start_engine(handshake_address=bind, options=VllmOptions(advertise_host=advertise)) as engine:
        port = engine.handshake_address.rpartition(":")[2]
        core = ScriptedCore(f"tcp://127.0.0.1:{port}")
        try:
            core.hello()
            await core.receive_init()
        finally:
            core.close()
        for address in (*core.addresses["inputs"], *core.addresses["outputs"]):
            assert address.rpartition(":")[0] == f"tcp://{told}"


async def test_unix_sockets_serve_as_well(tmp_path: Any) -> None:
    async with start_engine(handshake_address=f"ipc://{tmp_path}/hello") as engine, scripted_core(engine) as core:
        await core.join()
        await wait_started(engine, PATIENCE)
        assert core.addresses["inputs"][0].startswith("ipc://")
        await assert_serves(engine, core)


# Missing steps.


async def start_error(engine: VllmEngine) -> str:
    with pytest.raises(EngineStartError) as caught:
        await wait_started(engine, 0.3)
    return str(caught.value)


async def test_nobody_there_is_said_with_every_rank() -> None:
    async with starting_engine(data_parallel_size=2) as engine:
        message = await start_error(engine)
    assert re.search(r"not every engine joined at tcp://127\.0\.0\.1:\d+ within 0\.3 s", message)
    assert "rank 0: HELLO" in message
    assert "rank 1: HELLO" in message


async def test_an_engine_that_still_loads_is_said() -> None:
    async with starting_engine() as engine, scripted_core(engine) as core:
        core.hello()
        await core.receive_init()
        message = await start_error(engine)
    assert "rank 0: ready response" in message
    assert "HELLO" not in message


async def test_a_missing_ready_is_said() -> None:
    async with starting_engine(data_parallel_size=2) as engine:  # noqa: SIM117
        async with scripted_core(engine, 0) as zero, scripted_core(engine, 1) as one:
            await zero.join()
            one.hello()
            await one.receive_init()
            one.connect_inputs()
            one.send_ready_response()
            one.connect_outputs()
            message = await start_error(engine)
    assert re.search(r"Missing from rank 1: READY, for \d s\.$", message)


async def test_a_missing_output_connection_is_said() -> None:
    async with starting_engine() as engine, scripted_core(engine) as core:
        core.hello()
        await core.receive_init()
        core.connect_inputs()
        core.send_ready_response()
        core.ready()
        message = await start_error(engine)
    assert re.search(r"Missing from rank 0: connection to the output address, for \d s\.$", message)


async def test_progress_is_reported_with_each_change() -> None:
    reports: list[Sequence[MissingStep]] = []
    async with starting_engine(data_parallel_size=2) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(wait_started, engine, PATIENCE, reports.append)
        async with scripted_core(engine, 0) as zero, scripted_core(engine, 1) as one:
            await until(lambda: reports)
            await zero.join()
            await until(lambda: {missing.rank for missing in reports[-1]} == {1})
            await one.join()
            with trio.fail_after(PATIENCE):
                await engine.health.wait_value(lambda health: health.serving)
    seen = [{(missing.rank, missing.step) for missing in report} for report in reports]
    assert seen[0] == {(0, Step.HELLO), (1, Step.HELLO)}
    assert seen[-1] == set()
    assert all(missing.seconds >= 0 for report in reports for missing in report)


# Mistakes: each is ignored, is in the log, and a proper engine joins beside it.


async def joins_despite(
    mistake: Callable[[ScriptedCore], None], identity: int | bytes, caplog: pytest.LogCaptureFixture, logged: str
) -> None:
    async with starting_engine() as engine:
        async with scripted_core(engine, identity) as stranger:
            stranger.connect()
            mistake(stranger)
            await until(lambda: re.search(logged, caplog.text))
            assert engine.health.value.state is EngineState.STARTING
            assert re.search(f"Ignored: .*{logged}", await start_error(engine))
        async with scripted_core(engine) as core:
            await core.join()
            await wait_started(engine, PATIENCE)
            await assert_serves(engine, core)


@pytest.mark.parametrize("identity", [b"\x01", b"\x01\x02\x03", b"engine"])
async def test_an_identity_that_is_no_rank_is_ignored(identity: bytes, caplog: pytest.LogCaptureFixture) -> None:
    await joins_despite(ScriptedCore.hello, identity, caplog, f"a peer with the identity {identity.hex()}")


async def test_an_engine_of_an_unknown_rank_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    await joins_despite(ScriptedCore.hello, 4, caplog, "rank 4, and ranks 0 to 0 are expected")


@pytest.mark.parametrize(
    ("frames", "logged"),
    [
        ([b"\xc1"], "rank 0: undecodable handshake message"),
        ([b""], "rank 0: undecodable handshake message"),
        ([encode([1, 2])], "rank 0: undecodable handshake message"),
        ([encode({"local": True})], "rank 0: undecodable handshake message"),
        ([encode({"status": "HELLO"}), b"more"], "rank 0 with a message of 3 frames"),
        ([encode({"status": "GOODBYE"})], "rank 0 with the status 'GOODBYE'"),
        ([encode({"status": "READY"})], "rank 0 with READY and no HELLO before it"),
    ],
)
async def test_garbage_at_the_handshake_is_ignored(
    frames: list[bytes], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    await joins_despite(lambda stranger: stranger.send_handshake(*frames), 0, caplog, logged)


async def test_a_flood_at_the_handshake_holds_up_no_task_and_hardly_fills_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with starting_engine() as engine, scripted_core(engine) as core, scripted_core(engine, b"flood") as stranger:
        await core.join()
        await wait_started(engine, PATIENCE)
        members = engine._members
        assert isinstance(members, Handshake)
        handled: list[int] = []
        turns = 0

        def endless() -> list[zmq.Frame] | None:
            handled.append(turns)
            return [zmq.Frame(b"flood"), zmq.Frame(b"")] if len(handled) < 10_000 else None

        members._socket.take = endless  # type: ignore[method-assign]
        stranger.hello()
        with trio.fail_after(PATIENCE):
            while len(handled) < 10_000:
                await trio.lowlevel.checkpoint()
                turns += 1
    assert max(handled.count(turn) for turn in {*handled[1:-1]} - {0}) <= 64
    assert 0 < caplog.text.count("a peer with the identity 666c6f6f64") <= 10


async def test_an_engine_that_repeats_its_hello_while_another_serves_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with starting_engine() as engine, scripted_core(engine) as core:
        await core.join()
        await wait_started(engine, PATIENCE)
        async with scripted_core(engine) as second, scripted_core(engine, b"last") as last:
            for _ in range(50):
                second.hello()
            await until(lambda: "it waits until that one is gone" in caplog.text)
            last.hello()
            await until(lambda: "a peer with the identity" in caplog.text)
    assert caplog.text.count("it waits until that one is gone") == 1


async def test_a_huge_message_at_the_handshake_is_not_taken_in() -> None:
    async with starting_engine() as engine, scripted_core(engine) as core, scripted_core(engine, b"huge") as stranger:
        stranger.connect()
        stranger.send_handshake(bytes(2**20 + 1))
        await core.join()
        await wait_started(engine, PATIENCE)
        assert not engine.strangers
        await assert_serves(engine, core)


async def test_bytes_that_are_no_zeromq_are_ignored() -> None:
    async with starting_engine() as engine, scripted_core(engine) as core:
        port = int(engine.handshake_address.rpartition(":")[2])
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
        await stream.aclose()
        await core.join()
        await wait_started(engine, PATIENCE)
        for address in (*core.addresses["inputs"], *core.addresses["outputs"]):
            stream = await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2]))
            await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
            await stream.aclose()
        await trio.sleep(BRIEFLY)
        assert engine.health.value.serving
        await assert_serves(engine, core)


async def test_a_scanner_whose_bytes_pass_for_an_ancient_zeromq_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """What does not begin as ZMTP 2 and 3 do is ZMTP 1.0 to ZeroMQ: an HTTP request of some length is a message or two."""
    async with starting_engine() as engine, scripted_core(engine) as core:
        await core.join()
        await wait_started(engine, PATIENCE)
        for spoken in (False, True):  # whether the engine has said something on its output connection
            if spoken:
                await assert_serves(engine, core)
            for address in (*core.addresses["inputs"], *core.addresses["outputs"]):
                stream = await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2]))
                await stream.send_all(b"GET / HTTP/1.1\r\n" + b"b" * 600)
                await trio.sleep(BRIEFLY)
                await stream.aclose()
            await trio.sleep(BRIEFLY)
            assert engine.health.value.serving
        assert "a stranger sent to its output" in caplog.text
        await assert_serves(engine, core)


async def test_garbage_of_a_stranger_at_the_output_does_not_end_an_engine_that_has_spoken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with starting_engine() as engine, scripted_core(engine) as core, scripted_core(engine) as stranger:
        await core.join()
        await wait_started(engine, PATIENCE)
        await assert_serves(engine, core)
        stranger.addresses = core.addresses
        stranger.connect_outputs()
        stranger.outputs[0].send(b"garbage")
        await until(lambda: "a stranger sent to its output" in caplog.text)
        stranger.outputs[0].send(b"ENGINE_CORE_DEAD")
        await trio.sleep(BRIEFLY)
        await assert_serves(engine, core)


@pytest.mark.parametrize("body", [b"\xc1", encode([]), encode({"max_model_len": "long"}), encode({})])
async def test_a_ready_response_that_is_none_ends_that_life_only(body: bytes) -> None:
    async with starting_engine() as engine:
        async with scripted_core(engine) as wrong:
            wrong.hello()
            await wrong.receive_init()
            wrong.connect_inputs()
            wrong.inputs[0].send(body)
            await until(lambda: [missing.step for missing in engine.missing()] == [Step.HELLO])
            assert engine.health.value.state is EngineState.STARTING
        async with scripted_core(engine) as core:
            await core.join()
            await wait_started(engine, PATIENCE)
            await assert_serves(engine, core)


async def test_a_second_hello_while_loading_begins_anew() -> None:
    async with starting_engine() as engine, scripted_core(engine) as first, scripted_core(engine) as second:
        first.hello()
        await first.receive_init()
        first.connect_inputs()
        first.send_ready_response()
        await second.join()
        await wait_started(engine, PATIENCE)
        assert second.addresses != first.addresses
        await assert_serves(engine, second)


async def test_the_same_engine_saying_hello_twice_gets_two_answers_and_joins_by_the_second() -> None:
    async with starting_engine() as engine, scripted_core(engine) as core:
        core.hello()
        core.hello()
        await core.receive_init()
        first = core.addresses
        await core.receive_init()
        assert core.addresses != first
        core.connect_inputs()
        core.send_ready_response()
        core.connect_outputs()
        core.ready()
        await wait_started(engine, PATIENCE)
        await assert_serves(engine, core)


async def test_an_engine_that_dies_while_loading_is_told_in_the_log_and_may_come_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with starting_engine() as engine:
        async with scripted_core(engine) as first:
            first.hello()
            await first.receive_init()
            first.die()
            await until(lambda: "rank 0 closed its handshake connection before it was ready" in caplog.text)
        async with scripted_core(engine) as core:
            await core.join()
            await wait_started(engine, PATIENCE)
            await assert_serves(engine, core)


async def test_an_engine_that_says_ready_and_closes_the_handshake_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    async with starting_engine() as engine, scripted_core(engine) as core:
        await core.join()
        assert core.handshake is not None
        core.handshake.close(linger=1000)
        await wait_started(engine, PATIENCE)
        await trio.sleep(BRIEFLY)
        assert engine.health.value.serving
    assert "before it was ready" not in caplog.text


# An engine that comes while another one serves.


async def test_a_second_engine_of_the_same_rank_waits_until_the_first_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    async with engine_with_core() as (engine, first), scripted_core(engine) as second:
        second.hello()
        await until(lambda: "it waits until that one is gone" in caplog.text)
        await assert_serves(engine, first)
        first.die()
        await second.receive_init()
        second.connect_inputs()
        second.send_ready_response()
        second.connect_outputs()
        second.ready()
        with trio.fail_after(PATIENCE):
            await engine.health.wait_value(lambda health: health.serving)
        await assert_serves(engine, second)


async def test_an_engine_that_waited_and_died_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async with engine_with_core() as (engine, first):
        async with scripted_core(engine) as second:
            second.hello()
            await until(lambda: "it waits until that one is gone" in caplog.text)
            second.die()
            await trio.sleep(BRIEFLY)
        first.die()
        with trio.fail_after(PATIENCE):
            await engine.health.wait_value(lambda health: health.state is EngineState.LOST)
        async with scripted_core(engine) as third:
            await third.join()
            with trio.fail_after(PATIENCE):
                await engine.health.wait_value(lambda health: health.serving)
            await assert_serves(engine, third)


async def test_without_reconnect_an_engine_that_comes_back_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with engine_with_core(engine_reconnect=False) as (engine, first):
        first.die()
        with trio.fail_after(PATIENCE):
            await engine.health.wait_value(lambda health: health.state is EngineState.LOST)
        async with scripted_core(engine) as second:
            second.hello()
            with trio.move_on_after(BRIEFLY) as waited:
                await second.receive_init()
        assert waited.cancelled_caught
        assert engine.health.value.state is EngineState.LOST
        assert "engines are not taken in again" in caplog.text
        with pytest.raises(EngineUnavailableError):
            async with engine.generate(request()):
                pass


async def test_without_reconnect_an_engine_that_died_while_loading_may_come_again() -> None:
    async with starting_engine(engine_reconnect=False) as engine:
        async with scripted_core(engine) as first:
            first.hello()
            await first.receive_init()
            first.connect_inputs()
            first.inputs[0].send(b"\xc1")
            await until(lambda: [missing.step for missing in engine.missing()] == [Step.HELLO])
        async with scripted_core(engine) as core:
            await core.join()
            await wait_started(engine, PATIENCE)
            await assert_serves(engine, core)


async def test_an_engine_that_cannot_be_given_sockets_is_told_in_the_log_and_the_rest_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with starting_engine() as engine:
        with monkeypatch.context() as broken:
            broken.setattr(TcpEndpoints, "bind", lambda *_: Addresses("tcp://203.0.113.1:*", "tcp://203.0.113.1:*"))
            async with scripted_core(engine) as refused:
                refused.hello()
                said = "rank 0 said HELLO and cannot be taken in: [Errno 99] cannot bind tcp://203.0.113.1:*"
                await until(lambda: said in caplog.text)
        async with scripted_core(engine) as core:
            await core.join()
            await wait_started(engine, PATIENCE)
            await assert_serves(engine, core)


# Opening and closing.


async def test_open_engine_enters_when_the_engine_serves_and_raises_what_the_block_raises() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    core = ScriptedCore(address)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(core.join)
            with pytest.raises(ZeroDivisionError):  # noqa: PT012
                async with open_engine(handshake_address=address, start_timeout=PATIENCE) as engine:
                    assert engine.health.value.serving
                    await assert_serves(engine, core)
                    raise ZeroDivisionError
    finally:
        core.close()


async def test_open_engine_raises_a_plain_error_when_nobody_comes() -> None:
    with pytest.raises(EngineStartError, match="rank 0: HELLO"):
        async with open_engine(handshake_address="tcp://127.0.0.1:*", start_timeout=0.1):
            pytest.fail("entered")


async def test_a_handshake_port_that_is_taken_is_named() -> None:
    async with starting_engine() as engine:
        with pytest.raises(OSError, match=f"cannot bind {engine.handshake_address}"):
            async with start_engine(handshake_address=engine.handshake_address):
                pytest.fail("entered")


@pytest.mark.parametrize(
    "address", ["", "localhost", "localhost:5", "tcp://localhost", "tcp://:5", "tcp://h:port", "udp://h:5", "tcp://h:70000"]
)
async def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(address))):
        async with start_engine(handshake_address=address):
            pytest.fail("entered")


async def test_a_host_that_is_not_of_this_machine_is_named() -> None:
    with pytest.raises(OSError, match=r"203\.0\.113\.1"):
        async with start_engine(handshake_address="tcp://203.0.113.1:5570"):
            pytest.fail("entered")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_parallel_size", 0),
        ("data_parallel_size", 70000),
        ("client_index", -1),
        ("heartbeat_timeout", 0.0),
        ("heartbeat_timeout", -1.0),
        ("heartbeat_timeout", float("inf")),
        ("stall_timeout", 0.0),
        ("utility_timeout", float("nan")),
    ],
)
def test_an_option_out_of_range_names_itself(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        VllmOptions(**{name: value})  # type: ignore[arg-type]


async def test_a_cancelled_start_leaves_nothing_behind() -> None:
    with trio.move_on_after(0.1) as scope:
        async with open_engine(handshake_address="tcp://127.0.0.1:*"):
            pytest.fail("entered")
    assert scope.cancelled_caught


async def test_the_handshake_address_is_free_again_after_the_block() -> None:
    async with engine_with_core() as (engine, _):
        address = engine.handshake_address
    async with start_engine(handshake_address=address) as again:
        assert again.handshake_address == address
