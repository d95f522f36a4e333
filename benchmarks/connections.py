"""Look-ups on many connections at once: answers a second, and the service's processor time for one, beside those of few.

    python -m benchmarks.connections [--keys 64] [--seconds 4] [--rounds 3] [--tiny] [--json FILE]

One process has so many connections to the service and a request under way on each of them: whoever is answered asks again at once. The
numbers of connections take turns, and in each the service and "echo", the same service whose reactors answer ready bytes and look nothing
up: what so many connections cost the system alone. Meanwhile a thread asks for the health, each time on a new connection. The clients share the
machine's cores with the service, and spend more on many connections too: so processor time of the service is what to compare.
Every answer is checked for its status and its length, and one in a hundred for its rows.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.ready import wait_until_warm
from benchmarks.report import headline, markdown, write
from benchmarks.wire_lookup import VARIANTS, child, connect, cpu_s, http_request, read_http
from benchmarks.wire_table import DIM, keys_of, vectors_of

COUNTS = (8, 100, 1000, 2000)
CHECKED = 100  # one answer in so many
PROBE_S = 0.1


@contextlib.contextmanager
def service(kind: str, rows: int) -> Iterator[tuple[int, int]]:
    """(port, process) of a service with a table in memory: "store", or "echo"."""
    python = [sys.executable, "-m", "benchmarks.wire_servers", kind]
    with (
        tempfile.TemporaryDirectory(prefix="connections-") as where,
        child(*python, "--where", where, "--rows", str(rows)) as (pid, (port, *_)),
    ):
        wait_until_warm(port)
        yield port, pid


class Asker:
    """Connections that ask again as soon as they are answered."""

    def __init__(self, port: int, count: int, n: int, rows: int, *, checked: bool) -> None:
        rng = np.random.default_rng(count)
        self._checked = checked
        self._keys = [keys_of(rng.integers(0, rows, n)) for _ in range(VARIANTS)]
        self._requests = [http_request(keys) for keys in self._keys]
        self._sockets = [connect(port) for _ in range(count)]
        self._of = {one.fileno(): number for number, one in enumerate(self._sockets)}
        self._sent, self._got = [0] * count, [b""] * count
        self._poll = select.epoll()
        self._sockets[0].sendall(self._requests[0])
        head, body = read_http(self._sockets[0])
        self._size, self._head = len(head) + 4 + len(body), head.split(b"\r\n")[0]
        for number, one in enumerate(self._sockets):
            self._poll.register(one, select.EPOLLIN)
            one.sendall(self._requests[number % VARIANTS])
            self._sent[number] = number % VARIANTS

    def run(self, seconds: float) -> int:
        """Answers within about so many seconds."""
        answers, until = 0, time.perf_counter() + seconds
        while time.perf_counter() < until:
            for fd, _ in self._poll.poll(1.0):
                number = self._of[fd]
                one = self._sockets[number]
                got = self._got[number] + one.recv(1 << 18)
                if len(got) < self._size:
                    if not got.startswith(self._head[: len(got)]):
                        raise RuntimeError(f"expected {self._head!r}, got {got[:100]!r}")
                    self._got[number] = got
                    continue
                self._check(got, self._sent[number], self._checked and answers % CHECKED == 0)
                answers += 1
                self._got[number] = b""
                self._sent[number] = following = (self._sent[number] + 1) % VARIANTS
                one.sendall(self._requests[following])
        return answers

    def _check(self, answer: bytes, variant: int, whole: bool) -> None:
        if len(answer) != self._size or not answer.startswith(self._head):
            raise RuntimeError(f"expected {self._size} bytes that begin with {self._head!r}, got {answer[:100]!r}")
        if whole:
            n = len(self._keys[variant])
            rows = np.frombuffer(answer[-n * DIM * 4 :], np.float32).reshape(n, DIM)
            np.testing.assert_array_equal(rows, vectors_of(self._keys[variant]))

    def close(self) -> None:
        for one in self._sockets:
            one.close()
        self._poll.close()


@contextlib.contextmanager
def probed(port: int) -> Iterator[list[float]]:
    """Seconds that health checks on new connections take."""
    took: list[float] = []
    over = threading.Event()

    def probe() -> None:
        while not over.wait(PROBE_S):
            began = time.perf_counter()
            with connect(port) as made:
                made.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                made.recv(4096)
            took.append(time.perf_counter() - began)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


def measure(
    of: tuple[int, int], count: int, options: argparse.Namespace, *, checked: bool = True
) -> tuple[float, float, list[float]]:
    """(answers a second, the service's processor time for one in microseconds, seconds of health checks) on so many connections."""
    port, pid = of
    asker = Asker(port, count, options.keys, options.rows, checked=checked)
    try:
        asker.run(options.seconds / 4)
        with probed(port) as took:
            began, used = time.perf_counter(), cpu_s(pid)
            answers = asker.run(options.seconds)
            return answers / (time.perf_counter() - began), (cpu_s(pid) - used) / answers * 1e6, took
    finally:
        asker.close()


def run(options: argparse.Namespace) -> dict[str, Any]:
    rates: dict[int, list[float]] = {count: [] for count in options.connections}
    costs: dict[int, list[float]] = {count: [] for count in options.connections}
    echo: dict[int, list[float]] = {count: [] for count in options.connections}
    health: dict[int, list[float]] = {count: [] for count in options.connections}
    with service("store", options.rows) as store, service("echo", options.rows) as ready:
        for _ in range(options.rounds):
            for count in options.connections:
                rate, cost, took = measure(store, count, options)
                rates[count].append(rate)
                costs[count].append(cost)
                health[count] += took
                echo[count].append(measure(ready, count, options, checked=False)[1])
    best = max(statistics.median(values) for values in rates.values())
    results = [
        {
            "connections": count,
            "answers_per_s": statistics.median(rates[count]),
            "of_the_best": statistics.median(rates[count]) / best,
            "service_cpu_us": statistics.median(costs[count]),
            "echo_cpu_us": statistics.median(echo[count]),
            "health_p50_ms": statistics.median(health[count]) * 1e3 if health[count] else None,
            "health_longest_ms": max(health[count], default=0.0) * 1e3,
        }
        for count in options.connections
    ]
    most = results[-1]
    least = min(results, key=lambda row: float(row["service_cpu_us"]))
    return {
        "benchmark": "connections", "machine": describe(), "rows": options.rows, "keys": options.keys, "results": results,
        "headlines": [
            headline(
                f"answers for a second of the service's processors, {most['connections']:,} connections",
                f"{least['connections']:,} connections, where it is the cheapest", least["service_cpu_us"] / most["service_cpu_us"], at_least=0.9,
            ),
            headline(
                f"that, {most['connections']:,} connections", "the same of echo",
                least["service_cpu_us"] / most["service_cpu_us"] / (least["echo_cpu_us"] / most["echo_cpu_us"]), at_least=0.9,
            ),
            headline(
                f"the longest health check on a new connection, {most['connections']:,} connections", "250 ms",
                most["health_longest_ms"] / 250, at_most=1,
            ),
        ],
    }  # fmt: skip


def main() -> None:
    options = parser_of(
        __file__,
        __doc__,
        "tiny",
        rows=1_000_000,
        keys=64,
        connections=list(COUNTS),
        seconds=(4.0, "of each number of connections in each round"),
        rounds=3,
    ).parse_args()
    if options.tiny:
        options.rows, options.connections, options.seconds, options.rounds = 3000, (2, 50), 0.2, 1
    document = run(options)
    print(markdown(document))
    write(options.json, document)


if __name__ == "__main__":
    main()
