"""Time limits for clients that send or read slowly. Constants, the same for HTTP and gRPC."""

from __future__ import annotations

HANDSHAKE_S = 10.0  # for a client to begin TLS
TURN_OFF_S = 5.0  # for the request of a connection beyond the limit to arrive
BODY_S = 60.0  # for a large body to arrive
STALL_S = 20.0  # for an answer to be sent, in addition to its time at SLOWEST_RATE; and for a client to read none of it
PRESSED_STALL_S = 2.0  # the latter, once half of `max_inflight` is in use
SLOWEST_RATE = 64 << 10  # bytes a second
LINGER_BYTES = 64 << 20  # that a client may send behind its last answer; they are dropped
BACKLOG = 1024  # connections that wait to be accepted
FINISH_S = 30  # for requests in progress when the service ends
ENDING_S = 5.0  # for clients to send, or to read, what is in progress when the service ends
