"""Look-ups while everything changes: `python -m benchmarks.lookup_swap [--tiny] [--json FILE]`.

A process of its own asks over HTTP for 1,024 rows that are in memory, 200 times a second, each at the moment when it is
due whatever became of the one before (an open loop, on connections enough). First nothing else happens; then snapshots
are loaded, activated, rolled back and activated again, and deltas come without pause; then it is quiet again. Times are
from when a request was due to the last byte of its answer.

Every state has a number, which all rows that are asked for hold: an answer of two states, or of another version than it
says, is `mixed`. `failed` are answers that are not of status 200.

"waking up alone" is a process that does nothing but wake up as often: what the processors and the kernel take of the time
of anybody.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import HIDDEN, parser_of
from benchmarks.predict_service import MODEL, Served
from benchmarks.swap import Admin, by_phase, latencies
from tierstore.service.process import request_short_slices

FEATURE, DIM, HOT, KEYS = "item_id", 32, 20_000, 1024
RATE, CONNECTIONS = 200, 8
MARK = 1.5
STEP = 10_000  # numbers of a version


def write_snapshot(where: Path, version: int, rows: int) -> Path:
    source = where / str(version)
    keys = np.arange(rows, dtype=np.int64)
    with tierstore.SnapshotWriter(source, model=MODEL, version=version) as writer:
        writer.table("item", dim=DIM).write(keys, np.full((rows, DIM), version * STEP, np.float32))
        writer.feature(FEATURE, table="item")
        writer.warmup("item", keys[:HOT])
    return source


def delta(seq: int, version: int, number: int) -> bytes:
    sink = io.BytesIO()
    with tierstore.DeltaWriter(sink, model=MODEL, seq=seq, base_version=version) as writer:
        writer.upsert("item", np.arange(HOT, dtype=np.int64), np.full((HOT, DIM), number, np.float32))
    return sink.getvalue()


# --- the asker


def message(keys: np.ndarray) -> bytes:
    given = {"name": FEATURE, "datatype": "INT64", "shape": [KEYS], "parameters": {"binary_data_size": keys.nbytes}}
    text = json.dumps({"inputs": [given], "outputs": [{"name": FEATURE, "parameters": {"binary_data": True}}]}).encode()
    head = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text) + keys.nbytes}\r\n"
    return f"{head}Inference-Header-Content-Length: {len(text)}\r\n\r\n".encode() + text + keys.tobytes()


def ask(port: int, out: Path, rate: float = RATE) -> None:
    """Ask `rate` times a second until standard input ends; then write (due, answered, status, mixed) of each request."""
    rng = np.random.default_rng(1)
    messages = [message(rng.integers(0, HOT, KEYS)) for _ in range(32)]
    over, seen = threading.Event(), []
    begin = time.perf_counter() + 0.2

    def one(number: int) -> None:
        request_short_slices()  # a clock that comes late would tell of nothing but itself
        link, space = socket.create_connection(("127.0.0.1", port), timeout=30), bytearray(1 << 18)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        turn = number
        while not over.is_set():
            due = begin + turn / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            link.sendall(messages[turn % 32])
            got, whole = 0, -1
            while got != whole:
                count = link.recv_into(memoryview(space)[got:])
                if not count:
                    raise ConnectionError
                got += count
                if whole < 0 and (end := space.find(b"\r\n\r\n", 0, got)) >= 0:
                    length = re.search(rb"(?i)content-length: (\d+)", space[:end])
                    assert length is not None
                    whole = end + 4 + int(length[1])
            answered = time.perf_counter()
            status = int(space[9:12])
            rows = np.frombuffer(space, np.float32, KEYS * DIM, got - 4 * KEYS * DIM)
            version = re.search(rb'"model_version":"(\d+)"', space[: got - rows.nbytes])
            mixed = status == 200 and (
                rows.min() != rows.max() or version is None or int(rows[0]) // STEP != int(version[1])
            )
            seen.append((due, answered, status, mixed))
            turn += CONNECTIONS
        link.close()

    askers = [threading.Thread(target=one, args=(number,)) for number in range(CONNECTIONS)]
    for asker in askers:
        asker.start()
    print("asks", flush=True)
    sys.stdin.read()
    over.set()
    for asker in askers:
        asker.join()
    np.save(out, np.array(seen))


def tick(out: Path) -> None:
    """Wake up as often as somebody asks, until standard input ends; then write (due, awake) of each time."""
    request_short_slices()
    over, seen = threading.Event(), []

    def wait_for_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    due = time.perf_counter()
    while not over.is_set():
        due += 1 / RATE
        time.sleep(max(0.0, due - time.perf_counter()))
        seen.append((due, time.perf_counter()))
    np.save(out, np.array(seen))


@dataclass
class Answers:
    """What came of it, once it is over."""

    seen: np.ndarray = field(default_factory=lambda: np.zeros((0, 4)))  # (due, answered, status, mixed) of each request
    ticks: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))  # (due, awake)


@contextlib.contextmanager
def asked(port: int, where: Path) -> Iterator[Answers]:
    """In the block a process asks, and another one only wakes up. What they saw is there after it."""
    command = [sys.executable, "-m", "benchmarks.lookup_swap"]
    asker = subprocess.Popen(
        [*command, "--ask", str(port), str(where / "seen.npy")], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    ticker = subprocess.Popen([*command, "--tick", str(where / "ticks.npy")], stdin=subprocess.PIPE)
    answers = Answers()
    yield answers
    for process in (asker, ticker):
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
    answers.seen, answers.ticks = np.load(where / "seen.npy"), np.load(where / "ticks.npy")
    answers.seen = answers.seen[
        answers.seen[:, 0] > answers.seen[0, 0] + 1.0
    ]  # the first second meets cold code and rows


# --- measuring


def change(admin: Admin, sources: list[Path], seconds: float) -> None:
    """Load, activate, roll back and activate again, with deltas all the while."""
    over, active = threading.Event(), [1]

    def send() -> None:
        for seq in itertools.count(1):
            if over.is_set():
                return
            version = active[0]
            admin.delta(delta(seq, version, version * STEP + seq % 100))

    sender = threading.Thread(target=send)
    sender.start()
    until = time.perf_counter() + seconds
    version = 1
    while time.perf_counter() < until and version <= len(sources):
        version += 1
        admin.load(sources[version - 2])
        admin.post("activate", "activate", {"version": version})
        active[0] = version
        time.sleep(0.5)
        active[0] = version - 1
        admin.post("roll back", "rollback", {})
        time.sleep(0.5)
        active[0] = version
        admin.post("activate again", "activate", {"version": version})
    over.set()
    sender.join()


def measure(where: Path, rows: int, quiet_s: float, rounds: int) -> dict[str, Any]:
    sources = [write_snapshot(where / "snapshots", version, rows) for version in range(1, rounds + 2)]
    data = where / "data"
    with tierstore.open(data, host_budget="256MiB", load_workers=1) as store:
        store.load_snapshot(sources[0])
    with Served(data, host_budget="256MiB", source_root=where, keep_versions=2) as served:
        with asked(served.port, where) as answers:
            time.sleep(3 + quiet_s)
            began = time.perf_counter()
            admin = Admin(served)
            change(admin, sources[1:], 120.0)
            ended = time.perf_counter()
            time.sleep(quiet_s)
        slow = slow_inside(served.port)
    return result(answers.seen, answers.ticks, admin, began, ended) | slow


def slow_inside(port: int) -> dict[str, Any]:
    """How many look-ups took longer than a millisecond by the service's own clock, from their bytes to their answer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(r'tierstore_request_seconds_bucket\{le="([^"]+)",outcome="ok",protocol="oip_http"\} (\S+)', text)
    counts = {bound: float(count) for bound, count in found}
    return {"look_ups_beyond_1_ms_by_the_services_own_clock": counts["+Inf"] - counts["0.001"]}


