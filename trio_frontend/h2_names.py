"""Lets purerpc import where someone has installed h2 4 in spite of its pin (h2 < 4). Imported before purerpc is.

purerpc 0.8.0 annotates a method with ``h2.events.PingAcknowledged``, the old name of PingAckReceived, which h2 4 dropped. That name
is all that keeps purerpc from importing; with an h2 that has it nothing happens here.
"""

from __future__ import annotations

import h2.events

if not hasattr(h2.events, "PingAcknowledged"):
    h2.events.PingAcknowledged = h2.events.PingAckReceived
