"""``python -m trio_frontend``: the same as the ``trio-frontend`` command."""

from __future__ import annotations

import sys

from trio_frontend.cli import main

sys.exit(main())
