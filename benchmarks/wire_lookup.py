"""Look-ups over the wire: what a request costs the server, beside the transport's own limit and beside Redis.

    python -m benchmarks.wire_lookup [--quick] [--rows 1_000_000] [--json FILE]

Servers run as processes of their own on loopback: the service over rows that are all in memory ("http", and with one
reactor thread "http 1"), the same service whose reactors answer ready bytes ("echo"), and `redis-server` answering a
pipelined MGET of the same keys. They take turns, a round each, so that whatever else the machine does meets all of them
alike; figures are medians over the rounds, ratios medians of each round's ratio. "take" is no server: the CPU that
`numpy.take` needs in this process to gather as many rows of a table as large, into as many buffers in turn, as the floor
under any look-up. CPU is the server process's own clock. The client is one thread which sends on all connections and
then reads them all; it decodes nothing but the first answer, which it checks.

Then, apart: what one connection sees of "http" and of "echo", request by request (p50, p99); and rows that are not in memory, over HTTP and in
process, from the same files. For gRPC see `wire_grpc`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.ready import wait_for_reactors, wait_until_warm
from benchmarks.report import headline
from benchmarks.wire_table import DIM, FEATURE, MODEL, ROW_BYTES, keys_of, vectors_of

VARIANTS = 16  # requests with different keys, sent in turn
CONNECTIONS = (1, 8)
START_S = 300.0
Frame = tuple[bytes, int, Callable[[], None]]  # what is sent, how many bytes come back, what the client does before


def cpu_s(pid: int) -> float:
    """CPU time of another process: Linux gives every process a clock of its own (`clock_getcpuclockid`)."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def nothing() -> None:
    """What most clients do before they send."""


def read_exactly(connection: socket.socket, into: memoryview) -> None:
    got = 0
    while got < len(into):
        count = connection.recv_into(into[got:])
        if not count:
            raise ConnectionError("the server closed the connection")
        got += count


# --- frames


def http_frame(header: dict[str, object], tail: bytes = b"") -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    length = f"Inference-Header-Content-Length: {len(text)}\r\n" if tail else ""
    head = (
        f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(text) + len(tail)}\r\n{length}\r\n"
    )
    return head.encode() + text + tail


def http_request(keys: np.ndarray) -> bytes:
    given = {
        "name": FEATURE,
        "datatype": "INT64",
        "shape": [len(keys)],
        "parameters": {"binary_data_size": keys.nbytes},
    }
    wanted = {"name": FEATURE, "parameters": {"binary_data": True}}
    return http_frame({"inputs": [given], "outputs": [wanted]}, keys.tobytes())


def read_http(connection: socket.socket) -> tuple[bytes, bytes]:
    """One answer of unknown size: its head and its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(lines[b"content-length"]):
        body += connection.recv(1 << 20)
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{head!r}: {body[:300]!r}")
    return head, body


def mget(keys: np.ndarray) -> bytes:
    return b"*%d\r\n$4\r\nMGET\r\n" % (len(keys) + 1) + b"".join(b"$8\r\n%b\r\n" % key.tobytes() for key in keys)


# --- servers


class Server:
    """A process, its port, and what to send it. `frames` is called once a size and gives a frame a variant."""

    def __init__(self, name: str, pid: int, port: int, frames: Callable[[int, list[np.ndarray]], list[Frame]]) -> None:
        self.name, self.pid, self.port, self._make = name, pid, port, frames
        self._frames: dict[tuple[int, int], list[Frame]] = {}

    def frames(self, connection: int, batches: list[np.ndarray]) -> list[Frame]:
        """The frames for one connection; `batches` are always the same for a size."""
        at = (connection, len(batches[0]))
        if at not in self._frames:
            self._frames[at] = self._make(connection, batches)
        return self._frames[at]


@contextmanager
def child(*command: str) -> Iterator[tuple[int, list[int]]]:
    """(process id, ports) of a server that prints its ports."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(command)} did not start")
        yield process.pid, [int(port) for port in line.split()]
    finally:
        process.terminate()
        process.wait(60)


