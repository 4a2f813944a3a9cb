"""Every test of this directory leaves as many open file descriptors as it found: sockets, pipes, ZeroMQ's own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_descriptor_is_left_open() -> Iterator[None]:
    before = _open_descriptors()
    yield
    left = {fd: what for fd, what in _open_descriptors().items() if before.get(fd) != what}
    assert not left


def _open_descriptors() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the listing's own
            continue
    return found
