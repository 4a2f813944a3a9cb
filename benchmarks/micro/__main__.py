"""python -m benchmarks.micro [STAGE ...]: each stage of a token's and a request's way alone, one after another.

``engine_decode``: ZeroMQ's message to a request's sink, and the way out. ``text``: detokenizing, and one message. ``inference``: a
service without network or engine. ``http2``: bytes to requests and messages to frames. ``rpc``: calls over a socket, under h2load.
Each is also a command of its own, some with ``--profile``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

STAGES = ("engine_decode", "text", "inference", "http2", "rpc")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; all, if none is named")
    stages = parser.parse_args().stages or STAGES
    unknown = sorted(set(stages) - set(STAGES))
    if unknown:
        parser.error(f"there is no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    failed = 0
    for stage in stages:
        print(f"\n== {stage}", flush=True)
        failed |= subprocess.run([sys.executable, "-m", f"benchmarks.micro.{stage}"], check=False).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
