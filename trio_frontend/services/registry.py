"""Which requests are live, by the ids that their callers gave them.

A caller's id need not be unique: two live requests may share one, and aborting it ends both. The engine knows requests by
internal ids, which are unique.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["RequestRegistry"]


class Tracked:
    """:meth:`RequestRegistry.track`'s scope."""

    __slots__ = ("_external_id", "_internal_ids", "_live")

    def __init__(self, live: dict[str, set[str]], external_id: str, internal_ids: Collection[str]) -> None:
        self._live = live
        self._external_id = external_id
        self._internal_ids = internal_ids

    def __enter__(self) -> None:
        self._live.setdefault(self._external_id, set()).update(self._internal_ids)

    def __exit__(self, *_: object) -> None:
        ids = self._live.get(self._external_id)
        if ids is not None:  # another scope of this id, which had no internal ids, may have taken it away
            ids.difference_update(self._internal_ids)
            if not ids:
                del self._live[self._external_id]


class RequestRegistry:
    """Live requests: external id -> internal ids. Holds an entry while :meth:`track`'s scope is open, no longer."""

    def __init__(self) -> None:
        self._live: dict[str, set[str]] = {}

    def track(self, external_id: str, internal_ids: Collection[str]) -> Tracked:
        """Let ``external_id`` stand for these internal ids too until the scope ends: a context manager."""
        return Tracked(self._live, external_id, internal_ids)

    def internal_ids(self, external_ids: Iterable[str]) -> list[str]:
        """The live requests' internal ids, each once; unknown external ids stand for none."""
        found = {internal for external in external_ids for internal in self._live.get(external, ())}
        return sorted(found)

    def __len__(self) -> int:
        """How many external ids are live."""
        return len(self._live)
