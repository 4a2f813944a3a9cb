"""The second opinion's other side: runs in a venv of its own that has h2, reads cases as JSON on stdin, writes outcomes on stdout.

A case is a list of steps: ["receive", hex], ["respond", stream], ["reset", stream] or ["go away"]. An outcome is what second_opinion.py
says it is. This file imports nothing of the project.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings


def outcome(steps: list[list[Any]]) -> dict[str, Any]:
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    connection.local_settings = h2.settings.Settings(
        client=False,
        initial_values={
            h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 4,
            h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: 65_536,
        },
    )
    connection.initiate_connection()
    connection.data_to_send()
    events: list[list[Any]] = []
    output = b""
    crashed = None
    for kind, *arguments in steps:
        try:
            if kind == "receive":
                for event in connection.receive_data(bytes.fromhex(arguments[0])):
                    events += described(event)
            elif kind == "respond":
                connection.send_headers(arguments[0], [(":status", "200")], end_stream=True)
            elif kind == "reset":
                connection.reset_stream(arguments[0], 8)
            else:
                connection.close_connection()
        except h2.exceptions.ProtocolError:
            output += connection.data_to_send()
            break
        except Exception as error:  # noqa: BLE001  # what leaves it is what is asked
            crashed = type(error).__name__
            output += connection.data_to_send()
            break
        output += connection.data_to_send()
    return {"events": events, "output": output.hex(), "crashed": crashed}


def described(event: h2.events.Event) -> list[list[Any]]:
    match event:
        case h2.events.RequestReceived():
            return [["request", event.stream_id, fields(event.headers)]]
        case h2.events.DataReceived():
            return [["data", event.stream_id, event.data.hex()]] if event.data else []
        case h2.events.TrailersReceived():
            return [["trailers", event.stream_id, fields(event.headers)]]
        case h2.events.StreamEnded():
            return [["end", event.stream_id]]
        case h2.events.StreamReset() if event.remote_reset:
            return [["reset by the peer", event.stream_id, int(event.error_code)]]
        case h2.events.ConnectionTerminated():
            return [["goaway", event.last_stream_id, int(event.error_code)]]
        case _:
            return []


def fields(headers: Any) -> list[list[str]]:
    return [[name.hex(), value.hex()] for name, value in headers]


json.dump([outcome(case) for case in json.load(sys.stdin)], sys.stdout)
