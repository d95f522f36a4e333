"""The addresses a service listens on: what is allowed, how they are written, and the socket. Any thread."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from pathlib import Path

from tierstore.addresses import is_loopback
from tierstore.config import Settings
from tierstore.errors import ConfigError


def host_port(host: str, port: int) -> str:
    """`host:port`, or `[host]:port` for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_on_host(connection: socket.socket) -> bool:
    """Whether who is at the other side of `connection` is on this machine for sure. Not where that side has gone already."""
    try:
        peer = connection.getpeername()
    except OSError:
        return False
    return connection.family == socket.AF_UNIX or is_loopback(peer[0])


def is_address(host: str) -> bool:
    """Whether `host`, without port or brackets, is an IP address: no name, so that nobody can have it resolve to another one."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def bind_http(settings: Settings) -> socket.socket:
    """The socket of the HTTP port, see `bind_tcp`."""
    return bind_tcp(settings.host, settings.port)


def bind_tcp(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: until the service is up, connections are refused instead of left waiting."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        return listener
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error}; choose another host or port") from error


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
    """The socket of the listener of admin requests, bound and not listening yet; None where it has none of its own."""
    if settings.admin_listen is None:
        return None
    address = parse_listen(settings.admin_listen)
    return bind_unix(address) if isinstance(address, Path) else bind_tcp(*address)


def bind_unix(path: Path) -> socket.socket:
    """A bound socket in the file system, for this user alone; it does not listen yet. ConfigError where another process has it."""
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
    """Whether `path` is a socket that nobody listens on: one that a process has left behind."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    return True
    return False


def grpc_port_in_use(host: str, port: int) -> ConfigError:
    """The error for a gRPC port that cannot be listened on."""
    return ConfigError(
        f"cannot listen on {host} port {port} for gRPC: it is taken, or not an address of this machine; "
        "choose another with grpc_port (--grpc-port), or go without gRPC (off)"
    )


def url_of(sock: socket.socket, scheme: str) -> str:
    """Where a bound socket is asked."""
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
