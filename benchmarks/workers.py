"""Worker processes: `python -m benchmarks.workers [--rows N] [--keys N] [--rounds N] [--json FILE]`.

The service with one process and with two workers over the same snapshot, both running, asked in turn over HTTP for keys
that are all in memory. What counts is keys a second of processor time of all processes of the service: that is what a
second worker costs. Throughput is what these cores and this client allow. Answers are checked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import tierstore
from benchmarks.machine import describe

DIM = 32
CONNECTIONS = 8
SEVERAL = 2
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def vectors_of(keys: np.ndarray) -> np.ndarray:
    """float32[n, DIM], known from the key, so that answers can be checked."""
    return (keys & 0xFFFF).astype(np.float32)[:, None] + np.arange(DIM, dtype=np.float32)


def write_snapshot(where: Path, rows: int) -> None:
    with tierstore.SnapshotWriter(where, model="bench", version=1) as writer:
        table = writer.table("item", dim=DIM)
        for begin in range(0, rows, 1 << 18):
            keys = np.arange(begin, min(rows, begin + (1 << 18)), dtype=np.int64)
            table.write(keys, vectors_of(keys))
        writer.feature("item_id", table="item")


class Server:
    """`tierstore serve` with so many workers, and CONNECTIONS to it. `pids` are all of its processes."""

    def __init__(self, root: Path, snapshot: Path, workers: int, rows: int) -> None:
        self.workers = workers
        options = ["--workers", str(workers), "--port", "0", "--host-budget", str(int(rows * (DIM * 4 + 16) * 1.5))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tierstore", "serve", "--data", str(root / f"data-{workers}"), *options,
             "--source-root", str(snapshot.parent)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if (url := re.search(r"http://[^\s,]+", said)) is None:
            raise SystemExit(f"the service did not say where it listens, but: {said!r}")
        self.url = url.group()
        self.admin = httpx.Client(base_url=self.url, timeout=600)
        job = self.admin.post("/admin/models/bench/snapshots", json={"source": str(snapshot)}).json()["job"]
        while (state := self.admin.get(f"/admin/jobs/{job}").json())["state"] == "running":
            time.sleep(0.1)
        if state["state"] != "done":
            raise SystemExit(f"the snapshot was not loaded: {state}")
        self.pids = [self._process.pid, *(worker["pid"] for worker in self._workers())]
        host, port = self.url.removeprefix("http://").split(":")
        self.sockets: list[socket.socket] = []
        for _ in range(CONNECTIONS):
            self.sockets.append(socket.create_connection((host, int(port))))
            self.sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            time.sleep(0.02)  # whoever is idle accepts

    def _workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.admin.get("/admin/models").json()["service"].get("workers", [])
        return workers

    def shares(self) -> list[int]:
        """Connections of each worker."""
        return [worker["connections"] for worker in self._workers()]

    def tiers(self) -> dict[str, int]:
        tiers: dict[str, int] = self.admin.get("/admin/models/bench").json()["tables"]["item"]["lookup_keys"]
        return tiers

    def cpu_s(self) -> float:
        total = 0
        for pid in self.pids:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(words[11]) + int(words[12])
        return total * _TICK_S

    def memory(self) -> dict[str, int]:
        """Bytes of all processes together, what they share counted once; and of that, huge pages of shared memory."""
        found = {"Pss": 0, "ShmemPmdMapped": 0}
        for pid in self.pids:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            for name in found:
                found[name] += sum(int(kib) << 10 for kib in re.findall(rf"^{name}:\s+(\d+)", text, re.M))
        return found

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        self.admin.close()
        self._process.terminate()
        self._process.wait(60)


def requests_for(keys: np.ndarray) -> bytes:
    body = {
        "inputs": [
            {
                "name": "item_id",
                "datatype": "INT64",
                "shape": [len(keys)],
                "parameters": {"binary_data_size": keys.nbytes},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    header = json.dumps(body).encode()
    head = (
        f"POST /v2/models/bench/infer HTTP/1.1\r\nHost: localhost\r\nInference-Header-Content-Length: {len(header)}\r\n"
        f"Content-Length: {len(header) + keys.nbytes}\r\n\r\n"
    )
    return head.encode() + header + keys.tobytes()


def ask(sock: socket.socket, request: bytes, buffer: bytearray) -> memoryview:
    """One request; the answer's body, in `buffer`."""
    sock.sendall(request)
    have = 0
    while (end := buffer.find(b"\r\n\r\n", 0, have)) < 0:
        have += sock.recv_into(memoryview(buffer)[have:])
    head = bytes(buffer[:end]).lower()
    if not head.startswith(b"http/1.1 200"):
        raise SystemExit(f"the service answered {head.decode()}")
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    whole = end + 4 + length
    while have < whole:
        have += sock.recv_into(memoryview(buffer)[have:whole])
    return memoryview(buffer)[end + 4 : whole]


