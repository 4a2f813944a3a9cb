"""The LoRA adapters that are loaded, by the names that requests use.

The registry is what this server knows; the engines are told by utility calls, one at a time (``services.control``).
"""

from __future__ import annotations

from trio_frontend.engine.base import LoraRequest

__all__ = ["LoraRegistry"]


class LoraRegistry:
    """Loaded adapters: name -> :class:`LoraRequest`. Ids count from 1 and are never used twice in a server's life, so
    that an engine's caches cannot take a new adapter for an old one."""

    def __init__(self) -> None:
        self._adapters: dict[str, LoraRequest] = {}
        self._last_id = 0

    def resolve(self, name: str) -> LoraRequest | None:
        """The adapter of this name, None if it is not loaded."""
        return self._adapters.get(name)

    def adapters(self) -> list[LoraRequest]:
        """All loaded adapters, in the order in which they were loaded."""
        return list(self._adapters.values())

    def reserve(self, name: str, path: str) -> LoraRequest:
        """An adapter with an id of its own, not yet loaded: :meth:`add` it once the engines have it."""
        self._last_id += 1
        return LoraRequest(name=name, id=self._last_id, path=path)

    def add(self, adapter: LoraRequest) -> None:
        self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Forget the adapter; requests that already run with it keep it."""
        del self._adapters[name]
