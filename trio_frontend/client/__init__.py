"""A client of gRPC servers for Trio: purerpc's stubs over a channel that cancels, keeps deadlines and notices a lost connection.

See :func:`connect`. Every failure of a call is an :class:`RpcError`.
"""

from .channel import Channel, Responses, connect, open_channel
from .errors import RpcError, StatusCode
from .transport import tls_context

__all__ = ["Channel", "Responses", "RpcError", "StatusCode", "connect", "open_channel", "tls_context"]
