"""The engine client over a real vLLM engine, one that was started elsewhere and one of its own: what vLLM's own frontend gets, it gets."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
import trio

from tests.integration.real_engine import (
    ENGINE_ARGUMENTS,
    ENVIRONMENT,
    MODEL,
    START_TIMEOUT,
    require_vllm,
    serving_vllms_own,
    started,
)
from trio_frontend.engine.base import (
    EngineError,
    EngineOutput,
    EngineRequest,
    EngineState,
    EngineUnavailableError,
    FinishReason,
    SamplingParams,
    StructuredOutput,
    UnsupportedCallError,
    UtilityCallError,
)
from trio_frontend.engine.vllm import VllmEngine, launch_engine, open_engine
from trio_frontend.protos.vllm import inference_pb2 as pb

pytestmark = pytest.mark.real_engine

T = TypeVar("T")
PROMPTS = ([1, 2, 3], [5, 6, 7, 8, 9, 10, 11], [20, 40], list(range(3, 60)))
TOKENS = 24
TOP = 3
PROMPTLY = 1.0


class Portal:
    """An engine that is open in a Trio run of its own thread, for tests that come one after the other."""

    def __init__(self, engine: VllmEngine, token: trio.lowlevel.TrioToken) -> None:
        self.engine = engine
        self._token = token

    def run(self, test: Callable[[VllmEngine], Awaitable[T]]) -> T:
        async def bounded() -> T:
            with trio.fail_after(120):
                return await test(self.engine)

        return trio.from_thread.run(bounded, trio_token=self._token)


@contextmanager
def portal(opened: AbstractAsyncContextManager[VllmEngine]) -> Iterator[Portal]:
    found: list[Portal] = []
    failures: list[BaseException] = []
    ready, done = threading.Event(), trio.Event()

    async def main() -> None:
        async with opened as engine:
            found.append(Portal(engine, trio.lowlevel.current_trio_token()))
            ready.set()
            await done.wait()

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001 - shown in the test's thread
            failures.append(error)
        ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        ready.wait()
        if failures:
            raise failures[0]
        yield found[0]
    finally:
        if found:
            trio.from_thread.run_sync(done.set, trio_token=found[0]._token)
        thread.join()


@contextmanager
def headless_engine(port: int) -> Iterator[int]:
    """A real engine that says HELLO to ``port`` of this machine: its process group."""
    command = [str(require_vllm()), "serve", str(MODEL), "--headless", "--data-parallel-address", "127.0.0.1"]
    command += ["--data-parallel-rpc-port", str(port), "--data-parallel-size-local", "1", *ENGINE_ARGUMENTS]
    # A shell of its own session tells its process id, which is its group's, and becomes the engine.
    wrapped = [
        sys.executable,
        "-c",
        "import os, sys; os.setsid(); print('group', os.getpid(), flush=True); os.execv(sys.argv[1], sys.argv[1:])",
    ]
    with started([*wrapped, *command], None, re.compile(r"^group (\d+)$")) as group:
        yield int(group)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def external() -> Iterator[Portal]:
    port = free_port()
    with (
        headless_engine(port),
        portal(open_engine(handshake_address=f"tcp://127.0.0.1:{port}", start_timeout=START_TIMEOUT)) as opened,
    ):
        yield opened


@pytest.fixture(scope="module")
def owned() -> Iterator[Portal]:
    vllm = str(require_vllm())
    opened = launch_engine(str(MODEL), vllm=vllm, arguments=ENGINE_ARGUMENTS, start_timeout=START_TIMEOUT)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        with portal(opened) as here:
            yield here


@pytest.fixture(params=["external", "owned"])
def real(request: pytest.FixtureRequest) -> Portal:
    opened: Portal = request.getfixturevalue(request.param)
    return opened


Reference = list[tuple[list[int], list[float], list[list[int]], list[list[float]]]]


@pytest.fixture(scope="module")
def vllms_own() -> Reference:
    """What vLLM's Rust frontend answers to PROMPTS: token ids, their logprobs, and the TOP candidates of each."""
    answers: Reference = []
    with serving_vllms_own(free_port()) as address, grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            "/vllm.Inference/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )
        for prompt in PROMPTS:
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=prompt),
                stopping={"max_new_tokens": TOKENS, "ignore_eos": True},
                response={"output_token_ids": True, "output_logprobs": True, "output_candidates": {"top_n": TOP}},
            )
            outputs = call(request, timeout=60, wait_for_ready=True).outputs
            candidates = [entry.tokens for entry in outputs.candidate_tokens]
            answers.append(
                (
                    list(outputs.token_ids),
                    list(outputs.logprobs),
                    [[candidate.id for candidate in entry] for entry in candidates],
                    [[candidate.logprob for candidate in entry] for entry in candidates],
                )
            )
    return answers


