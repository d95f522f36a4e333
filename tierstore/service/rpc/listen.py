"""grpcio's server for a service, started where a port is set for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.service.addresses import grpc_port_in_use, host_port
from tierstore.service.context import Service

if TYPE_CHECKING:
    from tierstore.service.rpc.server import GrpcServer


def grpc_server(service: Service, host: str, port: int) -> GrpcServer:
    """A server that listens at `port`. ConfigError where another has it."""
    from tierstore.service.rpc.server import GrpcServer

    try:
        return GrpcServer(service, host_port(host, port))
    except OSError as error:
        raise grpc_port_in_use(host, port) from error
