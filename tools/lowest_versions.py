#!/usr/bin/env python3
"""Print pyproject.toml's lower bounds as pip constraints, so that they can be tried:

python -m venv lowest && lowest/bin/pip install -e '.[test]' -c <(python tools/lowest_versions.py) && lowest/bin/pytest
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

LOWER_BOUND = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?>=([^,;]+)")


def main() -> None:
    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        bound = LOWER_BOUND.match(requirement)
        if bound is not None:
            print(f"{bound[1]}=={bound[2]}")


if __name__ == "__main__":
    main()
