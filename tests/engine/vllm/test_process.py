"""An owned engine process is started right, heard, watched, and gone with everything it started, whatever ends the block."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import trio

from tests.engine.vllm.scripted import PATIENCE, request, until
from trio_frontend.engine.base import EngineError, EngineState
from trio_frontend.engine.vllm import EngineStartError, VllmEngine, VllmNotFoundError, launch_engine
from trio_frontend.engine.vllm.process import engine_command, find_vllm, group_members, run_process

FAKE_VLLM = str(pathlib.Path(__file__).parent / "fake_vllm.py")


def started(caplog: pytest.LogCaptureFixture) -> tuple[int, int]:
    """The process ids of the fake vllm and of its child, from the log."""
    parent = next(record.engine_pid for record in caplog.records if hasattr(record, "engine_pid"))
    child = next(int(found[1]) for record in caplog.records if (found := re.search(r"\] child (\d+)", record.getMessage())))
    return parent, child


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


async def generated(engine: VllmEngine) -> int:
    """Tokens that a request of 5 gets."""
    async with engine.generate(request("r", 5)) as outputs:
        return sum([len(output.token_ids) async for batch in outputs for output in batch])


async def test_an_engine_is_started_serves_and_is_gone_after_the_block(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with launch_engine(
        "org/model", vllm=FAKE_VLLM, arguments=["--dtype", "float32"], start_timeout=PATIENCE
    ) as engine:
        assert engine.health.value.serving
        assert await generated(engine) == 5
        parent, child = started(caplog)
        assert alive(parent)
        assert alive(child)
        assert sorted(group_members(parent)) == sorted([parent, child])
    assert not alive(parent)
    assert not alive(child)
    assert re.search(
        r"arguments: serve org/model --headless --data-parallel-address 127\.0\.0\.1 --data-parallel-rpc-port \d+ "
        r"--data-parallel-size-local 1 --dtype float32\n",
        caplog.text,
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_its_output_is_in_the_log_with_a_prefix_and_its_level(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("FAKE_VLLM", "print")
    async with launch_engine("m", vllm=FAKE_VLLM, start_timeout=PATIENCE):
        parent, _ = started(caplog)
    lines = {
        record.getMessage(): record.levelno
        for record in caplog.records
        if record.getMessage().startswith(f"vllm[{parent}] ")
    }
    assert lines[f"vllm[{parent}] (EngineCore pid=1) WARNING 11-30 14:36:31 [vllm.py:1] careful"] == logging.WARNING
    assert lines[f"vllm[{parent}] (EngineCore pid=1) ERROR 11-30 14:36:31 [vllm.py:1] broken"] == logging.ERROR
    assert lines[f"vllm[{parent}] mock engine ready"] == logging.INFO
    assert max(map(len, lines)) <= 4096 + 20


async def test_an_engine_that_exits_before_it_is_ready_is_an_error_with_its_last_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "exit")
    with pytest.raises(EngineStartError, match=r"vLLM exited with code 3 before it was ready(.|\n)*no such model"):
        async with launch_engine("m", vllm=FAKE_VLLM, start_timeout=PATIENCE):
            pytest.fail("entered")


async def test_an_engine_that_is_never_ready_is_ended_after_the_timeout(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("FAKE_VLLM", "silent")
    with pytest.raises(EngineStartError, match="rank 0: HELLO"):
        async with launch_engine("m", vllm=FAKE_VLLM, start_timeout=0.5):
            pytest.fail("entered")
    assert not group_members(next(record.engine_pid for record in caplog.records if hasattr(record, "engine_pid")))


async def test_a_cancelled_start_leaves_no_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("FAKE_VLLM", "silent")

    async def launch() -> None:
        async with launch_engine("m", vllm=FAKE_VLLM):
            pytest.fail("entered")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(launch)
        await until(lambda: "] child " in caplog.text)
        nursery.cancel_scope.cancel()
    assert not any(map(alive, started(caplog)))


async def test_an_error_in_the_block_comes_out_as_it_is_and_leaves_no_process(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(ZeroDivisionError):
        async with launch_engine("m", vllm=FAKE_VLLM, start_timeout=PATIENCE):
            raise ZeroDivisionError
    assert not any(map(alive, started(caplog)))


@pytest.mark.parametrize("mode", ["stubborn", "orphan"])
async def test_what_ignores_sigterm_is_killed_after_the_bound(
    mode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("FAKE_VLLM", mode)
    async with launch_engine("m", vllm=FAKE_VLLM, start_timeout=PATIENCE, stop_timeout=0.2):
        parent, child = started(caplog)
        before = trio.current_time()
    assert trio.current_time() - before < PATIENCE
    assert not alive(parent)
    assert not alive(child)


@pytest.mark.parametrize("which", ["parent", "child"])
async def test_its_death_is_seen_within_a_second_and_its_requests_end(which: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with launch_engine("m", vllm=FAKE_VLLM, start_timeout=PATIENCE) as engine:
        parent, child = started(caplog)
        async with engine.generate(request("r", 1900)) as outputs:
            await anext(outputs)
            os.kill(parent if which == "parent" else child, signal.SIGKILL)
            with trio.fail_after(1.0), pytest.raises(EngineError):
                async for _ in outputs:
                    pass
        assert engine.health.value.state is EngineState.LOST
        if which == "parent":
            assert engine.health.value.detail == "rank 0: its process killed by SIGKILL"
    assert not alive(parent)
    assert not alive(child)


async def test_what_a_killed_engine_leaves_behind_is_ended_at_once_and_nobody_guards_it_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with launch_engine("m", vllm=FAKE_VLLM, start_timeout=PATIENCE):
        parent, child = started(caplog)
        os.kill(parent, signal.SIGKILL)
        await until(lambda: not alive(child) and "the engine has ended" in caplog.text)
        port = re.search(r"--data-parallel-rpc-port (\d+)", caplog.text)
        assert port
        assert not running_with(port[1])


def running_with(argument: str) -> list[str]:
    """Command lines that have ``argument`` and run."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal() and alive(int(entry.name)):
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                if argument in words:
                    found.append(" ".join(words))
    return found


