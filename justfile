# Recipes for `just` (https://just.systems); the development dependencies have it as .venv/bin/just.

python := ".venv/bin/python"

# List the recipes.
default:
    @just --list

# Make .venv with everything that development needs.
setup:
    python3 -m venv .venv
    .venv/bin/pip install -e '.[dev]'

# Serve the small model of the package, or what is named: just serve MODEL --port 50052.
serve *arguments:
    {{python}} -m trio_frontend serve {{arguments}}

# Run the tests, about three minutes; or some of them: just test tests/rpc -k deadline.
test *arguments:
    {{python}} -m pytest {{arguments}}

# The long tests, and those that start processes.
test-long *arguments:
    {{python}} -m pytest -m "slow or process" {{arguments}}

# Install a real vLLM engine for the CPU (4 minutes, 3.5 GB) and test against it.
test-real-engine *arguments:
    tools/real_engine_setup.sh
    {{python}} -m pytest -m real_engine {{arguments}}

# Run the tests with the lowest versions that pyproject.toml allows, in a virtual environment of their own.
test-lowest *arguments:
    python3 -m venv .venv/lowest
    {{python}} tools/lowest_versions.py > .venv/lowest/constraints.txt
    .venv/lowest/bin/pip install -q -e '.[test]' -c .venv/lowest/constraints.txt
    .venv/lowest/bin/python -m pytest {{arguments}}

# Style, formatting, types, import rules, and whether the generated protos are up to date.
lint:
    .venv/bin/ruff check
    .venv/bin/ruff format --check
    .venv/bin/mypy
    .venv/bin/lint-imports
    {{python}} tools/generate_protos.py --check

# Put the code into the project's format.
format:
    .venv/bin/ruff check --fix
    .venv/bin/ruff format

# Generate trio_frontend/protos from proto/.
proto:
    {{python}} tools/generate_protos.py

# Measure: just bench --help.
bench *arguments:
    {{python}} -m benchmarks {{arguments}}

# Everything that must pass before a change is merged.
ci:
    .ci/run
