"""python -m benchmarks [--peer] [--scale X] [--only NAME ...]: what trio_frontend costs, as a table.

Starts the mock engine, the server and the client itself. With --peer, vLLM's Rust frontend, purerpc's own server and
grpc.aio answer the same workloads in the same run, and the table has ratios to the Rust frontend. Machines differ and are
shared: compare ratios, not figures. Needs h2load (Debian: nghttp2-client); the Rust frontend needs vllm-rs
(tools/real_engine_setup.sh).
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import tempfile
from dataclasses import dataclass

from benchmarks import scenarios
from benchmarks.peers import rust_frontend as rust_peer
from benchmarks.servers import constant_answers, rust_frontend, trio_frontend

BARS = {
    "streamed token": (4.0, 2.5),
    "unary 1-token request": (4.0, 2.0),
    "unary 128-token request, per token": (4.0, 2.0),
}


@dataclass(frozen=True)
class Condition:
    """How the costs are measured: ``engine`` are the mock engine's options."""

    title: str
    engine: tuple[str, ...] = ()
    merging: bool = True
    constants: bool = False


CONDITIONS = (
    Condition("one token per frame, whatever waits; engine as fast as it is taken", merging=False, constants=True),
    Condition("as shipped; engine as fast as it is taken"),
    Condition("as shipped; engine steps every 4 ms", ("--step-ms", "4")),
)
"""The bars count under the first. Under the second, steps merge where the frontend falls behind; the third is an engine's pace."""


def cost_table(condition: Condition, logs: pathlib.Path, scale: float, peers: bool) -> dict[str, float]:
    with trio_frontend(logs, *condition.engine, merging=condition.merging) as server:
        ours = scenarios.costs(server, scale)
        frames = scenarios.tokens_per_frame(server)
    columns = {"trio_frontend": ours}
    if peers:
        if rust_peer.BINARY.exists():
            with rust_frontend(logs, *condition.engine) as server:
                columns["Rust frontend"] = scenarios.costs(server, scale)
        else:
            print(f"no {rust_peer.BINARY}: the Rust frontend is left out (tools/real_engine_setup.sh installs it)")
    if peers and condition.constants:
        for module, name in (("purerpc_server", "purerpc (constant)"), ("grpc_aio_server", "grpc.aio (constant)")):
            with constant_answers(logs, module, name) as server:
                columns[name] = scenarios.costs(server, scale)
    rust = columns.get("Rust frontend")
    print(f"\nus of CPU per unit of work, 64 requests at a time, {condition.title} ({frames:.2f} tokens a frame)\n")
    print("| workload | " + " | ".join(columns) + " | ratio to Rust | bar | target |")
    print("| --- |" + " --- |" * (len(columns) + 3))
    for workload, (bar, target) in BARS.items():
        figures = " | ".join(f"{column[workload]:.1f}" for column in columns.values())
        ratio = f"{ours[workload] / rust[workload]:.2f} x" if rust else "-"
        print(f"| {workload} | {figures} | {ratio} | {bar} x | {target} x |", flush=True)
    return ours


def show(title: str, rows: dict[str, float] | dict[int, float]) -> None:
    print(f"\n{title}\n")
    for name, value in rows.items():
        print(f"  {name}: {value:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="store_true", help="measure the peers in the same run")
    parser.add_argument("--scale", type=float, default=1.0, help="how much work, 1.0: 1,000 requests of 128 tokens")
    parser.add_argument("--only", nargs="*", default=[], help="cost growth memory latency first-token overload start-up")
    a = parser.parse_args()
    if not shutil.which("h2load"):
        raise SystemExit("h2load is not installed (Debian: apt-get install nghttp2-client)")

    def wanted(name: str) -> bool:
        return not a.only or name in a.only

    with tempfile.TemporaryDirectory() as directory:
        logs = pathlib.Path(directory)
        ours: dict[str, float] = {}
        if wanted("cost"):
            tables = [cost_table(condition, logs, a.scale, a.peer) for condition in CONDITIONS]
            ours = tables[0]
        starts: dict[str, scenarios.Start] = {"trio_frontend": trio_frontend}
        if a.peer and rust_peer.BINARY.exists():
            starts["Rust frontend"] = rust_frontend
        if wanted("growth"):
            for name, start in starts.items():
                show(f"us of CPU per streamed token at N live streams, {name}", scenarios.growth(start, logs, a.scale))
        if wanted("memory"):
            per_stream, watches = scenarios.idle_memory(logs)
            show("memory", {"KiB per idle live stream": per_stream, "MB for 10,000 idle health watches": watches})
        if wanted("latency"):
            for name, start in starts.items():
                show(
                    f"ms from a step to the last of its 256 frames, {name}",
                    scenarios.step_latency(start, logs, 10 * a.scale, False),
                )
            title = "ms from a step to the last of its 256 frames, trio_frontend, while 30,000-token prompts arrive"
            show(title, scenarios.step_latency(trio_frontend, logs, 10 * a.scale, True))
        if wanted("first-token"):
            for name, start in starts.items():
                show(f"ms to the first token, engine included, {name}", scenarios.time_to_first_token(start, logs, 300))
        if wanted("overload"):
            if not ours:
                ours = cost_table(CONDITIONS[0], logs, a.scale, False)
            show(
                "overload: an engine at half of and twice the rate that one core sustains",
                scenarios.overload(logs, ours["streamed token"]),
            )
        if wanted("start-up"):
            show("start-up, seconds", scenarios.start_up())


if __name__ == "__main__":
    main()