def block(server: Server, requests: list[tuple[np.ndarray, bytes]], seconds: float) -> tuple[float, float]:
    """Ask on all connections for a while. (keys a second of the server's processor time, keys a second)."""
    done = [0] * CONNECTIONS
    until = time.monotonic() + seconds

    def run(number: int) -> None:
        buffer = bytearray(len(requests[0][0]) * DIM * 4 + (1 << 16))
        at = number
        while time.monotonic() < until:
            keys, request = requests[at % len(requests)]
            body = ask(server.sockets[number], request, buffer)
            if at == number:  # one a block: checking costs time that the cores are wanted for
                answer = np.frombuffer(body[-len(keys) * DIM * 4 :], np.float32).reshape(-1, DIM)
                if not (answer == vectors_of(keys)).all():
                    raise SystemExit("the service answered wrong rows")
            done[number] += len(keys)
            at += CONNECTIONS

    cpu_s, began_s = server.cpu_s(), time.monotonic()
    threads = [threading.Thread(target=run, args=(number,)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys = sum(done)
    return keys / max(_TICK_S, server.cpu_s() - cpu_s), keys / (time.monotonic() - began_s)


@contextlib.contextmanager
def servers(rows: int) -> Iterator[list[Server]]:
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as folder, contextlib.ExitStack() as stack:
        root = Path(folder)
        snapshot = root / "snapshot"
        write_snapshot(snapshot, rows)
        started = []
        for workers in (1, SEVERAL):
            started.append(Server(root, snapshot, workers, rows))
            stack.callback(started[-1].close)
        yield started


def measure(rows: int, keys_a_call: int, rounds: int, seconds: float) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    requests = [(keys, requests_for(keys)) for keys in rng.integers(0, rows, (64, keys_a_call))]
    with servers(rows) as both:
        for server in both:  # everything into memory
            buffer = bytearray(8192 * DIM * 4 + (1 << 16))
            for _ in range(2):
                for begin in range(0, rows, 8192):
                    keys = np.arange(begin, min(rows, begin + 8192), dtype=np.int64)
                    ask(server.sockets[0], requests_for(keys), buffer)
            block(server, requests, seconds)
        before = [server.tiers() for server in both]
        samples: dict[int, list[tuple[float, float]]] = {server.workers: [] for server in both}
        for _ in range(rounds):
            for server in both:
                samples[server.workers].append(block(server, requests, seconds))
        hot = [
            (server.tiers()["host"] - was["host"]) / (sum(server.tiers().values()) - sum(was.values()))
            for server, was in zip(both, before, strict=True)
        ]
        result: dict[str, Any] = {"connections_of_workers": both[1].shares(), "rows": rows, "keys_a_call": keys_a_call}
        for server, share in zip(both, hot, strict=True):
            got = samples[server.workers]
            result[f"workers_{server.workers}"] = {
                "keys_per_cpu_s": statistics.median(cpu for cpu, _ in got),
                "keys_per_s": statistics.median(wall for _, wall in got),
                "host_hits": share,
                "processes": len(server.pids),
                "memory_bytes": server.memory()["Pss"],
                "shared_huge_bytes": server.memory()["ShmemPmdMapped"],
            }
    for index, name in enumerate(("cpu", "throughput")):
        ratios = [two[index] / one[index] for one, two in zip(samples[1], samples[SEVERAL], strict=True)]
        result[f"{name}_ratio"] = statistics.median(ratios)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, nargs="+", help="keys a request (default 64 and 4096)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    parser.add_argument("--json", type=Path, default=Path("build/workers.json"))
    options = parser.parse_args()
    rows, rounds, seconds = (20_000, 2, 0.05) if options.tiny else (options.rows, options.rounds, 1.5)
    sizes = options.keys or ([64] if options.tiny else [64, 4096])
    print(f"{describe()}; {rows:,} rows of dim {DIM} float32, all in memory; {CONNECTIONS} connections\n")
    print("| keys a request | workers | M keys/CPU s | M keys/s | memory, MiB | 2 over 1, CPU | 2 over 1, clock |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for keys in sizes:
        got = measure(rows, keys, rounds, seconds)
        results.append(got)
        for workers in (1, SEVERAL):
            of = got[f"workers_{workers}"]
            ratios = f"{got['cpu_ratio']:.2f} | {got['throughput_ratio']:.2f}" if workers == SEVERAL else " | "
            print(
                f"| {keys:,} | {workers} | {of['keys_per_cpu_s'] / 1e6:.2f} | {of['keys_per_s'] / 1e6:.2f} "
                f"| {of['memory_bytes'] >> 20} | {ratios} |",
                flush=True,
            )
        print(f"connections of the workers: {got['connections_of_workers']}", file=sys.stderr)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": describe(), "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
