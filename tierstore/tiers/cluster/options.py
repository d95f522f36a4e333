"""The addresses of a cluster, and how to connect to it: the setting `--remote`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from tierstore.addresses import host_port
from tierstore.errors import ConfigError

PORT = 6379
USER_VARIABLE, PASSWORD_VARIABLE = "TIERSTORE_REMOTE_USER", "TIERSTORE_REMOTE_PASSWORD"
_TLS_OPTIONS = {"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"}
_EXAMPLE = "redis://host1:6379,host2:6379 (or rediss:// for TLS)"


class ServerAddress(NamedTuple):
    """The address of a server of the cluster."""

    host: str
    port: int

    def __str__(self) -> str:
        return host_port(self.host, self.port)


def port_of(value: Any) -> int:
    """The port that a server has reported. ValueError, TypeError."""
    port = int(value)
    if not 0 < port < 1 << 16:
        raise ValueError(f"expected a port of 1 to 65535, got {port}")
    return port


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The result of `parse_server_urls`: the first servers to ask, and redis-py's settings for a connection."""

    addresses: tuple[ServerAddress, ...]
    tls: bool
    credentials: dict[str, Any] = field(repr=False)  # includes the password

    def __str__(self) -> str:
        return ", ".join(map(str, self.addresses))


def parse_server_urls(urls: str, environment: Mapping[str, str] = os.environ) -> Endpoints:
    """Parse `redis://[user[:password]@]host[:port],…` or `rediss://…`, with `?ssl_ca_certs=FILE` and the like at the end.

    The scheme and the user need to be given once, before the first address. User and password may also be in the environment (TIERSTORE_REMOTE_USER,
    TIERSTORE_REMOTE_PASSWORD), which keeps them out of lists of processes. Raises ConfigError, which never shows the password.
    """
    scheme, separator, remaining = urls.strip().partition("://")
    if not separator or scheme not in ("redis", "rediss"):
        raise ConfigError(f"expected the address of a cluster, such as {_EXAMPLE}, got {hidden(urls)!r}")
    remaining, _, query = remaining.partition("?")
    addresses: list[ServerAddress] = []
    credentials: dict[str, Any] = {}
    for part in map(str.strip, remaining.split(",")):
        if "://" in part and part.partition("://")[0] != scheme:
            raise ConfigError(f"expected {scheme}:// for all addresses of a cluster, got {hidden(part)!r}")
        try:
            one = urlsplit(f"redis://{part.rpartition('://')[2]}")
            port = one.port or PORT
        except ValueError:
            raise ConfigError(f"expected host:port with a port of 1 to 65535, got {hidden(part)!r}") from None
        if not one.hostname or one.path.strip("/"):
            raise ConfigError(f"expected addresses such as {_EXAMPLE}, got {hidden(part)!r}")
        addresses.append(ServerAddress(one.hostname, port))
        if one.username:
            credentials["username"] = unquote(one.username)
        if one.password:
            credentials["password"] = unquote(one.password)
    for name, variable in (("username", USER_VARIABLE), ("password", PASSWORD_VARIABLE)):
        if name not in credentials and environment.get(variable):
            credentials[name] = environment[variable]
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in _TLS_OPTIONS or scheme != "rediss":
            raise ConfigError(
                f"expected options of TLS ({', '.join(sorted(_TLS_OPTIONS))}) after rediss://…?, got {name}"
            )
        credentials[name] = value
    return Endpoints(tuple(dict.fromkeys(addresses)), scheme == "rediss", credentials)


def hidden(url: str) -> str:
    """The address without user and password, for messages."""
    return ",".join(
        head + separator + part.rpartition("@")[2]
        for head, separator, part in (one.partition("://") if "://" in one else ("", "", one) for one in url.split(","))
    )
