"""Protects the real process: its signals, its exit codes, its last line, and that it leaves neither a process nor a file behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import trustme

from tests.integration.command import FAKE_VLLM, MODEL, PATIENCE, Frontend, health, request, stream, wait_until
from trio_frontend.protos.grpc.health.v1.health_pb2 import HealthCheckResponse
from trio_frontend.protos.vllm.inference_pb2 import FinishInfo

pytestmark = pytest.mark.process

OWNED = (MODEL, "--engine", "vllm", "--vllm", FAKE_VLLM, "--port", "0")


def live_streams(channel: grpc.Channel, count: int, max_tokens: int) -> list[object]:
    """So many streams, each with its first message read: all are in flight."""
    streams = [stream(channel, request(max_tokens)) for _ in range(count)]
    for each in streams:
        assert next(each).HasField("prompt_info")
    return streams


def statuses(streams: list[object]) -> list[grpc.StatusCode]:
    found = []
    for each in streams:
        try:
            for _ in each:
                pass
            found.append(grpc.StatusCode.OK)
        except grpc.RpcError as error:
            found.append(error.code())
    return found


def test_sigterm_lets_a_hundred_live_streams_finish_and_exits_0(tmp_path: Path) -> None:
    with Frontend(tmp_path, *OWNED) as frontend, grpc.insecure_channel(frontend.wait_serving()) as channel:
        streams = live_streams(channel, 100, 300)
        frontend.signal()
        for each in streams:
            *_, last = each
            assert last.outputs.finish_info.finish_reason == FinishInfo.LENGTH
            assert last.outputs.finish_info.num_output_tokens == 300
        assert frontend.wait_ended() == 0
        assert "0 were cut off" in frontend.log


def test_sigterm_lets_live_streams_of_the_embedded_engine_finish_too(tmp_path: Path) -> None:
    with Frontend(tmp_path, "--port", "0") as frontend, grpc.insecure_channel(frontend.wait_serving()) as channel:
        streams = live_streams(channel, 20, 20)
        frontend.signal()
        assert statuses(streams) == [grpc.StatusCode.OK] * 20
        assert frontend.wait_ended() == 0


def test_sigterm_without_a_drain_ends_a_hundred_live_streams_unavailable_and_exits_0(tmp_path: Path) -> None:
    arguments = (*OWNED, "--shutdown-timeout", "0")
    with Frontend(tmp_path, *arguments) as frontend, grpc.insecure_channel(frontend.wait_serving()) as channel:
        streams = live_streams(channel, 100, 7000)
        frontend.signal()
        assert statuses(streams) == [grpc.StatusCode.UNAVAILABLE] * 100
        assert streams[0].details() == "server is shutting down"
        assert frontend.wait_ended() == 0
        assert "100 were cut off" in frontend.log


def test_a_second_sigterm_skips_the_drain(tmp_path: Path) -> None:
    arguments = ("--port", "0", "--shutdown-timeout", "1000")
    with Frontend(tmp_path, *arguments) as frontend, grpc.insecure_channel(frontend.wait_serving()) as channel:
        streams = live_streams(channel, 20, 900)
        frontend.signal()
        frontend.wait_log("listeners close")
        begun = time.monotonic()
        frontend.signal()
        assert set(statuses(streams)) == {grpc.StatusCode.UNAVAILABLE}
        assert frontend.wait_ended() == 0
        assert time.monotonic() - begun < 10


def test_a_second_sigint_skips_the_withdrawal(tmp_path: Path) -> None:
    with Frontend(tmp_path, "--port", "0", "--withdrawal-grace", "1000") as frontend:
        with grpc.insecure_channel(frontend.wait_serving()) as channel:
            frontend.signal(signal.SIGINT)
            wait_until(lambda: health(channel) == HealthCheckResponse.NOT_SERVING, "NOT_SERVING")
        frontend.signal(signal.SIGINT)
        assert frontend.wait_ended() == 0


def test_a_signal_after_the_servers_end_does_not_change_the_exit_code() -> None:
    # Python's own end takes a while; here it waits for its stdin.
    program = """if True:
        import atexit, sys
        from trio_frontend.cli import main
        atexit.register(lambda: (print("at exit", flush=True), sys.stdin.read()))
        sys.exit(main(["serve", "--port", "0"]))
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Serving ")
        process.send_signal(signal.SIGTERM)
        assert "at exit\n" in process.stdout  # reads up to there
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate("", PATIENCE)
    assert process.returncode == 0
    assert log.endswith(": ended\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_engine_starts_exits_0_and_leaves_no_engine(tmp_path: Path, number: int) -> None:
    with Frontend(tmp_path, *OWNED, FAKE_VLLM="silent") as frontend:
        frontend.wait_log(r"child \d+")
        frontend.wait_log("waiting for rank 0")
        frontend.signal(number)
        assert frontend.wait_ended() == 0


def test_a_signal_while_an_engine_elsewhere_is_waited_for_exits_0(tmp_path: Path) -> None:
    arguments = (MODEL, "--handshake-address", "tcp://127.0.0.1:*", "--port", "0")
    with Frontend(tmp_path, *arguments) as frontend:
        frontend.wait_log("waiting for rank 0")
        frontend.signal(signal.SIGINT)
        assert frontend.wait_ended() == 0


def test_an_owned_engine_that_is_killed_ends_streams_internal_and_the_process_with_1(tmp_path: Path) -> None:
    with Frontend(tmp_path, *OWNED) as frontend, grpc.insecure_channel(frontend.wait_serving()) as channel:
        streams = live_streams(channel, 50, 7000)
        os.killpg(int(frontend.wait_log(r"engine_pid=(\d+)")[1]), signal.SIGKILL)
        assert set(statuses(streams)) <= {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE}
        assert frontend.wait_ended() == 1
    last = frontend.log.strip().splitlines()[-1]
    # Its process and its connection end together: which is seen first is chance.
    cause = r"(its process killed by SIGKILL|rank 0: the connection to the engine was lost)"
    assert re.fullmatch(rf"trio-frontend serve: the engine died \(engine_lost\): .*{cause}", last)
    assert "health is NOT_SERVING reason=engine_lost" in frontend.log


def test_an_owned_engine_that_is_killed_may_leave_the_process_up(tmp_path: Path) -> None:
    arguments = (*OWNED, "--on-engine-death", "stay")
    with Frontend(tmp_path, *arguments) as frontend, grpc.insecure_channel(frontend.wait_serving()) as channel:
        os.killpg(int(frontend.wait_log(r"engine_pid=(\d+)")[1]), signal.SIGKILL)
        wait_until(lambda: health(channel) == HealthCheckResponse.NOT_SERVING, "NOT_SERVING")
        assert health(channel, "liveness") == HealthCheckResponse.SERVING
        assert statuses([stream(channel, request(1))]) == [grpc.StatusCode.UNAVAILABLE]
        frontend.signal()
        assert frontend.wait_ended() == 0


def test_an_engine_that_does_not_start_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    with Frontend(tmp_path, *OWNED, FAKE_VLLM="exit") as frontend:
        assert frontend.wait_ended() == 1
    last = frontend.log.strip().splitlines()[-1]
    assert last.startswith("trio-frontend serve: vLLM exited with code 3 before it was ready.")
    assert "no such model" in last


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/no/such/directory"], "/no/such/directory"),
        (["--engine", "embedded", "/proc"], "/proc"),
        ([MODEL, "--engine", "vllm", "--vllm", "/no/such/vllm"], "pip install vllm"),
        ([MODEL, "--handshake-address", "nowhere"], "nowhere"),
        (["--ssl-certfile", __file__], "ssl_certfile"),
        (["--uds", "/no/such/directory/s.sock"], "/no/such/directory/s.sock"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_1(tmp_path: Path, arguments: list[str], said: str) -> None:
    with Frontend(tmp_path, "--port", "0", *arguments) as frontend:
        assert frontend.wait_ended() == 1
    lines = [line for line in frontend.log.splitlines() if line.startswith("trio-frontend")]
    assert len(lines) == 1
    assert said in lines[0]


def test_a_taken_port_is_one_line_and_exit_code_1_before_any_engine_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Frontend(tmp_path, "--port", str(port)) as frontend:
            assert frontend.wait_ended() == 1
    assert frontend.log == f"trio-frontend serve: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_reader_of_stdout_that_has_gone_does_not_matter(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with Frontend(tmp_path, "--port", "0", stdout=writing) as frontend:
        os.close(writing)
        frontend.wait_log("health is SERVING")
        frontend.signal()
        assert frontend.wait_ended() == 0


def test_closed_standard_streams_do_not_matter(tmp_path: Path) -> None:
    socket_path = tmp_path / "s.sock"
    command = f'exec "{sys.executable}" -m trio_frontend serve --uds "{socket_path}" <&- >&- 2>&-'
    process = subprocess.Popen(["/bin/sh", "-c", command])
    try:
        with grpc.insecure_channel(f"unix:{socket_path}") as channel:
            # The port answers before the engine is there.
            wait_until(lambda: health(channel) == HealthCheckResponse.SERVING, "SERVING")
            assert statuses([stream(channel, request(5))]) == [grpc.StatusCode.OK]
        process.terminate()
        assert process.wait(30) == 0
        assert not socket_path.exists()
    finally:
        process.kill()


def test_a_unix_socket_file_is_gone_afterwards_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with Frontend(tmp_path, "--uds", str(path)) as frontend:
        assert frontend.wait_serving() == f"unix:{path}"
        with grpc.insecure_channel(f"unix:{path}") as channel:
            assert health(channel) == HealthCheckResponse.SERVING
        frontend.signal()
        assert frontend.wait_ended() == 0
    assert not path.exists()


@pytest.fixture
def sighup_not_ignored() -> Iterator[None]:
    """These tests may run under nohup, and then its children's children ignore SIGHUP too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("sighup_not_ignored")
def test_without_a_terminal_sighup_ends_it_in_order(tmp_path: Path) -> None:
    with Frontend(tmp_path, "--port", "0") as frontend:
        frontend.wait_serving()
        frontend.signal(signal.SIGHUP)
        assert frontend.wait_ended() == 0
        assert "shutdown begins: SIGHUP" in frontend.log


def test_with_tls_sighup_reads_the_certificate_again(tmp_path: Path) -> None:
    certificate = tmp_path / "server.pem"
    certificate.write_bytes(trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.bytes())
    with Frontend(tmp_path, "--port", "0", "--ssl-certfile", str(certificate)) as frontend:
        frontend.wait_serving()
        frontend.signal(signal.SIGHUP)
        frontend.wait_log("the certificate was reloaded")
        frontend.signal()
        assert frontend.wait_ended() == 0