def request(prompt: list[int], **sampling: Any) -> EngineRequest:
    return EngineRequest(uuid.uuid4().hex, prompt, SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **sampling}))


async def generate(engine: VllmEngine, asked: EngineRequest) -> list[EngineOutput]:
    async with engine.generate(asked) as outputs:
        return [output async for batch in outputs for output in batch]


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_the_engine_says_what_it_is(real: Portal) -> None:
    (info,) = real.engine.capabilities.engines
    assert info.max_model_len == real.engine.capabilities.max_model_len == 512
    assert info.max_num_seqs == 64
    assert info.num_gpu_blocks > 0
    assert re.match(r"0\.\d+", info.vllm_version)
    assert real.engine.health.value.serving


def test_greedy_tokens_and_logprobs_are_those_of_vllms_own_frontend(real: Portal, vllms_own: Reference) -> None:
    for prompt, (ids, logprobs, candidates, candidate_logprobs) in zip(PROMPTS, vllms_own, strict=True):
        outputs = real.run(partial(generate, asked=request(prompt, logprobs=TOP)))
        assert tokens(outputs) == ids
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        rows = [output.logprobs for output in outputs]
        assert all(row is not None for row in rows)
        ours = np.concatenate([row.logprobs for row in rows if row is not None])
        our_ids = np.concatenate([row.token_ids for row in rows if row is not None])
        np.testing.assert_allclose(ours[:, 0], logprobs, atol=1e-4)
        assert our_ids[:, 1:].tolist() == candidates
        np.testing.assert_allclose(ours[:, 1:], candidate_logprobs, atol=1e-4)


def test_sixty_four_requests_at_once_each_get_all_their_tokens(real: Portal) -> None:
    async def run(engine: VllmEngine) -> list[int]:
        counts: list[int] = []

        async def one(number: int) -> None:
            outputs = await generate(engine, request([number + 1, 2, 3], max_tokens=40))
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            counts.append(len(tokens(outputs)))

        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(one, number)
        assert engine.live_requests == 0
        return counts

    assert real.run(run) == [40] * 64


def test_leaving_the_scope_frees_the_engines_slot(real: Portal) -> None:
    async def run(engine: VllmEngine) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(8):

                async def hold(number: int = number) -> None:
                    async with engine.generate(request([number + 1], max_tokens=500)) as outputs:
                        async for _ in outputs:
                            pass

                nursery.start_soon(hold)
            while engine.reported_requests()[0][0] < 8:  # noqa: ASYNC110
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        with trio.fail_after(5):
            while engine.reported_requests()[0] != (0, 0):  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert engine.live_requests == 0

    real.run(run)


def test_prompt_logprobs_come_in_auxiliary_frames(real: Portal) -> None:
    prompt = list(range(3, 123))
    outputs = real.run(partial(generate, asked=request(prompt, max_tokens=2, prompt_logprobs=5)))
    found = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(found) == 1
    assert found[0].token_ids.shape == found[0].logprobs.shape == (119, 6)
    assert found[0].token_ids[:, 0].tolist() == prompt[1:]
    assert found[0].ranks.shape == (119,)
    assert (found[0].ranks >= 1).all()


