"""A stream of HTTP/2 that goes nowhere: it keeps what is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class SomeStream:
    """In place of `reactor.streams.Stream`. `sent` has the headers, the data and the trailers."""

    def __init__(self, path: bytes = b"/", headers: Sequence[tuple[bytes, bytes]] = (), reason: int = 0) -> None:
        self.method, self.path, self.authority, self.headers = b"POST", path, b"localhost", list(headers)
        self.arrived_ns, self.timeout_ms, self.reason, self.peer_names = 0, 0, reason, ()
        self.client: tuple[str, int] | None = ("192.0.2.7", 4711)
        self.lost = self.too_large = False
        self.error: BaseException | None = None
        self.sent: list[Any] = []
        self.taken = 0

    def is_lost(self) -> bool:
        return self.lost

    def consumed(self, nbytes: int) -> None:
        self.taken += nbytes

    def respond(
        self, status: int, headers: Any, chunks: Any = (), trailers: Any = None, sent: Callable[[], None] | None = None
    ) -> None:
        self.sent += [dict(headers), b"".join(chunks), None if trailers is None else dict(trailers)]
        if sent is not None:
            sent()

    def send_headers(self, status: int, headers: Any) -> None:
        self.sent.append(dict(headers))

    def send_data(self, data: bytes, sent: Callable[[], None] | None = None) -> None:
        self.sent.append(data)
        if sent is not None:
            sent()

    def end(self, trailers: Any = ()) -> None:
        self.sent.append(dict(trailers))

    def reset(self, code: int = 8) -> None:
        self.sent.append(code)
