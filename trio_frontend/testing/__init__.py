"""What tests of an app built on trio_frontend need: a server and a channel without a port, and an engine that a test drives.

Everything runs on Trio's clock, so on an autojump clock too. :mod:`trio_frontend.testing.fixtures` has fixtures for pytest-trio.
"""

from __future__ import annotations

from trio_frontend.testing.engine import Script, ScriptedEngine, ScriptedRequest, one_token_per_step
from trio_frontend.testing.frontend import Frontend, open_frontend

__all__ = ["Frontend", "Script", "ScriptedEngine", "ScriptedRequest", "one_token_per_step", "open_frontend"]
