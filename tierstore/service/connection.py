"""uvicorn's HTTP/1.1 protocol with a bound on a request's head, which its parser lacks.

Event loop only, an object a connection.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers go beyond HEAD_BYTES, finished or not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True

    def data_received(self, data: bytes) -> None:
        # Only while a head is open: bytes of a body do not count, and one read holds at most one read's worth too much.
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Request head too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False
        self._head_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
