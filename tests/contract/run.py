"""python -m tests.contract.run ADDRESS: the contract's cases against a server.

The server serves a model with the tests' tokenizer (``python -m tests.contract.model DIRECTORY``) as ``tiny`` with the alias
``tiny-alias``, over ``scripted_core`` or, with ``--no-scripts``, over any engine with that vocabulary and a context of 64 tokens.
``--oracle``: the server is vLLM's own frontend; what docs/compatibility.md names may differ, and is named if it does not.
Prints what is not as the contract says, and exits with 1 if anything is not.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

import grpc

from tests.contract.answers import Client, problems
from tests.contract.cases import CASES, FATAL
from tests.protos.upstream import generate_stubs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("--no-scripts", action="store_true")
    parser.add_argument("--only", default="", metavar="PREFIX")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, grpc.insecure_channel(args.address) as channel:
        generate_stubs(Path(directory))
        sys.path.insert(0, directory)
        client = Client(channel, importlib.import_module("inference_pb2"), importlib.import_module("inference_pb2_grpc"))
        asked = [case for case in CASES if case.name.startswith(args.only) and not (case.script and args.no_scripts)]
        if args.oracle and args.no_scripts:
            asked = [case for case in asked if case.oracle != FATAL]
        wrong = unexpected = 0
        for case in asked:
            found = list(problems(case, client.unary(case), client.stream(case), words=not args.oracle))
            known = args.oracle and case.oracle is not None
            wrong += bool(found)
            if found and not known:
                unexpected += 1
            for problem in found:
                print(f"{case.name}{f' ({case.oracle})' if known else ''}: {problem}")
            if known and not found:
                print(f"{case.name} ({case.oracle}): does not differ")
        print(f"{len(asked) - wrong} of {len(asked)} as the contract says, {unexpected} differ without a documented reason")
    return 1 if unexpected or not asked else 0


if __name__ == "__main__":
    sys.exit(main())
