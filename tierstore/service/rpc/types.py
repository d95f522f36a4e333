"""What a method of the gRPC server is. Types alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

Context: TypeAlias = Any  # grpc.ServicerContext; grpcio has no types to check
Unary: TypeAlias = Callable[[bytes, Context], bytes]
Stream: TypeAlias = Callable[[Iterator[bytes], Context], Iterator[bytes]]
