"""The servers that `wire_lookup` compares, each a process of its own: `python -m benchmarks.wire_servers echo|grpc-echo|core-echo|store …`.

`echo` is the limit of the transport: the service's own HTTP stack, settings and request parser, answering ready bytes.
`grpc-echo` is grpcio doing the same, `core-echo` the layer below its server. `store` is the service as it is, over a table whose rows are all in memory. They
print their ports when they answer.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvicorn

import tierstore
from benchmarks.wire_table import DIM, FEATURE, MODEL, ROW_BYTES, keys_of, vectors_of
from tierstore.config import load_settings
from tierstore.service.http.connection import BoundedHttpProtocol
from tierstore.service.http.messages import Response
from tierstore.service.tuning import tune_allocator

HEADER_LENGTH = b"inference-header-content-length"


class Echo:
    """Parses a request (its JSON, its keys as an array) and answers as many ready bytes as its rows would take."""

    def at_once(self, scope: MutableMapping[str, Any], body: bytes) -> Response:
        length = int(dict(scope["headers"])[HEADER_LENGTH])
        request = orjson.loads(memoryview(body)[:length])
        keys = np.frombuffer(body, np.uint8)[length:].copy().view(np.int64)
        assert request["inputs"][0]["shape"] == [len(keys)]
        header_bytes, ready = _ready(len(keys))
        return Response(200, [ready], b"application/octet-stream", [(HEADER_LENGTH, b"%d" % header_bytes)])

    async def __call__(self, scope: MutableMapping[str, Any], receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        await self.at_once(scope, body).send(send)


_READY: dict[int, tuple[int, bytes]] = {}


def _ready(n: int) -> tuple[int, bytes]:
    if n not in _READY:
        output = {
            "name": FEATURE,
            "datatype": "FP32",
            "shape": [n, DIM],
            "parameters": {"binary_data_size": n * ROW_BYTES},
        }
        header = orjson.dumps({"model_name": MODEL, "model_version": "1", "outputs": [output]})
        _READY[n] = len(header), header + bytes(n * ROW_BYTES)
    return _READY[n]


def serve_echo() -> None:
    tune_allocator()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            Echo(), http=BoundedHttpProtocol, loop="uvloop", ws="none", lifespan="off", log_config=None,
            access_log=False, proxy_headers=False, server_header=False,
        )  # fmt: skip
        print(listener.getsockname()[1], flush=True)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(uvicorn.Server(config).serve(sockets=[listener]))


def serve_grpc_echo(*, core: bool) -> None:
    if not core:
        os.environ.setdefault("GRPC_EXPERIMENTS", "")  # grpcio as it comes, not as the service sets it
    from benchmarks.wire_grpc import core_echo_server, echo_server

    tune_allocator()
    server, port = core_echo_server() if core else echo_server()
    print(port, flush=True)
    server.wait_for_termination()


def serve_store(where: Path, rows: int, shared_memory: bool) -> None:
    """Load `rows` rows, all of them into memory, and serve them."""
    from tierstore.service.server import serve

    budget = f"{max(64, rows * (ROW_BYTES + 16) * 2 >> 20)}MiB"
    source, data = where / "snapshot", where / "data"
    keys = keys_of(np.arange(rows))
    with tierstore.SnapshotWriter(source, model=MODEL, version=1) as writer:
        writer.table("item", dim=DIM).write(keys, vectors_of(keys))
        writer.feature(FEATURE, table="item")
        writer.warmup("item", keys)
    with tierstore.open(data, host_budget=budget) as store:
        store.load_snapshot(source)
    settings = load_settings(None, data=data, host_budget=budget, port=0, drain_s=0, allow_client_shm=shared_memory)
    logging.disable(logging.INFO)

    def announce(*places: str | None) -> None:
        print(*(place.rpartition(":")[2] for place in places if place), flush=True)

    serve(settings, announce=announce)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", choices=["echo", "grpc-echo", "core-echo", "store"])
    parser.add_argument("--where", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--shared-memory", action="store_true")
    options = parser.parse_args()
    if options.server == "echo":
        serve_echo()
    elif options.server in ("grpc-echo", "core-echo"):
        serve_grpc_echo(core=options.server == "core-echo")
    else:
        serve_store(options.where, options.rows, options.shared_memory)
    sys.exit(0)


if __name__ == "__main__":
    main()
