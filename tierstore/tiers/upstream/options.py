"""The addresses of nodes that this node asks, and how to connect to them: `--upstream` and `--peer`, token and TLS."""

from __future__ import annotations

import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

from tierstore.addresses import host_port, why_not_token
from tierstore.errors import ConfigError

_EXAMPLE = "http://a:8000,http://b:8000"


class NodeAddress(NamedTuple):
    """The address of a node."""

    host: str
    port: int
    tls: bool = False

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{host_port(self.host, self.port)}"


def parse_node_urls(urls: str, setting: str = "upstream") -> tuple[NodeAddress, ...]:
    """Parse `http://host:port,…` or `https://host:port,…` of a setting. Raises ConfigError."""
    if "@" in urls:  # the error does not show them: they may have a password
        raise ConfigError(
            f"{setting}: expected addresses such as {_EXAMPLE}, got a user or a password: give the nodes' token as "
            "upstream_token"
        )
    addresses = []
    for part in map(str.strip, urls.split(",")):
        try:
            one = urlsplit(part)
            port = one.port
        except ValueError:
            raise ConfigError(f"{setting}: expected a port of 1 to 65535, got {part!r}") from None
        tls = one.scheme == "https"
        plain = not (one.path.strip("/") or one.query or one.fragment)
        if not (tls or one.scheme == "http") or not one.hostname or not plain:
            raise ConfigError(f"{setting}: expected addresses of nodes such as {_EXAMPLE}, got {part!r}")
        addresses.append(NodeAddress(one.hostname, port or (443 if tls else 80), tls))
    return tuple(dict.fromkeys(addresses))


def check_token(addresses: tuple[NodeAddress, ...]) -> None:
    """ConfigError if a token would leave this machine unencrypted."""
    for one in addresses:
        why = why_not_token(str(one), one.host, tls=one.tls, setting="upstream_allow_insecure_token")
        if why is not None:
            raise ConfigError(f"upstream_token: {why}")


def tls_context(addresses: tuple[NodeAddress, ...], ca: str | None) -> ssl.SSLContext | None:
    """The TLS context that checks the nodes' certificates; None if no address has TLS.

    ConfigError for a file without certificate authorities.
    """
    if not any(address.tls for address in addresses):
        return None
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"upstream_ca: cannot read {ca}: {error}") from error