def over_http(port: int, *, checked: bool) -> Callable[[int, list[np.ndarray]], list[Frame]]:
    def frames(_: int, batches: list[np.ndarray]) -> list[Frame]:
        made = []
        with connect(port) as connection:
            for keys in batches:
                request = http_request(keys)
                connection.sendall(request)
                head, body = read_http(connection)
                if checked:
                    rows = np.frombuffer(body[-len(keys) * ROW_BYTES :], np.float32).reshape(-1, DIM)
                    np.testing.assert_array_equal(rows, vectors_of(keys))
                made.append((request, len(head) + 4 + len(body), nothing))
        return made

    return frames


class Regions:
    """Keys and answers of one connection in shared memory, registered with the service."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._paths: list[Path] = []

    def close(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)

    def frames(self, connection: int, batches: list[np.ndarray]) -> list[Frame]:
        """A region a connection: its keys, which the client writes before it sends, and its rows."""
        n = len(batches[0])
        size = n * (8 + ROW_BYTES)
        name = f"wire-{os.getpid()}-{connection}-{n}"
        path = Path("/dev/shm") / name
        self._paths.append(path)
        with open(path, "w+b") as file:
            file.truncate(size)
            memory = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        places = {"keys": (0, n * 8), "rows": (n * 8, n * ROW_BYTES)}
        at = {
            what: {"shared_memory_region": name, "shared_memory_offset": offset, "shared_memory_byte_size": nbytes}
            for what, (offset, nbytes) in places.items()
        }
        given = {"name": FEATURE, "datatype": "INT64", "shape": [n], "parameters": at["keys"]}
        request = http_frame({"inputs": [given], "outputs": [{"name": FEATURE, "parameters": at["rows"]}]})
        made = []
        with connect(self._port) as link:
            register = json.dumps({"key": name, "offset": 0, "byte_size": size}).encode()
            head = (
                f"POST /v2/systemsharedmemory/region/{name}/register HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Length: {len(register)}\r\n\r\n"
            )
            link.sendall(head.encode() + register)
            read_http(link)
            for keys in batches:
                write = functools.partial(np.copyto, memory[: n * 8].view(np.int64), keys)
                write()
                link.sendall(request)
                answer, body = read_http(link)
                np.testing.assert_array_equal(memory[n * 8 :].view(np.float32).reshape(-1, DIM), vectors_of(keys))
                made.append((request, len(answer) + 4 + len(body), write))
        return made


@contextmanager
def redis(rows: int) -> Iterator[Server]:
    """A Redis that holds the same rows under the keys' eight bytes, and keeps nothing on disk."""
    program = shutil.which("redis-server")
    assert program is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                connection = connect(port)
                break
            except OSError:
                if time.monotonic() > until or process.poll() is not None:
                    raise
                time.sleep(0.05)
        with connection:
            for first in range(0, rows, 10_000):
                keys = keys_of(np.arange(first, min(rows, first + 10_000)))
                values = vectors_of(keys)
                connection.sendall(
                    b"*%d\r\n$4\r\nMSET\r\n" % (2 * len(keys) + 1)
                    + b"".join(
                        b"$8\r\n%b\r\n$%d\r\n%b\r\n" % (key.tobytes(), ROW_BYTES, value.tobytes())
                        for key, value in zip(keys, values, strict=True)
                    )
                )
                answer = bytearray(5)
                read_exactly(connection, memoryview(answer))
                assert answer == b"+OK\r\n"

        def frames(_: int, batches: list[np.ndarray]) -> list[Frame]:
            made = []
            with connect(port) as connection:
                for keys in batches:
                    wanted = b"*%d\r\n" % len(keys) + b"".join(
                        b"$%d\r\n%b\r\n" % (ROW_BYTES, row.tobytes()) for row in vectors_of(keys)
                    )
                    connection.sendall(mget(keys))
                    answer = bytearray(len(wanted))
                    read_exactly(connection, memoryview(answer))
                    assert answer == wanted
                    made.append((mget(keys), len(wanted), nothing))
            return made

        yield Server("redis", process.pid, port, frames)
    finally:
        process.terminate()
        process.wait(60)


