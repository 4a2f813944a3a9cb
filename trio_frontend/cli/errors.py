"""How a failure becomes one line."""

from __future__ import annotations

__all__ = ["CommandError", "UsageError", "faults", "leaves", "one_line"]


class CommandError(Exception):
    """A command failed and its message says all there is to say."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class UsageError(Exception):
    """The command line cannot be served; exit code 2, as argparse has it."""


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions inside ``error``'s groups, each once, in order; ``[error]`` if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        found: dict[int, BaseException] = {}
        for inner in error.exceptions:
            for leaf in leaves(inner):
                found[id(leaf)] = leaf
        return list(found.values())
    return [error]


def one_line(error: BaseException) -> str:
    """``error`` for a reader: no groups, no traceback, no line breaks."""
    return "; ".join(dict.fromkeys(_describe(leaf) for leaf in leaves(error)))


def faults(error: BaseException) -> list[BaseException]:
    """Those of ``error``'s leaves that are nobody's mistake but ours: what is not said in words made for a reader."""
    return [leaf for leaf in leaves(error) if not _is_told(leaf)]


def _is_told(error: BaseException) -> bool:
    return isinstance(error, (OSError, ValueError)) or type(error).__module__.startswith("trio_frontend.")


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        # Without the number that str() puts before it.
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return text if text and _is_told(error) else f"{type(error).__name__}: {text}".removesuffix(": ")
