"""Protects the operator's command line: what each control command asks, prints and exits with."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.services.control_server import ControlServer, serve_control
from tests.services.test_control import BARE, ENGINE
from trio_frontend.cli import main
from trio_frontend.engine.base import UtilityCallError

KV_EVENTS = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}


@pytest.fixture
async def server(nursery: trio.Nursery) -> ControlServer:
    return await serve_control(nursery, [ENGINE])


class Shell:
    """Runs commands as a terminal would, each in a thread with a Trio of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def run(self, server: ControlServer, *words: str) -> tuple[int, str, str]:
        code = await trio.to_thread.run_sync(main, [*words, "--address", server.address, "--timeout", "10"])
        out, err = self._capsys.readouterr()
        return code, out, err


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.mark.parametrize(
    ("words", "calls", "printed"),
    [
        (["pause"], [("pause_generation", ("abort", True))], "generation is paused"),
        (["pause", "--mode", "wait", "--keep-cache"], [("pause_generation", ("wait", False))], "generation is paused"),
        (["pause", "--mode", "keep"], [("pause_generation", ("keep", True))], "generation is paused"),
        (["resume"], [("resume_scheduler", ())], "generation goes on"),
        (["sleep"], [("sleep", (1, "abort"))], "the engine sleeps at level 1"),
        (["sleep", "--level", "0", "--mode", "keep"], [("sleep", (0, "keep"))], "the engine sleeps at level 0"),
        (["wake"], [("wake_up", (None,))], "the engine is awake"),
        (["wake", "weights", "kv_cache"], [("wake_up", (["weights", "kv_cache"],))], "awake: weights, kv_cache"),
        (["weights", "version"], [("get_weight_version", ())], "v1"),
        (["weights", "version", "v2"], [("set_weight_version", ("v2",))], "the weights are called v2"),
        (["lora", "list"], [], "no adapters are loaded"),
        (["lora", "load", "a", "org/a"], [("add_lora", (["a", 1, "org/a"],))], "a is loaded (id 1)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and all(isinstance(word, str) for word in value) else "",
)
async def test_a_command_makes_its_call_and_says_what_happened(
    server: ControlServer, shell: Shell, words: list[str], calls: list[tuple[str, tuple[Any, ...]]], printed: str
) -> None:
    assert await shell.run(server, *words) == (0, printed + "\n", "")
    assert server.engine.utility_calls == calls


async def test_adapters_are_listed_a_line_each_and_unloaded_by_name(server: ControlServer, shell: Shell) -> None:
    for name in ("b", "a"):
        await shell.run(server, "lora", "load", name, f"org/{name}")
    assert await shell.run(server, "lora", "list") == (0, "2\ta\torg/a\n1\tb\torg/b\n", "")
    assert await shell.run(server, "lora", "unload", "a") == (0, "a is unloaded\n", "")
    code, out, _ = await shell.run(server, "lora", "list", "--json")
    assert code == 0
    assert json.loads(out) == {"adapters": [{"lora_id": "1", "lora_name": "b", "source_path": "org/b"}]}


async def test_abort_takes_several_ids(server: ControlServer, shell: Shell) -> None:
    with server.requests.track("x", ["1"]), server.requests.track("y", ["2"]):
        code, _, _ = await shell.run(server, "abort", "x", "y", "z")
    assert code == 0
    assert server.engine.aborts == [["1", "2"]]


async def test_info_is_for_people(server: ControlServer, shell: Shell) -> None:
    code, out, _ = await shell.run(server, "info")
    assert code == 0
    lines = {line[:15].strip(): line[15:] for line in out.splitlines()}
    assert lines["model"] == "org/tiny"
    assert lines["served as"] == "tiny, tiny-alias"
    assert lines["engine"] == "0.33.0, instance a"
    assert lines["context"] == "4096 tokens"
    assert lines["KV cache"] == "100 blocks of 16 tokens"
    assert lines["features"] == "LoRA (up to 2 at once), sleep, weight transfer (nccl), draft weight updates"


async def test_info_says_where_cache_events_are_published_and_that_there_are_no_features(
    nursery: trio.Nursery, shell: Shell
) -> None:
    from dataclasses import replace

    server = await serve_control(nursery, [replace(BARE, kv_events_config=KV_EVENTS)])
    _, out, _ = await shell.run(server, "info")
    assert "rank 0: tcp://*:5557" in out
    assert "features       none" in out


async def test_info_says_nothing_of_a_cache_that_has_no_blocks(nursery: trio.Nursery, shell: Shell) -> None:
    from dataclasses import replace

    server = await serve_control(nursery, [replace(BARE, num_gpu_blocks=0)])
    _, out, _ = await shell.run(server, "info")
    assert "KV cache" not in out
    assert "context  " in out


async def test_info_is_for_scripts_too(server: ControlServer, shell: Shell) -> None:
    code, out, _ = await shell.run(server, "info", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["model"]["served_model_aliases"] == ["tiny-alias"]
    assert answer["server"]["rl_capabilities"]["sleep_mode_enabled"] is True
    assert answer["server"]["parallelism"]["data_parallel_rank"] == 0
    assert answer["kv_event_sources"] == []


@pytest.mark.parametrize("words", [["pause"], ["weights", "version"], ["abort", "x"], ["wake"]])
async def test_json_is_one_object_whatever_the_answer(server: ControlServer, shell: Shell, words: list[str]) -> None:
    code, out, _ = await shell.run(server, *words, "--json")
    assert code == 0
    assert isinstance(json.loads(out), dict)


async def test_a_refusal_is_one_line_and_exit_code_1(nursery: trio.Nursery, shell: Shell) -> None:
    server = await serve_control(nursery, [BARE])
    code, out, err = await shell.run(server, "sleep")
    assert (code, out) == (1, "")
    assert err == (
        "trio-frontend sleep: FAILED_PRECONDITION: sleep mode is not configured; start vLLM with --enable-sleep-mode\n"
    )


async def test_an_engines_failure_is_one_line_and_exit_code_1(server: ControlServer, shell: Shell) -> None:
    server.answers["resume_scheduler"] = UtilityCallError("resume_scheduler", "it broke")
    code, _, err = await shell.run(server, "resume")
    assert code == 1
    assert err == "trio-frontend resume: INTERNAL: ResumeGeneration failed: resume_scheduler failed: it broke\n"


@pytest.mark.parametrize("words", [["lora"], ["lora", "load", "a"], ["abort"], ["pause", "--mode", "nope"], ["weights"]])
def test_a_command_that_is_not_whole_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: trio-frontend" in capsys.readouterr().err
