"""Addresses of services: how they are written, which are on this machine, and where a token may be sent.

Pure functions; any thread.
"""

from __future__ import annotations

import ipaddress


def host_port(host: str, port: int) -> str:
    """`host:port`, or `[host]:port` for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether `host`, without port or brackets, is a loopback address or `localhost`."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def why_not_token(url: str, host: str, *, tls: bool, setting: str) -> str | None:
    """Why a token is not to be sent to `url` on `host`, and what to do; None where it is.

    `setting` allows it all the same.
    """
    if tls or is_loopback(host):
        return None
    return (
        f"it would cross the network in clear to {url}; use an https url, "
        f"or {setting} where something else encrypts, such as a mesh"
    )
