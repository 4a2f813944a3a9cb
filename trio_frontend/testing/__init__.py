"""What tests of an app built on trio_frontend need: an engine that a test drives by hand or with a script."""

from __future__ import annotations

from trio_frontend.testing.engine import Script, ScriptedEngine, ScriptedRequest, one_token_per_step

__all__ = ["Script", "ScriptedEngine", "ScriptedRequest", "one_token_per_step"]
