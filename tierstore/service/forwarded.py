"""The client behind proxies: the address in `X-Forwarded-For`, if the proxy is trusted.

Any thread. Each proxy appends the address that called it, so the list is read from its end: while an address is a
trusted proxy's, the one before it counts. Addresses before that are the client's own claim, and are not read.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from tierstore.addresses import host_port

_HEADER = b"x-forwarded-for"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Proxies:
    """Trusted proxies, whose statement of the client is believed: those of these networks (`10.0.0.0/8`,
    `192.0.2.7`).
    """

    def __init__(self, trusted: Sequence[str] = ()) -> None:
        self._trusted = [ipaddress.ip_network(one) for one in trusted]

    def client(self, peer: tuple[str, int] | None, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """The client of a request that came from `peer`: its address, with the port if it is the peer itself."""
        if peer is None:
            return None
        host = self.host(peer[0], headers)
        return host_port(*peer) if host == peer[0] else host

    def host(self, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The client's IP address; `peer` is that of the connection."""
        address = _address(peer)
        if not self._trusted or address is None or not self._is_trusted(address):
            return peer
        named = b",".join(value for name, value in headers if name == _HEADER).decode("latin-1").split(",")
        found = peer
        for entry in reversed(named):
            address = _address(entry.strip())
            if address is None:
                break
            found = str(address)
            if not self._is_trusted(address):
                break
        return found

    def _is_trusted(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


def _address(text: str) -> Address | None:
    """Parse an address such as `192.0.2.7`, `192.0.2.7:4711`, `2001:db8::1` or `[2001:db8::1]:4711`."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
