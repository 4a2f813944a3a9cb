#!/usr/bin/env python3
"""Regenerate ``trio_frontend/protos`` from ``proto``; with ``--check`` write nothing and say whether it is up to date.

Byte for byte the same wherever the development dependencies are installed: grpcio-tools (protoc) is pinned among them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "proto"
OUTPUT = ROOT / "trio_frontend" / "protos"
PLUGIN = ROOT / "tools" / "protoc_gen_trio_frontend.py"
HAND_WRITTEN = {"__init__.py", "_pool.py", "_typing.py"}
# messages of other files: "from google.protobuf import struct_pb2 as _struct_pb2"
MESSAGE_IMPORT = re.compile(r"^from (\S+) import (\w+_pb2) as ", re.MULTILINE)


def generate(directory: Path) -> dict[str, str]:
    """Run protoc; the generated files' contents by path relative to ``trio_frontend/protos``."""
    protos = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    # protoc starts a plugin as a program of one word
    program = directory / "protoc-gen-trio"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{PLUGIN}"\n')
    program.chmod(0o755)
    out = directory / "out"
    out.mkdir()
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", f"--plugin={program}"]
    subprocess.run(
        [*command, f"--trio_out={out}", f"--pyi_out={out}", *protos], check=True, env={**os.environ, "LC_ALL": "C"}
    )
    files: dict[str, str] = {}
    for path in sorted(out.rglob("*.py*")):
        relative = path.relative_to(out)
        text = path.read_text()
        if relative.suffix == ".pyi":
            text = MESSAGE_IMPORT.sub(r"from trio_frontend.protos.\1 import \2 as ", text)
        files[str(relative)] = text
        for package in list(relative.parents)[:-1]:
            files[str(package / "__init__.py")] = ""
    return files


def differences(files: dict[str, str]) -> list[str]:
    """What stands in ``trio_frontend/protos`` and should not, or the other way round, a line each."""
    found = {str(p.relative_to(OUTPUT)) for p in OUTPUT.rglob("*.py*") if "__pycache__" not in p.parts} - HAND_WRITTEN
    lines = [f"{name}: not generated from any .proto file" for name in sorted(found - files.keys())]
    for name, text in sorted(files.items()):
        if name not in found:
            lines.append(f"{name}: missing")
        elif (OUTPUT / name).read_text() != text:
            lines.append(f"{name}: stale")
    return lines


def write(files: dict[str, str]) -> None:
    for line in differences(files):
        name = line.partition(":")[0]
        if name in files:
            (OUTPUT / name).parent.mkdir(parents=True, exist_ok=True)
            (OUTPUT / name).write_text(files[name])
        else:
            (OUTPUT / name).unlink()
        print(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if anything would change")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        files = generate(Path(directory))
    if not arguments.check:
        write(files)
        return 0
    stale = differences(files)
    for line in stale:
        print(f"trio_frontend/protos/{line}; run `just proto`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
