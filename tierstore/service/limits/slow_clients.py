"""How long the service waits for clients: to send, and to read. Constants, the same for HTTP and gRPC."""

from __future__ import annotations

BODY_S = 60.0  # for a large body to arrive
STALL_S = 20.0  # for an answer to be sent, in addition to its time at SLOWEST_RATE; and for a client to read none of it
PRESSED_STALL_S = 2.0  # the latter, once half of `max_inflight` is in use
SLOWEST_RATE = 64 << 10  # bytes a second
ENDING_S = 5.0  # for clients to send, or to read, what is in progress when the service ends
CHECK_S = 1.0  # how often it is looked for those that are late


def stall_s(used_bytes: int, limit_bytes: int) -> float:
    """How long a client may read nothing of its answer while so much of `max_inflight` is in use."""
    return PRESSED_STALL_S if 2 * used_bytes > limit_bytes else STALL_S
