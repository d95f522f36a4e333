"""What a client of HTTP/2 has got, by what the package h2 makes of it."""

from __future__ import annotations

from typing import Any

import h2.connection
import h2.events


class Answers:
    """What a client has got of each stream."""

    def __init__(self) -> None:
        self.heads: dict[int, dict[Any, Any]] = {}
        self.bodies: dict[int, bytes] = {}
        self.trailers: dict[int, dict[Any, Any]] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.goodbye: int | None = None

    def take(self, peer: h2.connection.H2Connection, data: bytes, credit: bool = True) -> None:
        for event in peer.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                self.heads[event.stream_id] = dict(event.headers)
            elif isinstance(event, h2.events.DataReceived):
                self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                if credit:
                    peer.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.TrailersReceived):
                self.trailers[event.stream_id] = dict(event.headers)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                self.resets[event.stream_id] = event.error_code
            elif isinstance(event, h2.events.ConnectionTerminated):
                self.goodbye = event.error_code
