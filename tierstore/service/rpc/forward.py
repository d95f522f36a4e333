"""Calls that a worker process does not answer itself, handed to the owner's gRPC server and back, as bytes.

Methods of the worker's pools' threads, which wait for the owner; deadline, cancellation and the caller's own metadata
go along, status and message come back. Nothing is tried twice. The owner counts what it answers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc

from tierstore.service.rpc.pools import CallPool
from tierstore.service.rpc.types import Context, Stream, Unary

_OF_THE_TRANSPORT = ("grpc-", ":", "user-agent", "content-type", "te")
_NO_DEADLINE_S = 1e9


class Owner:
    """The owner's server at `target`, reached with messages of any length: their bounds are the owner's."""

    def __init__(self, target: str) -> None:
        unbounded = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(target, options=unbounded)
        self._lock = threading.Lock()
        self._watching: set[Context] = set()  # guarded by _lock

    def close(self) -> None:
        self._channel.close()

    def end_watches(self) -> None:
        """End the calls that watch something of the owner's. Any thread."""
        with self._lock:
            watching = list(self._watching)
        for context in watching:
            context.cancel()

    def unary(self, method: str) -> Unary:
        call = self._channel.unary_unary(method)

        def run(message: bytes, context: Context) -> bytes:
            future = call.future(message, **_options(context))
            context.add_callback(future.cancel)
            try:
                answer: bytes = future.result()
            except (grpc.RpcError, grpc.FutureCancelledError):
                context.abort(future.code(), future.details())
            return answer

        return run

    def stream(self, method: str) -> Stream:
        call = self._channel.stream_stream(method)

        def run(messages: Iterator[bytes], context: Context) -> Iterator[bytes]:
            return _answers(call(messages, **_options(context)), context)

        return run

    def watch(self, method: str, pool: CallPool) -> Any:
        """The handler of a method that answers one message with many; each call keeps a thread of `pool`."""
        call = self._channel.unary_stream(method)

        def run(message: bytes, context: Context) -> Iterator[bytes]:
            with self._lock:
                self._watching.add(context)
            try:
                yield from _answers(call(message, **_options(context)), context)
            finally:
                with self._lock:
                    self._watching.discard(context)

        run.experimental_thread_pool = pool  # type: ignore[attr-defined]
        return grpc.unary_stream_rpc_method_handler(run)


def _answers(flow: Any, context: Context) -> Iterator[bytes]:
    context.add_callback(flow.cancel)
    try:
        yield from flow
    except grpc.RpcError:
        context.abort(flow.code(), flow.details())


def _options(context: Context) -> dict[str, Any]:
    left_s = context.time_remaining()
    given = [(key, value) for key, value in context.invocation_metadata() if not key.startswith(_OF_THE_TRANSPORT)]
    return {"timeout": left_s if left_s < _NO_DEADLINE_S else None, "metadata": given}
