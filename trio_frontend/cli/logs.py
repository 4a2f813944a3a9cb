"""The process's log: one line for each record on stderr, as text for people or JSON for machines.

Only the command line configures logging; a server embedded in someone's app leaves it to them. What a record has in ``extra``
(``reason``, ``peer``, ``seconds``, ...) comes out too: ``name=value`` in text, a member of the object in JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

__all__ = ["configure_logging", "have_the_hub_log_through_us"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(level: str, form: Literal["text", "json"]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # A log that cannot be written (stderr closed, disk full) must neither stop the server nor write tracebacks.
    logging.raiseExceptions = False


def have_the_hub_log_through_us() -> None:
    """Import huggingface_hub, which takes a quarter of a second, and take away the handler that it gives its logger by that.

    With it, each of its lines would come twice, and once in neither of our forms.
    """
    import huggingface_hub.utils.logging  # noqa: F401

    logging.getLogger("huggingface_hub").handlers.clear()


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class _Text(logging.Formatter):
    """``2026-11-30 14:05:01 INFO trio_frontend.server: health is NOT_SERVING reason=server_shutdown``"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {name}={_on_one_line(value)}" for name, value in _extra(record).items())
        return super().formatMessage(record) + extra


def _on_one_line(value: object) -> str:
    """A caller's or an engine's text must not look like another line of this log, nor write to the terminal that shows it."""
    text = str(value)
    return text if text.isprintable() else repr(text)


class _Json(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, message, what is in ``extra``, and exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)
