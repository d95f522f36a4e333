"""What of others is installed, for tests that need it."""

from __future__ import annotations

from importlib.util import find_spec


def has_grpc() -> bool:
    """Whether there is a client of gRPC."""
    return all(find_spec(name) is not None for name in ("grpc", "grpc_health", "grpc_reflection"))
