"""Ten times the capacity, with everything that comes with it: the last part of `benchmarks.overload`.

Predictions of several sizes, each with a timeout, come at random moments in an open loop; every tenth on a connection of its
own; clients that never read hold look-ups with large answers; and a process of its own asks for the health, each time on a new
connection. What counts: goodput (items of predictions that were answered in time) against that of a closed loop before, the
longest health check, threads and memory, and how long after the load the service is as fast as before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks.predict_service import ROWS, Client, Served, load, predict_request

SIZES = (256, 512, 1024, 2048)  # items of a prediction
LOADS = (1, 10)
TIMEOUT_S = 0.5
CONNECTIONS = 400
CHURN = 10  # every so many requests one comes on a new connection
READERS = 50
_ROWS_MODEL, _ROWS_DIM, _KEYS = "rows", 16, 4096  # 256 KiB an answer
_AHEAD = 32  # answers that a client which does not read has asked for
_PROBE_S = 0.1


def prepare(data: Path, widths: tuple[int, ...], rows: int = ROWS) -> None:
    """The predicting model of `benchmarks.overload`, and one of rows alone."""
    load(data, widths, rows=rows)
    snapshot = data.with_name("rows")
    keys = np.arange(_KEYS, dtype=np.int64)
    with tierstore.SnapshotWriter(snapshot, model=_ROWS_MODEL, version=1) as writer:
        writer.table("item", dim=_ROWS_DIM).write(keys, np.ones((_KEYS, _ROWS_DIM), np.float32))
        writer.feature("item_id", table="item")
    with tierstore.open(data, host_budget="64MiB", load_workers=1) as store:
        store.load_snapshot(snapshot)


def rows_request() -> bytes:
    keys = np.arange(_KEYS, dtype=np.int64)
    tensor = {
        "name": "item_id",
        "datatype": "INT64",
        "shape": [_KEYS],
        "parameters": {"binary_data_size": keys.nbytes},
    }
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    head = (
        f"POST /v2/models/{_ROWS_MODEL}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(text) + keys.nbytes}\r\n\r\n"
    )
    return head.encode() + text + keys.tobytes()


class Requests:
    """Predictions, their sizes dealt at random but the same each time."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        made = [
            (size, predict_request(rng.integers(0, ROWS, size), int(TIMEOUT_S * 1e6)))
            for size in SIZES
            for _ in range(8)
        ]
        self._made = [made[i] for i in rng.permutation(len(made))]
        self.mean_items = float(np.mean([size for size, _ in made]))

    def __getitem__(self, number: int) -> tuple[int, bytes]:
        return self._made[number % len(self._made)]


async def capacity(served: Served, requests: Requests, seconds: float) -> float:
    """Items a second that eight connections get which ask again as soon as they are answered."""
    items, until = 0, time.perf_counter() + seconds

    async def one(first: int) -> None:
        nonlocal items
        client, number = await Client.to(served.port), first
        while time.perf_counter() < until:
            size, message = requests[number]
            if await client.ask(message) == 200:
                items += size
            number += 8
        client.close()

    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(8)))
    return items / (time.perf_counter() - began)


