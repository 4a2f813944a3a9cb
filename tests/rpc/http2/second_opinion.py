"""A second opinion on every answer: `python -m tests.rpc.http2.second_opinion` feeds the same bytes to h2 and to rpc/http2.

h2 lives in a venv of its own (it cannot be installed beside purerpc), made on the first run in the user's cache directory. An outcome
is what reached the application (requests, data, trailers, ends, resets, GOAWAYs) and what the peer was told (RST_STREAM and GOAWAY
with their codes, acks of PING and SETTINGS). Where the two differ, DIFFERENCES names the section of RFC 9113 that decides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeAlias

from tests.rpc.http2.opinion_cases import CASES, DIFFERENCES, Difference, Steps
from tests.rpc.http2.wire import ACK, GOAWAY, PING, RST_STREAM, SETTINGS, read_frames
from trio_frontend.rpc import http2

H2_VERSION = "4.4.1"
LIMITS = http2.Limits(
    max_concurrent_streams=4,
    stream_window=65_535,
    connection_window=65_535,
    max_header_block=65_536,
    max_header_list_size=65_536,
    max_ping_strikes=1_000,
)

Outcome: TypeAlias = dict[str, Any]


class NoSecondOpinion(Exception):
    """The venv with h2 could not be made; the text says why."""


def h2_python() -> Path:
    """The interpreter of a venv that has h2, which is made if it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "trio-frontend" / f"h2-{H2_VERSION}-py{sys.version_info.major}.{sys.version_info.minor}"
    python = home / "bin" / "python"
    done = home / "complete"
    if not done.exists():
        try:
            venv.create(home, clear=True, with_pip=True)
            command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"h2=={H2_VERSION}"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        except subprocess.CalledProcessError as error:
            raise NoSecondOpinion(f"no venv with h2 {H2_VERSION}: {error.stderr or error}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoSecondOpinion(f"no venv with h2 {H2_VERSION}: {error}") from error
        done.touch()
    return python


def theirs(cases: Iterable[Steps]) -> list[Outcome]:
    """h2's outcomes."""
    script = Path(__file__).parent / "h2_side.py"
    answer = subprocess.run(
        [h2_python(), "-I", script], input=json.dumps(list(cases)), check=True, capture_output=True, text=True, timeout=600
    )
    return [_normal(outcome) for outcome in json.loads(answer.stdout)]


def ours(steps: Steps) -> Outcome:
    """rpc/http2's outcome."""
    connection = http2.Connection(LIMITS)
    connection.take_output()
    events: list[list[Any]] = []
    output = b""
    for kind, *arguments in steps:
        if kind == "receive":
            for event in connection.receive_data(bytes.fromhex(arguments[0]), 0.0):
                events += _described(event)
        elif kind == "respond":
            connection.send_headers(arguments[0], b"\x88", end_stream=True)
        elif kind == "reset":
            connection.reset_stream(arguments[0], 8)
        else:
            connection.go_away(0)
        output += connection.take_output()
    return _normal({"events": events, "output": output.hex(), "crashed": None})


def _described(event: http2.Event) -> list[list[Any]]:
    match event:
        case http2.RequestReceived(stream_id, headers, end_stream):
            return [["request", stream_id, _fields(headers)], *([["end", stream_id]] if end_stream else [])]
        case http2.DataReceived(stream_id, data, _, end_stream):
            return [*([["data", stream_id, data.hex()]] if data else []), *([["end", stream_id]] if end_stream else [])]
        case http2.TrailersReceived(stream_id, headers):
            return [["trailers", stream_id, _fields(headers)], ["end", stream_id]]
        case http2.StreamReset(stream_id, code, True):
            return [["reset by the peer", stream_id, code]]
        case http2.GoAwayReceived(last_stream_id, code, _):
            return [["goaway", last_stream_id, code]]
        case _:
            return []


def _fields(headers: http2.Headers) -> list[list[str]]:
    return [[name.hex(), value.hex()] for name, value in headers]


def _normal(outcome: Outcome) -> Outcome:
    """Data of a stream joined, and of the output only what decides: resets, GOAWAY and the number of acks."""
    events: list[list[Any]] = []
    for event in outcome["events"]:
        if event[0] == "data" and events and events[-1][:2] == event[:2]:
            events[-1][2] += event[2]
        else:
            events.append(event)
    frames = read_frames(bytes.fromhex(outcome["output"]))
    result: Outcome = {"events": events}
    resets = [[f.stream_id, http2.ErrorCode(int.from_bytes(f.payload, "big")).name] for f in frames if f.kind == RST_STREAM]
    goaways = [http2.ErrorCode(int.from_bytes(f.payload[4:8], "big")).name for f in frames if f.kind == GOAWAY]
    acks = Counter(f.kind for f in frames if f.kind in (PING, SETTINGS) and f.flags & ACK)
    if outcome["crashed"]:
        result["crashed"] = outcome["crashed"]
    if resets:
        result["resets"] = resets
    if goaways:
        result["goaways"] = goaways
    if acks:
        result["acks"] = [acks[PING], acks[SETTINGS]]
    return result


def verdict(outcome: Outcome) -> str:
    """An outcome in a line: what the peer was told, and what reached the application."""
    told = [f"{outcome['crashed']} raised"] if "crashed" in outcome else []
    told += [f"GOAWAY {name}" for name in outcome.get("goaways", ())]
    told += [f"RST_STREAM {stream_id} {name}" for stream_id, name in outcome.get("resets", ())]
    if "acks" in outcome:
        told.append("acks {}/{}".format(*outcome["acks"]))
    seen = [f"{event[0]} {event[1]}" for event in outcome["events"]]
    return f"{', '.join(told) or 'nothing said'}; {', '.join(seen) or 'nothing seen'}"


def compare() -> dict[str, tuple[str, str]]:
    """The verdicts on the cases in which the two differ: name -> (ours, h2's)."""
    differences = {}
    for (name, steps), other in zip(CASES.items(), theirs(CASES.values()), strict=True):
        mine = ours(steps)
        if mine != other:
            differences[name] = verdict(mine), verdict(other)
    return differences


def explanation(name: str, mine: str, other: str) -> Difference | None:
    """What explains a difference, if anything does."""
    for difference in DIFFERENCES:
        if fnmatch(name, difference.cases) and (difference.ours, difference.h2) == (mine, other) and mine != other:
            return difference
    return None


def main() -> int:
    differences = compare()
    unexplained = []
    for name, (mine, other) in differences.items():
        reason = explanation(name, mine, other)
        if reason is None:
            unexplained.append(name)
        print(f"{name}\n  ours: {mine}\n  h2:   {other}\n  {reason.section if reason else 'NOT EXPLAINED'}")
    print(f"{len(CASES)} cases, {len(differences)} differences, {len(unexplained)} not explained")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
