"""Where gRPC is listened on: one port, or with worker processes a port that they share, and the owner's own place.

Made and closed by the process that has the store. The owner keeps the port for its workers with a socket that is bound
and does not listen, so connections go to them alone; each of them listens on the port for itself (SO_REUSEPORT), so
one that dies takes no other's connections with it. What the workers hand on goes over a Unix socket without a file
(Linux's abstract names), of which nothing is left behind.
"""

from __future__ import annotations

import os
import secrets
import socket

from tierstore.errors import ConfigError


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def taken(host: str, port: int) -> ConfigError:
    """The error for a port that cannot be listened on."""
    return ConfigError(
        f"cannot listen on {host} port {port} for gRPC: it is taken, or not an address of this machine; "
        "choose another with grpc_port (--grpc-port), or go without gRPC (off)"
    )


class SharedPort:
    """`port` is kept until `close`; the owner listens at `owner`."""

    def __init__(self, host: str, port: int) -> None:
        """ConfigError where the port cannot be listened on, by another service's workers too."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._kept = socket.socket(family, socket.SOCK_STREAM)
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                if port == 0:
                    port = probe.getsockname()[1]
            self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._kept.bind((host, port))
        except OSError as error:
            self._kept.close()
            raise taken(host, port) from error
        self.port: int = self._kept.getsockname()[1]
        self.address = address_of(host, self.port)
        self.owner = f"unix-abstract:tierstore-{os.getpid()}-{secrets.token_hex(8)}"

    def close(self) -> None:
        self._kept.close()
