"""Who may talk to a service that has no tokens: programs on this machine, and no web page from elsewhere.

A page in a browser on this machine can reach a loopback port too: under a name of its own that it rebinds to
127.0.0.1 (then `Host` is that name), or by a plain cross-site request (then `Origin` is the page's). Both are refused,
on every path. Runs on the event loop; keeps no state.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

from tierstore.config import Settings
from tierstore.errors import ConfigError, Forbidden
from tierstore.service.http.messages import Receive, Response, Scope, Send, error_response

_HOST_CACHE = 256


def is_loopback(host: str) -> bool:
    """Whether `host`, without port or brackets, is a loopback address or `localhost`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_listen_address(settings: Settings) -> None:
    """Raise ConfigError for an address beyond loopback, unless that is said to be meant."""
    if not settings.allow_open_network and not is_loopback(settings.host):
        raise ConfigError(
            f"host {settings.host!r} is not a loopback address, and this release has no tokens: whoever reaches the port could change models. "
            "Listen on 127.0.0.1, or set allow_open_network if the network is trusted"
        )


def host_name(value: str) -> str | None:
    """The name in a Host header (`name`, `name:port`, `[v6]`, `[v6]:port`), or None if it is malformed."""
    if value.startswith("["):
        name, bracket, port = value[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            return None
        port = port[1:]
    else:
        name, _, port = value.partition(":")
    if not name or (port and not (port.isascii() and port.isdigit())):
        return None
    return name


class DataApp(Protocol):
    """An ASGI application that may be asked for an answer at once, see `HttpFace.at_once`."""

    def at_once(self, scope: Scope, body: memoryview) -> Response | None: ...
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class Guard:
    """Wraps the application. Event loop only."""

    def __init__(self, app: DataApp, settings: Settings, allowed: Callable[[bytes], None]) -> None:
        """`allowed` is told of each value of Host that passes, once; their number is bounded."""
        self._app, self._tell = app, allowed
        self._any_host = settings.allow_open_network
        self._allowed: set[bytes] = set()  # Host values that passed; bounded

    def at_once(self, scope: Scope, body: memoryview) -> Response | None:
        return None if self._refusal(scope) is not None else self._app.at_once(scope, body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(Forbidden(refusal)).send(send)

    def _refusal(self, scope: Scope) -> str | None:
        hosts = []
        origin = None
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origin = value
        if len(hosts) != 1:
            return "expected exactly one Host header"
        if not self._any_host and hosts[0] not in self._allowed:
            name = host_name(hosts[0].decode("latin-1"))
            if name is None or not is_loopback(name):
                return f"Host {hosts[0][:80].decode('latin-1')!r} is not a loopback name: without tokens this service is for this machine alone"
            if len(self._allowed) < _HOST_CACHE:
                self._allowed.add(hosts[0])
                self._tell(hosts[0])
        if origin is not None and not self._same(origin.decode("latin-1"), hosts[0].decode("latin-1")):
            return f"Origin {origin[:80].decode('latin-1')!r} is foreign: pages of other sites may not use this service"
        return None

    @staticmethod
    def _same(origin: str, host: str) -> bool:
        try:
            name = urlsplit(origin).hostname  # None for `null`, which sandboxed pages send
        except ValueError:
            return False
        if not name:
            return False
        return is_loopback(name) or name == (host_name(host) or "").lower()
