"""Protects the commands that call a server: what they print, their exit codes, and that Ctrl-C ends the request in the engine."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from trio_frontend.engine.base import EngineState, FinishReason
from trio_frontend.server import Server, running
from trio_frontend.testing import ScriptedEngine

H, E = 39, 36
COMMAND = [sys.executable, "-m", "trio_frontend"]


@pytest.fixture
async def server(engine, config) -> AsyncIterator[Server]:
    async with running(engine, config(shutdown_timeout=0)) as server:
        yield server


async def command(server: Server, *words: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    host, port = server.addresses[0]
    done = await trio.run_process(
        [*COMMAND, *words, "--address", f"{host}:{port}"], stdin=stdin, capture_stdout=True, capture_stderr=True, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def answer(engine: ScriptedEngine, *tokens: int) -> None:
    request = await engine.next_request()
    for token in tokens[:-1]:
        request.send([token])
    request.send([tokens[-1]], finish_reason=FinishReason.LENGTH)


async def test_generate_prints_the_text_and_exits_0(server, engine, nursery) -> None:
    nursery.start_soon(answer, engine, H, E)
    assert await command(server, "generate", "Hi", "--max-tokens", "2") == (0, "HE\n", "")


async def test_generate_passes_its_options_on(server, engine, nursery) -> None:
    nursery.start_soon(answer, engine, H)
    words = [
        "--max-tokens",
        "7",
        "--min-tokens",
        "2",
        "--temperature",
        "0.5",
        "--top-p",
        "0.9",
        "--top-k",
        "4",
        "--seed",
        "11",
    ]
    await command(server, "generate", "Hi", *words, "--ignore-eos")
    sampling = engine.requests[0].request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k, sampling.seed) == (7, 2, 4, 11)
    assert sampling.ignore_eos
    assert (sampling.temperature, sampling.top_p) == pytest.approx((0.5, 0.9))


async def test_generate_reads_a_dash_from_stdin(server, engine, nursery) -> None:
    nursery.start_soon(answer, engine, H)
    assert (await command(server, "generate", "-", stdin=b"HEH"))[:2] == (0, "H\n")
    assert list(engine.requests[0].request.prompt_token_ids) == [H, E, H]


async def test_generate_prints_each_of_several_texts_whole(server, engine, nursery) -> None:
    async def both() -> None:
        requests = [await engine.next_request() for _ in range(2)]
        first, second = sorted(requests, key=lambda request: request.request.request_id)
        first.send([H])
        second.send([E], finish_reason=FinishReason.LENGTH)
        await trio.sleep(0.1)
        first.send([H], finish_reason=FinishReason.LENGTH)

    nursery.start_soon(both)
    assert await command(server, "generate", "Hi", "--n", "2") == (0, "[1] E\n[0] HH\n", "")


async def test_generate_prints_text_as_it_comes_and_ctrl_c_ends_the_request_in_the_engine(server, engine) -> None:
    host, port = server.addresses[0]
    words = [*COMMAND, "generate", "Hi", "--address", f"{host}:{port}"]
    process = await trio.lowlevel.open_process(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    request = await engine.next_request()
    request.send([H])
    assert await process.stdout.receive_some() == b"H"
    process.send_signal(signal.SIGINT)
    with trio.fail_after(10):
        await request.aborted.wait()
        assert await process.wait() == 130
    assert await process.stderr.receive_some() == b""


async def test_a_refused_request_is_one_line_and_exit_code_1(server) -> None:
    code, out, err = await command(server, "generate", "Hi", "--temperature", "9")
    assert (code, out.strip()) == (1, "")
    assert err.startswith("trio-frontend generate: INVALID_ARGUMENT: ")
    assert err.count("\n") == 1


async def test_a_request_that_fails_half_way_keeps_its_text_and_exits_1(server, engine, nursery) -> None:
    async def fail() -> None:
        request = await engine.next_request()
        request.send([H])
        await trio.sleep(0.1)
        request.fail()

    nursery.start_soon(fail)
    code, out, err = await command(server, "generate", "Hi")
    assert (code, out, err) == (1, "H", "trio-frontend generate: INTERNAL: engine failed during generation\n")


async def test_a_timeout_ends_the_request_in_the_engine(server, engine) -> None:
    code, _, err = await command(server, "generate", "Hi", "--timeout", "0.3")
    assert code == 1
    assert err.startswith("trio-frontend generate: no answer from 127.0.0.1:")
    with trio.fail_after(5):
        await engine.requests[0].aborted.wait()


async def test_health_prints_the_status_and_exits_0_only_for_serving(server, engine) -> None:
    assert await command(server, "health") == (0, "SERVING\n", "")
    engine.set_health(EngineState.LOST)
    await trio.testing.wait_all_tasks_blocked()
    assert await command(server, "health", "--service", "vllm.Inference") == (1, "NOT_SERVING\n", "")
    assert await command(server, "health", "--service", "liveness") == (0, "SERVING\n", "")
    assert await command(server, "health", "--service", "x") == (
        1,
        "",
        "trio-frontend health: NOT_FOUND: unknown service 'x'\n",
    )


async def test_health_watches_until_the_server_ends(server, engine, nursery) -> None:
    async def change() -> None:
        while server.health.watches == 0:  # noqa: ASYNC110 - the watcher is another process
            await trio.sleep(0.01)
        await trio.sleep(0.05)
        engine.set_health(EngineState.STALLED)
        await trio.sleep(0.05)
        engine.set_health(EngineState.SERVING)
        await trio.sleep(0.05)
        server.begin_shutdown("test")

    nursery.start_soon(change)
    assert await command(server, "health", "--watch") == (1, "SERVING\nNOT_SERVING\nSERVING\nNOT_SERVING\n", "")


async def test_without_a_server_it_is_one_line_and_exit_code_1() -> None:
    words = [*COMMAND, "health", "--address", "127.0.0.1:1"]
    done = await trio.run_process(words, capture_stdout=True, capture_stderr=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"trio-frontend health: UNAVAILABLE: cannot connect to 127.0.0.1:1: Connection refused\n"


@pytest.mark.parametrize("address", ["nowhere", "::1:50051", "host:port", "unix:"])
async def test_a_bad_address_is_a_usage_error(address: str) -> None:
    done = await trio.run_process([*COMMAND, "health", "--address", address], capture_stderr=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"trio-frontend health: error: address")


async def test_a_unix_socket_and_an_api_key_from_the_environment(engine, config, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "s.sock"
    async with running(engine, config(unix_socket=str(path), api_keys=("secret",))):
        words = [*COMMAND, "info", "--address", f"unix:{path}"]
        refused = await trio.run_process(words, capture_stderr=True, check=False)
        assert refused.returncode == 1
        assert b"UNAUTHENTICATED" in refused.stderr
        monkeypatch.setenv("TRIO_FRONTEND_API_KEY", "secret")
        await trio.run_process(words, capture_stdout=True)


async def test_a_reader_that_leaves_early_gets_no_traceback(server, engine, nursery) -> None:
    async def flood() -> None:
        request = await engine.next_request()
        for _ in range(100):
            request.send([H])
            await trio.sleep(0.01)

    nursery.start_soon(flood)
    host, port = server.addresses[0]
    line = f"{sys.executable} -m trio_frontend generate Hi --max-tokens 1000 --address {host}:{port} | head -c 1"
    done = await trio.run_process(["/bin/sh", "-c", line], capture_stdout=True, capture_stderr=True)
    assert (done.stdout, done.stderr) == (b"H", b"")