def test_a_stop_token_ends_a_request_and_is_named(real: Portal) -> None:
    free = tokens(real.run(partial(generate, asked=request([1, 2, 3]))))
    stop = free[5]
    outputs = real.run(partial(generate, asked=request([1, 2, 3], stop_token_ids=[stop])))
    assert tokens(outputs) == free[: free.index(stop) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, stop)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "seed": -(2**63)},
        {"temperature": 0.7, "seed": -1, "top_k": 5, "top_p": 0.5, "min_p": 0.01},
        {"logit_bias": {5: 100.0, 6: -100.0}, "presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 1.5},
        {
            "allowed_token_ids": [7, 8, 9],
            "min_tokens": 3,
            "eos_token_id": 2,
            "extra_eos_token_ids": [4],
            "ignore_eos": False,
        },
        {"logprobs": -1, "max_tokens": 1},
        {"logprob_token_ids": [9, 4, 7]},
        {"skip_reading_prefix_cache": True, "extra_args": {"kv_transfer_params": {"a": [1, None, {"b": 2.5}]}}},
        {"structured_output": StructuredOutput("choice", ("yes", 'no "\\\n no'))},
        {"structured_output": StructuredOutput("json", '{"type": "integer"}')},
        {"structured_output": StructuredOutput("regex", "[a-c]{3}")},
        {"structured_output": StructuredOutput("json_object", None)},
        {"structured_output": StructuredOutput("grammar", 'root ::= "abc"')},
    ],
    ids="-".join,
)
def test_the_engine_takes_every_sampling_field(external: Portal, sampling: dict[str, Any]) -> None:
    asked = request([1, 2, 3], **{"max_tokens": 6, "ignore_eos": False, "eos_token_id": 0, **sampling})
    outputs = external.run(partial(generate, asked=asked))
    assert outputs[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    if "allowed_token_ids" in sampling:
        assert set(tokens(outputs)) <= {7, 8, 9}


def test_a_request_that_the_engine_fails_ends_with_its_error_and_the_engine_goes_on(external: Portal) -> None:
    external.run(partial(generate, asked=request([1], structured_output=StructuredOutput("json_object", None))))
    # One backend an engine: the second one that is asked for is refused (0.33), or has no choice (0.32's xgrammar).
    second = request([1], structured_output=StructuredOutput("choice", ("a", "b"), "guidance"))
    with pytest.raises(EngineError):
        external.run(partial(generate, asked=second))
    assert len(tokens(external.run(partial(generate, asked=request([1]))))) == TOKENS
    assert external.engine.health.value.serving


@pytest.mark.parametrize("prompt", [[1] * 512, [1] * 600])
def test_a_prompt_that_would_kill_the_engine_is_not_sent(external: Portal, prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="leaves no room for one more"):
        external.run(partial(generate, asked=request(prompt)))
    assert len(tokens(external.run(partial(generate, asked=request([1] * 511))))) == 1


def test_utility_calls_and_their_failures(real: Portal) -> None:
    async def run(engine: VllmEngine) -> None:
        assert await engine.call_utility("is_sleeping") == [False]
        assert await engine.call_utility("is_scheduler_paused") == [False]
        with pytest.raises(UnsupportedCallError):
            await engine.call_utility("no_such_method")
        with pytest.raises(UtilityCallError, match="Invalid pause mode: sideways"):
            await engine.call_utility("pause_scheduler", "sideways", False)
        assert await engine.call_utility("pause_scheduler", "keep", False) == [None]
        assert await engine.call_utility("is_scheduler_paused") == [True]
        assert await engine.call_utility("resume_scheduler") == [None]
        assert len(tokens(await generate(engine, request([1])))) == TOKENS

    real.run(run)


def test_pausing_with_abort_ends_what_runs(real: Portal) -> None:
    async def run(engine: VllmEngine) -> None:
        async with engine.generate(request([1], max_tokens=500)) as outputs:
            await anext(outputs)
            await engine.call_utility("pause_scheduler", "abort", False)
            rest = [output async for batch in outputs for output in batch]
            assert rest[-1].finish_reason is FinishReason.ABORT
        await engine.call_utility("resume_scheduler")

    real.run(run)


def test_a_killed_engine_is_seen_within_a_second_and_one_that_comes_back_is_taken_in() -> None:
    port = free_port()

    async def kill(engine: VllmEngine, group: int) -> None:
        async with engine.generate(request([1], max_tokens=500)) as outputs:
            await anext(outputs)
            os.killpg(group, signal.SIGKILL)
            with trio.fail_after(PROMPTLY), pytest.raises(EngineError):
                async for _ in outputs:
                    pass
        assert engine.health.value.state is EngineState.LOST
        with pytest.raises(EngineUnavailableError):
            await generate(engine, request([1]))

    async def serve_again(engine: VllmEngine) -> int:
        await engine.health.wait_value(lambda health: health.serving)
        return len(tokens(await generate(engine, request([1]))))

    opened = open_engine(handshake_address=f"tcp://127.0.0.1:{port}", start_timeout=START_TIMEOUT)
    with headless_engine(port) as group, portal(opened) as here:
        here.run(partial(kill, group=group))
        with headless_engine(port):
            assert here.run(serve_again) == TOKENS
