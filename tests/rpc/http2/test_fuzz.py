"""Protects the promise that whatever comes in, only events come out: mutated recordings, and bytes and frames of any kind."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.rpc.http2 import fuzz
from tests.rpc.http2.wire import PREFACE, frame, settings


def fuzz_inputs(seed: int, count: int) -> None:
    mutator = fuzz.Mutator(fuzz.recordings())
    for number in range(count):
        try:
            fuzz.run_input(mutator, seed, number)
        except Exception as error:
            error.add_note(f"input {number} of seed {seed}")
            raise


def test_3000_mutated_recordings_give_events_only() -> None:
    fuzz_inputs(0, 3_000)


@pytest.mark.slow
def test_200000_mutated_recordings_give_events_only() -> None:
    fuzz_inputs(1, 200_000)


@hypothesis_settings(deadline=None)
@given(st.binary(max_size=2_000), st.booleans(), st.integers(0, 2**32))
def test_any_bytes_give_events_only(data: bytes, after_settings: bool, seed: int) -> None:
    fuzz.run((PREFACE + settings() if after_settings else b"") + data, random.Random(seed))


FRAMES = st.builds(
    frame,
    st.integers(0, 11),
    st.integers(0, 255),
    st.sampled_from([0, 1, 1, 3, 5, 2, 2**31 - 1]),
    st.binary(max_size=40),
)


@hypothesis_settings(deadline=None)
@given(st.lists(FRAMES, max_size=30), st.integers(0, 2**32))
def test_any_frames_give_events_only(frames: list[bytes], seed: int) -> None:
    fuzz.run(PREFACE + settings() + b"".join(frames), random.Random(seed))


def test_an_input_is_the_same_every_time() -> None:
    mutator = fuzz.Mutator(fuzz.recordings())
    first, second = (mutator.make(random.Random(5)) for _ in range(2))
    assert first == second
