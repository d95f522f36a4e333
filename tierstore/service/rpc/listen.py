"""grpcio's server for a service, started where a port is set for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tierstore.service.addresses import grpc_port_in_use, host_port
from tierstore.service.context import Service

if TYPE_CHECKING:
    from tierstore.service.rpc.server import GrpcServer


def grpc_server(service: Service, host: str, port: int) -> GrpcServer:
    """A server that listens at `port`. ConfigError where another has it."""
    # grpcio's core has two ways to read connections. With the older one, the thread that waits for the next event reads
    # them itself, without threads of the core: a third less processor time a call (docs/decisions/grpc.md). The variable
    # is read when the core is first used in a process; a value that is set already stays.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
    from tierstore.service.rpc.server import GrpcServer

    try:
        return GrpcServer(service, host_port(host, port))
    except OSError as error:
        raise grpc_port_in_use(host, port) from error