def result(seen: np.ndarray, ticks: np.ndarray, admin: Admin, began: float, ended: float) -> dict[str, Any]:
    due, answered, status, mixed = seen.T
    rows = by_phase(due, answered, admin, began, ended)
    (changes,) = (row for row in rows if row["while"] == "all changes")
    late = (ticks[:, 1] - ticks[:, 0]) * 1e3
    busy = (ticks[:, 1] >= began) & (ticks[:, 0] <= ended)
    for name, which in (("waking up alone, quiet", ~busy), ("waking up alone, all changes", busy)):
        p50, p99, most = latencies(late[which])
        rows.append({"while": name, "requests": int(which.sum()), "p50_ms": p50, "p99_ms": p99, "max_ms": most})
    return {
        "headlines": [
            report.headline("look-ups that failed", "all", float((status != 200).sum()), at_most=0, unit="requests"),
            report.headline("answers of two states", "all", float(mixed.sum()), at_most=0, unit="requests"),
            report.headline(
                "p99 of look-ups while versions and rows change", "p99 quiet",
                changes["p99_over_quiet"], at_most=MARK,
            ),
        ],
        "results": rows,
        "requests": len(due),
    }  # fmt: skip


def main() -> None:
    parser = parser_of(
        __file__, __doc__, "tiny", rows=300_000, rounds=4, quiet=(12.0, "seconds before, and after"), tick=(str, HIDDEN)
    )
    parser.add_argument("--ask", nargs="+", help=argparse.SUPPRESS)  # port, file, requests a second
    options = parser.parse_args()
    if options.tick:
        tick(Path(options.tick))
        return
    if options.ask:
        port, out, *rate = options.ask
        ask(int(port), Path(out), *map(float, rate))
        return
    rows, quiet_s, rounds = (25_000, 1.0, 1) if options.tiny else (options.rows, options.quiet, options.rounds)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as folder:
        document = {"benchmark": "lookup_swap", "machine": describe()}
        document |= measure(Path(folder), rows, quiet_s, rounds)
    report.write(options.json, document)
    print(report.markdown(document))


if __name__ == "__main__":
    main()