async def test_stopping_it_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with launch_engine("m", vllm=FAKE_VLLM, start_timeout=PATIENCE):
        pass
    assert "engine_lost" not in caplog.text
    assert "the engine has ended" in caplog.text


# The command.


def test_a_missing_vllm_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(VllmNotFoundError, match=r"'vllm' is not on PATH\. Install it with 'pip install vllm'"):
        find_vllm("vllm")
    with pytest.raises(VllmNotFoundError, match=r"'/no/vllm' is no such executable file"):
        find_vllm("/no/vllm")


def test_several_engine_cores_are_asked_for_by_their_number() -> None:
    assert engine_command("vllm", "m", 5, 2, ["--a"])[-7:] == [
        "--data-parallel-rpc-port",
        "5",
        "--data-parallel-size-local",
        "2",
        "--data-parallel-size",
        "2",
        "--a",
    ]


@pytest.mark.parametrize("argument", ["--headless", "--data-parallel-rpc-port=5", "-dp", "--data-parallel-size"])
def test_a_flag_that_is_ours_to_set_is_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=re.escape(argument.partition("=")[0])):
        engine_command("vllm", "m", 5, 1, [argument, "7"])


async def test_a_command_that_cannot_be_run_exits_and_says_so() -> None:
    async with run_process(["/nonexistent/vllm"], stop_timeout=1.0) as process:
        with trio.fail_after(PATIENCE):
            assert await process.wait() == 127
            await process.output_ended.wait()
        assert list(process.last_lines) == ["cannot run /nonexistent/vllm: No such file or directory"]


@pytest.mark.parametrize("mode", ["", "silent"])
def test_an_engine_does_not_outlive_a_process_that_is_killed(mode: str) -> None:
    program = (
        "import trio, logging, sys\n"
        "from trio_frontend.engine.vllm import launch_engine\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')\n"
        "async def main():\n"
        f"    async with launch_engine('m', vllm={FAKE_VLLM!r}):\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "FAKE_VLLM": mode}
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        found = next(found for line in owner.stdout if (found := re.search(r"vllm\[(\d+)\] child (\d+)", line)))
        owner.kill()
        owner.wait()
    end = time.monotonic() + PATIENCE
    while any(map(alive, (int(found[1]), int(found[2])))):
        assert time.monotonic() < end
        time.sleep(0.02)


async def test_an_output_that_fills_its_pipe_does_not_keep_it_from_ending() -> None:
    script = "import signal,sys\nsignal.signal(signal.SIGTERM, lambda *_: (print('y' * 500_000), sys.exit(0)))\nprint('up', flush=True)\nsignal.pause()"
    async with run_process([sys.executable, "-c", script], stop_timeout=PATIENCE) as process:
        with trio.fail_after(PATIENCE):
            while not process.last_lines:  # noqa: ASYNC110
                await trio.sleep(0.01)
    assert process.exit_code == 0
