"""The limit of open HTTP connections, and the answer to connections beyond it.

The first request of a connection beyond the limit is refused in the form of its protocol, and the connection is closed
then. There are few such connections at a time; further ones are closed at once. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client.core import Metric

from tierstore.errors import Overloaded
from tierstore.service.context import Service
from tierstore.service.families import counter, gauge
from tierstore.service.http.messages import CLOSE, Response, Scope, error_for_path
from tierstore.service.http.middleware import RequestLogging
from tierstore.service.limits.silent import Silent

REFUSED_AT_ONCE = 256  # at most, and a quarter of those served: if few files may be open, others need them
FEW_REFUSED = 16
_ON_THEIR_WAY = 64  # connections beyond the limit, whose place another is about to leave


class ConnectionRefusal:
    """Answers requests of connections beyond a limit."""

    def __init__(self, service: Service, limit: int) -> None:
        self._service, self.limit = service, limit
        self._log = RequestLogging(service.request_log, service.proxies)

    def answer(self, scope: Scope) -> Response:
        error = Overloaded(
            f"{self.limit} connections are open, as many as there may be; use one for many requests, and try again in "
            "a second"
        )
        path: str = scope["path"]
        protocol = "oip_http" if path.startswith("/v2") else "tfs_http" if path.startswith("/v1") else "admin"
        self._service.request_times.add(protocol, "overloaded", 0.0)
        response = error_for_path(path, error)
        response.headers.append(CLOSE)
        self._log.note(scope, response)
        return response


class Served(Protocol):
    """Counts the connections of reactors, those on their way to them, and refused ones."""

    @property
    def open(self) -> int: ...
    @property
    def refused(self) -> int: ...
    def count_other(self, connections: int) -> None: ...
    def count_refused(self, connections: int) -> None: ...
    def make_room(self) -> bool: ...


class PlainCounts:
    """Counts connections that no reactor ever gets."""

    def __init__(self) -> None:
        self.open = self.refused = 0

    def count_other(self, connections: int) -> None:
        self.open += connections

    def count_refused(self, connections: int) -> None:
        self.refused += connections

    def make_room(self) -> bool:
        return False


class ConnectionLimit:
    """Counts the connections of a listener and of reactors, and decides about each new one.

    `silent`: what ends a silent connection, for those that Python has. `name`: of its metrics.
    """

    def __init__(self, service: Service, limit: int, served: Served, name: str = "connections") -> None:
        self._service, self.limit, self._served, self._name = service, limit, served, name
        self.made_room = 0  # silent connections that were ended for others
        self.refusal = ConnectionRefusal(service, limit)
        self.silent: Silent[Callable[[], object]] = Silent()

    @property
    def open(self) -> int:
        return self._served.open

    @property
    def refused(self) -> int:
        """Connections that are being refused."""
        return self._served.refused

    @property
    def most_refused(self) -> int:
        """The most connections in refusal at a time."""
        return min(REFUSED_AT_ONCE, max(FEW_REFUSED, self.limit // 4))

    def admit(self) -> bool:
        """Count a connection that Python has now. False, and not counted, if the limit is reached."""
        if self.open >= self.limit:
            return False
        self._served.count_other(1)
        return True

    def make_room(self) -> bool:
        """End a silent connection, and count another one, that Python has, in its place. False, with nothing counted,
        if there is none.
        """
        few = self.open < self.limit + min(self.limit, _ON_THEIR_WAY)
        if few and (end := self.silent.pop()) is not None:
            end()
            self._served.count_other(1)
        elif not self._served.make_room():
            return False
        self.made_room += 1
        return True

    def refuse(self) -> bool:
        """Count a connection to be refused in words. False: close it at once."""
        self._service.shed.count("connections")
        if self.refused >= self.most_refused:
            return False
        self._served.count_refused(1)
        return True

    def release(self, *, refused: bool) -> None:
        """Note that a counted connection has ended before it was a reactor's."""
        if refused:
            self._served.count_refused(-1)
        else:
            self._served.count_other(-1)

    def families(self) -> Iterator[Metric]:
        """The metrics of this part, for Prometheus."""
        what = self._name.replace("_", " ")
        yield gauge(f"tierstore_{self._name}", f"HTTP {what} that are open.", self.open)
        text = f"Silent {what} that were closed to make room for others."
        yield counter(f"tierstore_{self._name}_made_room", text, self.made_room)
        yield gauge(f"tierstore_{self._name}_limit", f"HTTP {what} that may be open.", self.limit)
