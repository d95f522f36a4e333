"""Tests of what is answered, over both transports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.wires import GrpcWire, HttpWire, Wire
from tierstore.service.server import ServerThread


@pytest.fixture(params=[HttpWire, GrpcWire])
def wire(request: pytest.FixtureRequest, server: ServerThread) -> Iterator[Wire]:
    if request.param is GrpcWire:
        pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    wire: Wire = request.param(server)
    yield wire
    wire.client.close()
