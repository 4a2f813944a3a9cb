"""What holds for all tests: a program that a test starts by name, or by ``#!/usr/bin/env python3``, is this environment's,
whether it was activated or not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