# --- measuring


def turn(server: Server, batches: list[np.ndarray], connections: int, requests: int) -> tuple[float, float]:
    """(CPU µs of the server, µs of wall time) a request."""
    frames = [server.frames(i, batches) for i in range(connections)]
    space = memoryview(bytearray(max(size for mine in frames for _, size, _ in mine)))
    with ExitStack() as stack:
        links = [stack.enter_context(connect(server.port)) for _ in range(connections)]
        rounds = max(1, requests // connections)
        for i in range(-2, rounds):  # two to warm up
            if i == 0:
                cpu, began = cpu_s(server.pid), time.perf_counter()
            for link, mine in zip(links, frames, strict=True):
                request, _, prepare = mine[i % len(mine)]
                prepare()
                link.sendall(request)
            for link, mine in zip(links, frames, strict=True):
                read_exactly(link, space[: mine[i % len(mine)][1]])
        elapsed, used = time.perf_counter() - began, cpu_s(server.pid) - cpu
    total = rounds * connections
    return used / total * 1e6, elapsed / total * 1e6


class Gather:
    """`numpy.take` of random rows of a table in this process."""

    def __init__(self, rows: int) -> None:
        self._table = vectors_of(keys_of(np.arange(rows)))
        self._rng = np.random.default_rng(3)

    def turn(self, n: int, connections: int, requests: int) -> float:
        """CPU µs a gather of `n` rows."""
        wanted = [self._rng.integers(0, len(self._table), n) for _ in range(VARIANTS)]
        outs = [np.empty((n, DIM), np.float32) for _ in range(connections)]
        began = time.thread_time()
        for i in range(requests):
            np.take(self._table, wanted[i % VARIANTS], axis=0, out=outs[i % connections], mode="clip")
        return (time.thread_time() - began) / requests * 1e6


REDIS = {64: 2.5, 1024: 20.0, 4096: 30.0}  # at least so many times our CPU


def headlines(document: dict[str, object]) -> list[dict[str, object]]:
    """The figures that have a mark."""
    made = []
    for row in document["results"]:  # type: ignore[attr-defined]
        name = f"look-up over HTTP, {row['keys']:,} keys, {row['connections']} connections, server CPU"
        if row["server"] == "redis":
            made.append(headline(name, "Redis MGET over ours", row["cpu_over_http"], at_least=REDIS.get(row["keys"])))
        elif row["server"] == "http" and row["keys"] == 4096:
            made.append(headline(name, "echo plus numpy.take", row["cpu_over_echo_and_take"], at_most=1.3))
        elif row["server"] == "http 1" and row["connections"] > 1:
            made.append(headline(name, "one reactor thread over two", row["cpu_over_http"], at_least=0.9))
    made += [
        headline("p99 of 64 keys, one connection", "p50", row["ratio"], at_most=3)
        for row in document["latency"]  # type: ignore[attr-defined]
        if row["keys"] == 64 and row["server"] == "http"
    ]
    made += [
        headline(
            f"{row['keys']:,} cold keys over HTTP, keys a CPU second", "in process", row["cpu_ratio"], at_least=0.9
        )
        for row in document["cold"]  # type: ignore[attr-defined]
    ]
    return made


def latency(ports: dict[str, int], rows: int, n: int, rounds: int, requests: int) -> list[dict[str, object]]:
    """What one connection sees of each server, in turns: µs from the request's first byte to the answer's last."""
    rng = np.random.default_rng(4)
    batches = [keys_of(rng.integers(0, rows, n)) for _ in range(VARIANTS)]
    frames = {name: over_http(port, checked=name != "echo")(0, batches) for name, port in ports.items()}
    took: dict[str, list[float]] = {name: [] for name in ports}
    for _ in range(rounds):
        for name, port in ports.items():
            space = memoryview(bytearray(frames[name][0][1]))
            with connect(port) as link:
                for i in range(-50, requests):
                    request, size, _ = frames[name][i % VARIANTS]
                    began = time.perf_counter()
                    link.sendall(request)
                    read_exactly(link, space[:size])
                    if i >= 0:
                        took[name].append(time.perf_counter() - began)
    results: list[dict[str, object]] = []
    for name, seconds in took.items():
        p50, p99 = np.percentile(np.array(seconds) * 1e6, (50, 99))
        results.append({"keys": n, "server": name, "p50_us": float(p50), "p99_us": float(p99), "ratio": p99 / p50})
        print("| {keys:,} | {server} | {p50_us:.0f} | {p99_us:.0f} | {ratio:.1f} |".format(**results[-1]), flush=True)
    return results


def cold(pid: int, port: int, data: Path, rows: int, n: int, rounds: int, requests: int) -> dict[str, object]:
    """Rows that are read from files, over HTTP and in process: requests a second of two callers, and the CPU of one.

    The store in process is over a copy of the service's data, so that both read files of the same kind. Over HTTP the
    clients take the same processors; CPU is the server's alone.
    """
    rng = np.random.default_rng(5)
    batches = [keys_of(rng.integers(0, rows, n)) for _ in range(requests)]
    with tierstore.open(data, host_budget="1MiB") as store:
        model = store.model(MODEL)

        def in_process(mine: list[np.ndarray]) -> None:
            for keys in mine:
                model.lookup(FEATURE, keys)

        def over_wire(mine: list[np.ndarray]) -> None:
            with connect(port) as link:
                space, size = memoryview(bytearray(n * ROW_BYTES + 4096)), 0
                for keys in mine:
                    link.sendall(http_request(keys))
                    if size:
                        read_exactly(link, space[:size])
                        continue
                    head, body = read_http(link)
                    rows = np.frombuffer(body[-n * ROW_BYTES :], np.float32).reshape(-1, DIM)
                    np.testing.assert_array_equal(rows, vectors_of(keys))
                    size = len(head) + 4 + len(body)

        clocks = {in_process: time.process_time, over_wire: lambda: cpu_s(pid)}
        rates: dict[object, list[float]] = {way: [] for way in clocks}
        used: dict[object, list[float]] = {way: [] for way in clocks}
        for _ in range(rounds):
            for way, clock in clocks.items():
                with ThreadPoolExecutor(2) as callers:
                    began, before = time.perf_counter(), clock()
                    list(callers.map(way, (batches[::2], batches[1::2])))
                    rates[way].append(requests / (time.perf_counter() - began))
                    used[way].append((clock() - before) / requests * 1e6)
    result = {
        "keys": n,
        "in_process": statistics.median(rates[in_process]),
        "over_http": statistics.median(rates[over_wire]),
        "ratio": statistics.median(a / b for a, b in zip(rates[over_wire], rates[in_process], strict=True)),
        "in_process_cpu_us": statistics.median(used[in_process]),
        "over_http_cpu_us": statistics.median(used[over_wire]),
        "cpu_ratio": statistics.median(a / b for a, b in zip(used[in_process], used[over_wire], strict=True)),
    }
    print(
        "| {keys:,} | {in_process:.0f} | {over_http:.0f} | {ratio:.2f} | {in_process_cpu_us:.0f} | {over_http_cpu_us:.0f} | {cpu_ratio:.2f} |".format(
            **result
        ),
        flush=True,
    )
    return result


def measure(servers: list[Server], rows: int, sizes: list[int], rounds: int, requests: int) -> list[dict[str, object]]:
    rng = np.random.default_rng(1)
    results: list[dict[str, object]] = []
    gather = Gather(rows)
    for n in sizes:
        batches = [keys_of(rng.integers(0, rows, n)) for _ in range(VARIANTS)]
        for connections in CONNECTIONS:
            cpu: dict[str, list[float]] = {server.name: [] for server in servers}
            wall: dict[str, list[float]] = {server.name: [] for server in servers}
            take: list[float] = []
            for _ in range(rounds):
                take.append(gather.turn(n, connections, requests))
                for server in servers:
                    used, elapsed = turn(server, batches, connections, requests)
                    cpu[server.name].append(used)
                    wall[server.name].append(elapsed)
            for server in servers:
                name = server.name
                assert len(cpu[name]) == rounds
                results.append(
                    {
                        "keys": n,
                        "connections": connections,
                        "server": name,
                        "cpu_us": statistics.median(cpu[name]),
                        "wall_us": statistics.median(wall[name]),
                        "cpu_over_echo": statistics.median(a / b for a, b in zip(cpu[name], cpu["echo"], strict=True)),
                        "take_us": statistics.median(take),
                        "cpu_over_echo_and_take": statistics.median(
                            a / (b + c) for a, b, c in zip(cpu[name], cpu["echo"], take, strict=True)
                        ),
                        "cpu_over_http": statistics.median(a / b for a, b in zip(cpu[name], cpu["http"], strict=True)),
                        "wall_over_http": statistics.median(
                            a / b for a, b in zip(wall[name], wall["http"], strict=True)
                        ),
                    }
                )
                print(
                    "| {keys:,} | {connections} | {server} | {cpu_us:.0f} | {cpu_over_echo:.2f} | {take_us:.0f} | {cpu_over_echo_and_take:.2f} | {cpu_over_http:.2f} "
                    "| {wall_us:.0f} | {wall_over_http:.2f} |".format(**results[-1]),
                    flush=True,
                )
    return results


def with_tritonclient(port: int, rows: int, n: int, rounds: int, calls: int) -> dict[str, object]:
    """What an unchanged client sees, one request at a time: µs from keys to rows as an array, over HTTP and over regions."""
    import tritonclient.http as triton
    import tritonclient.utils.shared_memory as shm

    rng = np.random.default_rng(2)
    batches = [keys_of(rng.integers(0, rows, n)) for _ in range(VARIANTS)]
    name = f"client-{os.getpid()}-{n}"
    region = shm.create_shared_memory_region(name, f"/{name}", n * (8 + ROW_BYTES))
    try:
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.register_system_shared_memory(name, f"/{name}", n * (8 + ROW_BYTES))

            def over_http(keys: np.ndarray) -> np.ndarray:
                given = triton.InferInput(FEATURE, [n], "INT64")
                given.set_data_from_numpy(keys)
                return client.infer(MODEL, [given], outputs=[triton.InferRequestedOutput(FEATURE)]).as_numpy(FEATURE)

            def over_regions(keys: np.ndarray) -> np.ndarray:
                shm.set_shared_memory_region(region, [keys])
                given, output = triton.InferInput(FEATURE, [n], "INT64"), triton.InferRequestedOutput(FEATURE)
                given.set_shared_memory(name, n * 8)
                output.set_shared_memory(name, n * ROW_BYTES, n * 8)
                client.infer(MODEL, [given], outputs=[output])
                return shm.get_contents_as_numpy(region, np.float32, (n, DIM), n * 8)

            spent: dict[str, list[float]] = {"http": [], "shared memory": []}
            for _ in range(rounds):
                for way, call in (("http", over_http), ("shared memory", over_regions)):
                    np.testing.assert_array_equal(call(batches[0]), vectors_of(batches[0]))
                    began = time.perf_counter()
                    for i in range(calls):
                        call(batches[i % VARIANTS])
                    spent[way].append((time.perf_counter() - began) / calls * 1e6)
            client.unregister_system_shared_memory(name)
    finally:
        shm.destroy_shared_memory_region(region)
    ratio = statistics.median(a / b for a, b in zip(spent["http"], spent["shared memory"], strict=True))
    result = {
        "keys": n,
        "http_us": statistics.median(spent["http"]),
        "shared_memory_us": statistics.median(spent["shared memory"]),
        "ratio": ratio,
    }
    print("| {keys:,} | {http_us:.0f} | {shared_memory_us:.0f} | {ratio:.2f} |".format(**result), flush=True)
    return result


def main() -> None:
    options = parser_of(
        __file__, __doc__, "quick", rows=0, keys=[64, 1024, 4096], no_shared_memory=False, no_redis=False
    ).parse_args()
    rows = options.rows or (200_000 if options.quick else 1_000_000)
    rounds, requests = (5, 320) if options.quick else (15, 800)
    python = [sys.executable, "-m", "benchmarks.wire_servers"]
    skipped = {}
    with ExitStack() as stack:

        def service(kind: str, *more: str) -> tuple[int, int, Path]:
            where = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wire-")))
            pid, (port, *_) = stack.enter_context(
                child(*python, kind, "--where", str(where), "--rows", str(rows), *more)
            )
            wait_until_warm(port)
            wait_for_reactors(port)
            return pid, port, where

        pid, port, _ = service("echo")
        servers = [Server("echo", pid, port, over_http(port, checked=False))]
        shared = [] if options.no_shared_memory else ["--shared-memory"]
        pid, port, _ = service("store", *shared)
        servers.append(Server("http", pid, port, over_http(port, checked=True)))
        if shared:
            regions = Regions(port)
            stack.callback(regions.close)
            servers.append(Server("shared memory", pid, port, regions.frames))
        pid, one, _ = service("store", "--threads", "1")
        servers.append(Server("http 1", pid, one, over_http(one, checked=True)))
        if options.no_redis:
            skipped["redis"] = "left out"
        elif shutil.which("redis-server") is None:
            skipped["redis"] = "redis-server is not installed"
        else:
            servers.append(stack.enter_context(redis(rows)))
        print(f"{describe()}; {rows:,} rows of {ROW_BYTES} bytes, all in memory; medians of {rounds} rounds\n")
        for name, why in skipped.items():
            print(f"{name} is left out: {why}\n")
        print(
            "| keys | connections | server | server CPU, µs | over echo | take, µs | over echo + take | over http | wall, µs | over http |\n"
            "|---|---|---|---|---|---|---|---|---|---|"
        )
        results = measure(servers, rows, options.keys, rounds, requests)
        print(
            "\none connection, request by request:\n\n| keys | server | p50, µs | p99, µs | p99 / p50 |\n|---|---|---|---|---|"
        )
        ports = {server.name: server.port for server in servers if server.name in ("echo", "http")}
        seen = [row for n in options.keys for row in latency(ports, rows, n, rounds, requests)]
        clients: list[dict[str, object]] = []
        if shared and importlib.util.find_spec("tritonclient") is not None:
            print("\ntritonclient, one request at a time, from keys to rows:\n")
            print("| keys | http, µs | shared memory, µs | ratio |\n|---|---|---|---|")
            clients = [with_tritonclient(port, rows, n, rounds, requests // 4) for n in options.keys]
        print("\nrows that are not in memory, requests a second, and CPU of one:\n")
        print(
            "| keys | in process | over HTTP | ratio | in process, µs | over HTTP, µs | ratio |\n|---|---|---|---|---|---|---|"
        )
        pid, port, where = service("store", "--cold")
        shutil.copytree(where / "data", where / "copy", ignore=shutil.ignore_patterns("LOCK"))
        chilled = [cold(pid, port, where / "copy", rows, n, rounds, max(20, requests // 8)) for n in options.keys]
    document: dict[str, object] = {
        "benchmark": "wire_lookup",
        "machine": describe(),
        "rows": rows,
        "rounds": rounds,
        "skipped": [f"{name}: {why}" for name, why in skipped.items()],
        "results": results,
        "latency": seen,
        "tritonclient": clients,
        "cold": chilled,
    }
    document["headlines"] = headlines(document)
    report.write(options.json, document)


if __name__ == "__main__":
    main()
