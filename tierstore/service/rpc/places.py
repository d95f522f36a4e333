"""Where gRPC is listened on: addresses in grpcio's form, and the error for one that is taken."""

from __future__ import annotations

from tierstore.errors import ConfigError


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def taken(host: str, port: int) -> ConfigError:
    """The error for a port that cannot be listened on."""
    return ConfigError(
        f"cannot listen on {host} port {port} for gRPC: it is taken, or not an address of this machine; "
        "choose another with grpc_port (--grpc-port), or go without gRPC (off)"
    )