async def storm(
    served: Served, requests: Requests, rate: float, seconds: float
) -> tuple[float, dict[str, int], float, float]:
    """`rate` requests a second. Items a second that were answered in time; answers by status; how late clients were, in seconds; when the last one was sent."""
    free: list[Client] = []
    statuses: dict[str, int] = {}
    good, latest, under_way = 0, 0.0, 0
    tasks: set[asyncio.Task[None]] = set()

    async def one(number: int) -> None:
        nonlocal good, under_way
        size, message = requests[number]
        under_way += 1
        sent = time.perf_counter()
        client, status = None, 0
        with contextlib.suppress(OSError):
            client = free.pop() if free and number % CHURN else await Client.to(served.port)
            status = await client.ask(message)
        if status == 200 and time.perf_counter() - sent <= TIMEOUT_S:
            good += size
        statuses[str(status)] = statuses.get(str(status), 0) + 1
        under_way -= 1
        if client is not None and status and len(free) < CONNECTIONS:
            free.append(client)
        elif client is not None:
            client.close()

    began = time.perf_counter()
    for number, at in enumerate(
        np.cumsum(np.random.default_rng(4).exponential(1 / rate, int(rate * seconds))).tolist()
    ):
        delay = began + at - time.perf_counter()
        latest = max(latest, -delay)
        await asyncio.sleep(max(delay, 0))
        if under_way >= CONNECTIONS:
            statuses["not sent"] = statuses.get("not sent", 0) + 1
            continue
        task = asyncio.ensure_future(one(number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    ended = time.perf_counter()
    whole = max(ended - began, seconds)
    await asyncio.gather(*tasks)
    for client in free:
        client.close()
    return good / whole, statuses, latest, ended


@contextlib.asynccontextmanager
async def slow_readers(port: int, count: int) -> AsyncIterator[None]:
    """So many clients that ask for large answers and read none; one that is cut comes again."""
    message = rows_request() * _AHEAD

    async def one() -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError), socket.socket() as made:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                made.setblocking(False)
                await loop.sock_connect(made, ("127.0.0.1", port))
                await loop.sock_sendall(made, message)
                while True:
                    await asyncio.sleep(1)
                    made.getpeername()
            await asyncio.sleep(0.1)

    tasks = [asyncio.ensure_future(one()) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def probe(port: int, seconds: float) -> None:
    """Health checks on new connections, from a line of input on; prints how many seconds each took, as JSON. For a process of its own."""
    print(flush=True)
    sys.stdin.readline()
    took, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as made:
                made.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answered = made.recv(4096).startswith(b"HTTP/1.1 200")
        except OSError:
            answered = False
        took.append(time.monotonic() - began if answered else 10.0)
        time.sleep(_PROBE_S)
    print(json.dumps(took))


async def recovery_s(served: Served, requests: Requests, quiet_s: float, began: float) -> float:
    """How long after the load, which ended at `began`, it takes until a request needs at most twice the time that it needs in quiet."""
    client = await Client.to(served.port)
    while True:
        sent = time.perf_counter()
        if await client.ask(requests[0][1]) == 200 and time.perf_counter() - sent <= 2 * quiet_s:
            client.close()
            return sent - began


async def quiet_s(served: Served, requests: Requests) -> float:
    """The 95th percentile of the seconds that one request takes in quiet."""
    client, took = await Client.to(served.port), []
    for _ in range(20):
        sent = time.perf_counter()
        await client.ask(requests[0][1])
        took.append(time.perf_counter() - sent)
    client.close()
    return float(np.quantile(took, 0.95))


@dataclass
class Used:
    """What the service and the clients use from now on."""

    served: Served

    def __post_init__(self) -> None:
        self._began = self.served.cpu_s(), time.process_time(), time.perf_counter()

    def cores(self) -> tuple[float, float]:
        """How many cores the service and the clients have kept busy."""
        service_s, clients_s, began = self._began
        seconds = time.perf_counter() - began
        return (self.served.cpu_s() - service_s) / seconds, (time.process_time() - clients_s) / seconds


async def _peak(served: Served, requests: Requests, seconds: float) -> tuple[float, float]:
    """(items a second, items a second of a core of the service) in a closed loop."""
    used = Used(served)
    items = await capacity(served, requests, seconds)
    return items, items / used.cores()[0]


async def _load(
    served: Served, requests: Requests, times: int, peak: float, quiet: float, seconds: float
) -> dict[str, Any]:
    """What comes of a load that is `times` as high as `peak`."""
    threads, resident = served.threads(), served.resident_bytes()
    prober = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.overload", "--probe", str(served.port), str(seconds),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert prober.stdin is not None
    assert prober.stdout is not None
    await prober.stdout.readline()  # what it takes to start is over
    prober.stdin.write(b"\n")
    used = Used(served)
    async with slow_readers(served.port, READERS):
        goodput, answers, late, ended = await storm(served, requests, times * peak / requests.mean_items, seconds)
        cores, clients = used.cores()
        more_threads, more_bytes = served.threads() - threads, served.resident_bytes() - resident
    recovered = await recovery_s(served, requests, quiet, ended)
    health = json.loads((await prober.communicate())[0])
    return {
        "goodput_items_per_s": goodput, "service_cores": cores, "clients_cores": clients, "answered": answers, "clients_late_s": late,
        "health_checks": len(health), "health_p50_ms": float(np.median(health)) * 1e3, "health_longest_ms": max(health) * 1e3,
        "more_threads": more_threads, "more_resident_bytes": more_bytes, "recovery_s": recovered,
    }  # fmt: skip


async def measure(data: Path, seconds: float, loads: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """A row for each load, as a multiple of the capacity; the capacity is measured before and after it, in `rounds` rounds."""
    requests, rows = Requests(), {times: list[dict[str, Any]]() for times in loads}
    with Served(data) as served:
        await capacity(served, requests, seconds / 4)  # rows into memory
        before = await _peak(served, requests, seconds)
        quiet = await quiet_s(served, requests)
        for _ in range(rounds):
            for times in loads:
                row = await _load(served, requests, times, before[0], quiet, seconds)
                after = await _peak(served, requests, seconds)
                peak, peak_a_core = ((one + other) / 2 for one, other in zip(before, after, strict=True))
                goodput = row["goodput_items_per_s"]
                row |= {"load": times, "capacity_items_per_s": peak, "goodput_ratio": goodput / peak}
                row["goodput_a_core_ratio"] = goodput / row["service_cores"] / peak_a_core
                rows[times].append(row)
                before = after
    for times, of in rows.items():
        print(_shown(times, of), flush=True)
    return [row for of in rows.values() for row in of]


def _shown(times: int, rows: list[dict[str, Any]]) -> str:
    """A line of the table: medians of the rounds, with what else was seen."""

    def all_of(name: str) -> list[float]:
        return [row[name] for row in rows]

    def median(name: str) -> float:
        return statistics.median(all_of(name))

    ratios = all_of("goodput_ratio")
    return (
        f"| {times} | {median('goodput_ratio'):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {median('goodput_a_core_ratio'):.2f} "
        f"| {median('service_cores'):.2f}, {median('clients_cores'):.2f} | {median('health_p50_ms'):.0f}, {max(all_of('health_longest_ms')):.0f} "
        f"| {median('recovery_s'):.2f} | {max(all_of('more_threads'))} | {max(all_of('more_resident_bytes')) >> 20} "
        f"| {rows[-1]['answered']} | {max(all_of('clients_late_s')):.2f} |"
    )
