"""The one exception that a call of this client fails with."""

from __future__ import annotations

from collections.abc import Sequence

from purerpc.grpclib.exceptions import RpcFailedError
from purerpc.grpclib.status import Status, StatusCode

__all__ = ["RpcError", "StatusCode"]


class RpcError(RpcFailedError):  # type: ignore[misc]  # purerpc has no types
    """A call failed: the server said so, or the connection did.

    ``code`` is a ``purerpc.grpclib.status.StatusCode``, ``message`` the server's own or ours, ``trailing_metadata`` what came with
    it. It is a purerpc ``RpcFailedError`` too, so that code written for purerpc's own channel catches it.
    """

    def __init__(self, code: StatusCode, message: str, trailing_metadata: Sequence[tuple[str, str | bytes]] = ()) -> None:
        super().__init__(Status(code, message))
        self.code = code
        self.message = message
        self.trailing_metadata = tuple(trailing_metadata)

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}" if self.message else str(self.code.name)
