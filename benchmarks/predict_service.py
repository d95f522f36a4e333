"""For benchmarks of predictions over HTTP: a model to rank with, a service of its own process, and clients as bare sockets.

Clients are coroutines of one event loop; what they cost is not the service's, whose processor time is read from /proc.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import tierstore
from benchmarks.ready import SETTINGS, wait_until_warm

DIM = 16
ROWS = 50_000
FEATURES = ("user", "item", "context")
MODEL = "rank"
UNSENT = -1  # in place of a status
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def ranking_model(widths: tuple[int, ...], features: Sequence[str] = FEATURES, dim: int = DIM) -> bytes:
    """Layers of these widths over the rows of all features, then a score [batch, 1]. Needs the extra `dense`."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(7)
    nodes = [helper.make_node("Concat", [f"{name}_id" for name in features], ["h0"], axis=1)]
    constants = []
    sizes = (len(features) * dim, *widths, 1)
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        weights = (rng.standard_normal((a, b)) / a**0.5).astype(np.float32)
        constants.append(numpy_helper.from_array(weights, f"w{i}"))
        last = i == len(sizes) - 2
        nodes.append(helper.make_node("MatMul", [f"h{i}", f"w{i}"], ["score" if last else f"m{i}"]))
        if not last:
            nodes.append(helper.make_node("Relu", [f"m{i}"], [f"h{i + 1}"]))
    ports = [helper.make_tensor_value_info(f"{name}_id", TensorProto.FLOAT, ["batch", dim]) for name in features]
    score = helper.make_tensor_value_info("score", TensorProto.FLOAT, ["batch", 1])
    graph = helper.make_graph(nodes, MODEL, ports, [score], constants)
    model: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    ).SerializeToString()
    return model


def load(
    data: Path,
    widths: tuple[int, ...],
    features: Sequence[str] = FEATURES,
    dim: int = DIM,
    *,
    rows: int = ROWS,
    budget: str = "64MiB",
    warm: bool = False,
) -> None:
    """A data directory with the model in it, loaded; keys from `rows` on are absent. `warm`: all rows in memory from the start."""
    rng = np.random.default_rng(8)
    snapshot = data.with_name("snapshot")
    with tierstore.SnapshotWriter(snapshot, model=MODEL, version=1) as writer:
        keys = np.arange(rows, dtype=np.int64)
        for name in features:
            writer.table(name, dim=dim).write(keys, rng.standard_normal((rows, dim), np.float32))
            if warm:
                writer.warmup(name, keys)
            writer.feature(f"{name}_id", table=name)
        writer.dense(ranking_model(widths, features, dim))
    with tierstore.open(data, host_budget=budget, load_workers=1) as store:
        store.load_snapshot(snapshot)


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
        words = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) * _TICK_S

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self._process.pid}/task").iterdir()))

    def resident_bytes(self) -> int:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self._process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) << 10


def predict_request(keys: np.ndarray, timeout_us: int | None = None, features: Sequence[str] = FEATURES) -> bytes:
    """One request for so many items, in the binary form; `keys` are those of every feature."""
    inputs = [
        {"name": f"{name}_id", "datatype": "INT64", "shape": [len(keys)], "parameters": {"binary_data_size": keys.nbytes}}
        for name in features
    ]  # fmt: skip
    parameters: dict[str, object] = {"binary_data_output": True}
    if timeout_us is not None:
        parameters["timeout"] = timeout_us
    header = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    body = header + keys.tobytes() * len(features)
    head = (
        f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass
class Outcome:
    """What came of a load: seconds of the answers by status (0: the connection was cut), and the time it took."""

    seconds: dict[int, list[float]] = field(default_factory=dict)
    whole_s: float = 0.0
    late_s: list[float] = field(default_factory=list)  # how much later than planned requests were sent
    cpu_s: float = 0.0

    def add(self, status: int, seconds: float) -> None:
        self.seconds.setdefault(status, []).append(seconds)

    def of(self, status: int) -> list[float]:
        return self.seconds.get(status, [])

    def quantile_ms(self, status: int, q: float) -> float:
        """NaN where there is none of that status."""
        of = self.of(status)
        return float(np.quantile(of, q)) * 1e3 if of else float("nan")


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, message: bytes) -> int:
        """The answer's status; 0 where the connection was cut."""
        return (await self.answer(message))[0]

    async def answer(self, message: bytes) -> tuple[int, bytes, bytes]:
        """(status, head, body)."""
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


async def closed_loop(served: Served, messages: list[bytes], connections: int, seconds: float) -> Outcome:
    """Each connection asks again as soon as it is answered."""
    clients = [await Client.to(served.port) for _ in range(connections)]
    outcome = Outcome()
    began_s, cpu_s = time.perf_counter(), served.cpu_s()
    until_s = began_s + seconds

    async def work(number: int, client: Client) -> None:
        at = number
        while (sent_s := time.perf_counter()) < until_s:
            status = await client.ask(messages[at % len(messages)])
            outcome.add(status, time.perf_counter() - sent_s)
            at += connections

    await asyncio.gather(*(work(number, client) for number, client in enumerate(clients)))
    outcome.whole_s, outcome.cpu_s = time.perf_counter() - began_s, served.cpu_s() - cpu_s
    for client in clients:
        client.close()
    return outcome


async def open_loop(served: Served, messages: list[bytes], rate: float, seconds: float, connections: int) -> Outcome:
    """Requests come at random moments, `rate` a second, whether or not those before are answered.

    `connections` bounds how many are under way; one that finds none free is not sent, and has the status UNSENT.
    `late_s` of the outcome tells whether the clients kept up with their schedule.
    """
    free = [await Client.to(served.port) for _ in range(connections)]
    due = np.cumsum(np.random.default_rng(9).exponential(1 / rate, int(rate * seconds)))
    outcome = Outcome()
    began_s, cpu_s = time.perf_counter(), served.cpu_s()
    under_way: set[asyncio.Task[None]] = set()

    async def one(client: Client, message: bytes) -> None:
        sent_s = time.perf_counter()
        status = await client.ask(message)
        outcome.add(status, time.perf_counter() - sent_s)
        free.append(client if status else await Client.to(served.port))

    for number, at in enumerate(due.tolist()):
        delay_s = began_s + at - time.perf_counter()
        outcome.late_s.append(-delay_s)
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        if not free:
            outcome.add(UNSENT, 0.0)
            continue
        task = asyncio.ensure_future(one(free.pop(), messages[number % len(messages)]))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)
    outcome.whole_s = max(time.perf_counter() - began_s, seconds)  # what is answered after it belongs to it
    outcome.cpu_s = served.cpu_s() - cpu_s
    for client in free:
        client.close()
    return outcome
