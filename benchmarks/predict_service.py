"""For benchmarks over HTTP: a service of its own process, and clients as bare sockets, which are coroutines of one event loop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.ready import SETTINGS, wait_until_warm
from benchmarks.wire_lookup import cpu_s

MODEL = "rank"


class Served:
    """`tierstore serve` over a data directory, with settings given by environment; a context manager."""

    def __init__(self, data: Path, **settings: object) -> None:
        environment = dict(os.environ) | {"TIERSTORE_HOST_BUDGET": "64MiB", "TIERSTORE_DRAIN_S": "0"}
        environment |= {f"TIERSTORE_{name.upper()}": str(value) for name, value in (SETTINGS | settings).items()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tierstore", "serve", "--data", str(data), "--port", "0"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        found = re.search(r"http://[\d.]+:(\d+)", said)
        if found is None:
            raise SystemExit(f"the service did not say where it listens, but: {said!r}")
        self.port = int(found[1])
        self.grpc_port = 0
        if settings.get("grpc_port") is not None:
            said = self._process.stdout.readline()
            found = re.search(r":(\d+)", said)
            if found is None:
                raise SystemExit(f"the service did not say where its gRPC listens, but: {said!r}")
            self.grpc_port = int(found[1])
        wait_until_warm(self.port)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        return cpu_s(self.pid)


def predict_request(keys: np.ndarray, features: Sequence[str]) -> bytes:
    """One request for so many items, in the binary form; `keys` are those of every feature."""
    inputs = [
        {"name": f"{name}_id", "datatype": "INT64", "shape": [len(keys)], "parameters": {"binary_data_size": keys.nbytes}}
        for name in features
    ]  # fmt: skip
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = header + keys.tobytes() * len(features)
    head = (
        f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def answer(self, message: bytes) -> tuple[int, bytes, bytes]:
        """(status, head, body); a status of 0 where the connection was cut."""
        try:
            self._writer.write(message)
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: (\d+)", head, re.I)
            body = await self._reader.readexactly(int(length[1]) if length else 0)
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            return 0, b"", b""
        return int(head[9:12]), head, body

    def close(self) -> None:
        self._writer.transport.abort()


async def closed_loop(served: Served, messages: list[bytes], connections: int, seconds: float) -> float:
    """Answers a second where each connection asks again as soon as it is answered."""
    clients = [await Client.to(served.port) for _ in range(connections)]
    answers, began_s = 0, time.perf_counter()

    async def work(number: int, client: Client) -> None:
        nonlocal answers
        at = number
        while time.perf_counter() < began_s + seconds:
            status, _, _ = await client.answer(messages[at % len(messages)])
            answers += status == 200
            at += connections

    await asyncio.gather(*(work(number, client) for number, client in enumerate(clients)))
    took_s = time.perf_counter() - began_s
    for client in clients:
        client.close()
    return answers / took_s
