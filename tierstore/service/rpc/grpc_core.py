"""The layer below grpcio's server, on which its own Python is written: all that is used of it, in one place.

grpcio's server reads events off one completion queue, on one thread, and calls the tag of each event that is not its own.
So calls of methods that are registered with the core, and requested with tags of ours, come to us on that thread, together
with those that its server answers. None of this is grpcio's public interface: where a release does not have it, `core_of`
returns None, and calls go through grpcio's own server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc
from grpc._cython import cygrpc

# The result of a tag: what the server need not wait for any more when it ends, and what grpcio is to call.
Outcome: TypeAlias = tuple[Any, Sequence[Callable[[], None]]]
Tag: TypeAlias = Callable[[Any], Outcome]
GOES_ON: Outcome = (None, ())
_NO_FLAGS = 0
_PARTS = ("server", "completion_queue", "lock", "rpc_states")
_USED = (
    "auth_context",
    "ReceiveCloseOnServerOperation",
    "ReceiveMessageOperation",
    "SendInitialMetadataOperation",
    "SendMessageOperation",
    "SendStatusFromServerOperation",
)


def core_of(server: grpc.Server) -> Core | None:
    """The layer below `server`, before it is started; None where grpcio lacks what is needed."""
    state: Any = getattr(server, "_state", None)
    supported = all(hasattr(state, name) for name in _PARTS) and all(hasattr(cygrpc, name) for name in _USED)
    if not supported or not all(hasattr(state.server, name) for name in ("register_method", "request_registered_call")):
        return None
    return Core(state)


class Core:
    """The core of a server. `register` before it starts; `request` afterwards, on any thread."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def register(self, path: str) -> None:
        """Have calls of a method come to `request`."""
        self._state.server.register_method(path)

    def request(self, path: str, tag: Tag) -> None:
        """Have `tag` called with the next call of a registered method, or when the server ends before one comes.

        A server that ends waits until a tag has returned the same `tag`.
        """
        state = self._state
        with state.lock:  # the server begins to end with this lock held
            try:
                state.server.request_registered_call(state.completion_queue, state.completion_queue, path, tag)
            except ValueError:  # it ends
                return
            state.rpc_states.add(tag)


def auth_context(call: Any) -> dict[str, Sequence[bytes]]:
    """What TLS says of the client of a call."""
    return {name.decode(): values for name, values in (cygrpc.auth_context(call) or {}).items()}


def receive_message() -> Any:
    return cygrpc.ReceiveMessageOperation(_NO_FLAGS)


def receive_close() -> Any:
    """Completes when the call has ended for both sides, or was cancelled."""
    return cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS)


def send(code: Any, details: str, message: bytes | None, trailing: tuple[tuple[str, str], ...] = ()) -> list[Any]:
    """All of an answer; `trailing` is metadata."""
    operations = [
        cygrpc.SendInitialMetadataOperation(None, _NO_FLAGS),
        cygrpc.SendStatusFromServerOperation(trailing, code.value[0], details.encode(errors="replace"), _NO_FLAGS),
    ]
    if message is not None:
        operations.append(cygrpc.SendMessageOperation(message, _NO_FLAGS))
    return operations
