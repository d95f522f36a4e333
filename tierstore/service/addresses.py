"""The addresses that a service listens on: which are allowed, how they are written, and the sockets. Any thread."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from tierstore.addresses import host_port, is_loopback
from tierstore.config import Settings
from tierstore.errors import ConfigError


def peer_of(connection: socket.socket) -> tuple[str, int] | None:
    """The address and port of the other end; None if it has none, as over a unix socket, or has gone."""
    try:
        name = connection.getpeername()
    except OSError:
        return None
    return (name[0], name[1]) if isinstance(name, tuple) else None


def is_on_host(connection: socket.socket) -> bool:
    """Whether the other end of `connection` is surely on this machine. False if it has gone already."""
    if connection.family == socket.AF_UNIX:
        return True
    peer = peer_of(connection)
    return peer is not None and is_loopback(peer[0])


class Ports:
    """The sockets of a service, bound and not listening yet: until it runs, connections are refused instead of waiting.

    `grpc` is that of the gRPC port, `admin` that of the admin listener, if it is separate. ConfigError if one of them
    cannot be used. A context manager, which closes them.
    """

    def __init__(self, settings: Settings) -> None:
        with contextlib.ExitStack() as bound:
            self.http = bound.enter_context(bind_tcp(settings.host, settings.port))
            self.grpc: socket.socket | None = None
            if isinstance(settings.grpc_port, int):
                self.grpc = bound.enter_context(bind_tcp(settings.host, settings.grpc_port, for_grpc=True))
            self.admin = bind_admin(settings)
            if self.admin is not None:
                bound.enter_context(self.admin)
            self._bound = bound.pop_all()

    @property
    def all(self) -> list[socket.socket]:
        """The listeners, HTTP's first."""
        return [sock for sock in (self.http, self.grpc, self.admin) if sock is not None]

    def close(self) -> None:
        """Close the sockets. May be called twice."""
        self._bound.close()

    def __enter__(self) -> Ports:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# a client whose machine is gone is noticed within this time, if the connection is silent
_SILENT_S, _PROBE_S, _PROBES = 30, 10, 2


def bind_tcp(host: str, port: int, *, for_grpc: bool = False) -> socket.socket:
    """A bound socket that does not listen yet. ConfigError if it cannot be bound."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # its connections inherit this
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        listener.bind((host, port))
        return listener
    except OSError as error:
        listener.close()
        what, otherwise = f"{host} port {port}", "another host or port"
        if for_grpc:
            what, otherwise = f"{what} for gRPC", "another with grpc_port (--grpc-port), or go without that port (off)"
        raise ConfigError(f"cannot listen on {what}: {error}; choose {otherwise}") from error


def parse_listen(text: str) -> Path | tuple[str, int]:
    """The path of `unix:PATH`, or the host and the port of `HOST:PORT`. ConfigError for anything else."""
    scheme, _, path = text.partition(":")
    if scheme == "unix" and path:
        return Path(path)
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"admin_listen: expected HOST:PORT, such as 127.0.0.1:9000, or unix:PATH, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def bind_admin(settings: Settings) -> socket.socket | None:
    """The socket of the admin listener, bound and not listening yet; None if it is not separate."""
    if settings.admin_listen is None:
        return None
    address = parse_listen(settings.admin_listen)
    return bind_unix(address) if isinstance(address, Path) else bind_tcp(*address)


def bind_unix(path: Path) -> socket.socket:
    """A bound socket in the file system, for this user alone, that does not listen yet. ConfigError if another
    process has it.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_unused_socket(path):
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)  # nobody can connect before it listens
        return listener
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on unix:{path}: {error}; choose another path") from error


def _is_unused_socket(path: Path) -> bool:
    """Whether `path` is a socket that nobody listens on, left behind by a process."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    return True
    return False


def url_of(sock: socket.socket, scheme: str) -> str:
    """The URL of a bound socket."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    return f"{scheme}://{host_port(*sock.getsockname()[:2])}"


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
