"""Which requests are live, by the ids that their callers gave them.

A caller's id need not be unique: two live requests may share one, and aborting it ends both. The engine knows requests by
internal ids, which are unique.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ["RequestRegistry"]


class RequestRegistry:
    """Live requests: external id -> internal ids. Holds an entry while :meth:`track`'s scope is open, no longer."""

    def __init__(self) -> None:
        self._live: dict[str, set[str]] = {}

    @contextmanager
    def track(self, external_id: str, internal_ids: Iterable[str]) -> Iterator[None]:
        """Let ``external_id`` stand for these internal ids too until the scope ends."""
        ours = set(internal_ids)
        live = self._live.setdefault(external_id, set())
        live |= ours
        try:
            yield
        finally:
            live -= ours
            if not live:
                self._live.pop(external_id, None)

    def internal_ids(self, external_ids: Iterable[str]) -> list[str]:
        """The live requests' internal ids, each once; unknown external ids stand for none."""
        found = {internal for external in external_ids for internal in self._live.get(external, ())}
        return sorted(found)

    def __len__(self) -> int:
        """How many external ids are live."""
        return len(self._live)
