"""Soak: a service under everything at once for hours, each answer checked; does anything grow, slow down or get lost?

`python -m tools.soak --hours 2` or `--minutes 10`, from the root of the repository.

A `tierstore serve` in a process of its own gets look-ups and predicts over HTTP from a few threads, and from one thread, one
after the other, deltas, loads, switches and rollbacks, and kills (SIGKILL, sometimes within a delta) with a start after each.
Rows and scores name the version and the seq that they are of, so every answer is compared with what the store may
have held between the request's beginning and its end. Every few seconds the service's memory, descriptors, threads and
disk are read. At the end the store is closed and verified, a table has a line for each window of time, and the last
window is compared with the first. Exit status 1 where an answer was wrong, something was lost, or `verify` fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cachetools import LRUCache

import tierstore
from tierstore.demo.service import ServiceProcess
from tierstore.errors import TierstoreError
from tierstore.formats.files import tree_bytes
from tools.crash_work import (
    DENSE,
    DIM,
    KEYS,
    MODEL,
    changes,
    delta,
    expected,
    expected_dense,
    values,
    write_snapshot,
)

SEED = 11
SETTINGS = "log_retention_s = 30\nkeep_versions = 2\nfold_grace_s = 1.0\n"
READERS, PAUSE_S = 3, 0.01
DELTA_EVERY_S, LOAD_EVERY_S, SWITCH_EVERY_S = 0.25, 45.0, 20.0
SAMPLE_EVERY_S = 2.0
GROWTH = 1.2  # of the last window over the first, before it counts as growth
ROOM = {"MiB": 48.0, "descriptors": 24, "threads": 6, "disk MiB": 16.0, "p99 ms": 5.0}  # that is no growth

State = tuple[int, int]  # version, seq


class Rows:
    """The rows that are right, by table, at a seq; NaN for no row. What was asked for lately is kept. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: LRUCache[State, dict[str, np.ndarray]] = LRUCache(32)

    def at(self, version: int, seq: int, delta_seq: int) -> dict[str, np.ndarray]:
        with self._lock:
            rows = self._kept.get((version, seq))
            if rows is None:
                before = self._kept.get((version, seq - 1)) if seq > delta_seq else None
                if before is None:
                    rows = expected(SEED, version, delta_seq, seq)
                else:
                    rows = {table: of.copy() for table, of in before.items()}
                    for table, (keys, gone) in changes(SEED, seq).items():
                        rows[table][keys] = np.where(gone[:, None], np.nan, values(table, seq, keys))
                self._kept[version, seq] = rows
            return rows


class History:
    """The states that the store was in, in order. `low` is the last that was acknowledged; later ones were begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: list[State] = []
        self._low = 0
        self.delta_seqs: dict[int, int] = {}

    def begin(self, state: State) -> None:
        with self._lock:
            self._states.append(state)

    def done(self) -> None:
        with self._lock:
            self._low = len(self._states) - 1

    @property
    def low(self) -> int:
        with self._lock:
            return self._low

    def since(self, low: int) -> list[State]:
        with self._lock:
            return self._states[low:]

    @property
    def now(self) -> State:
        with self._lock:
            return self._states[-1]


@dataclass
class Seen:
    """What the readers and the sampler saw. Lists are appended to by any thread."""

    latencies: list[tuple[float, float]] = field(default_factory=list)  # when, seconds
    samples: list[dict[str, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)  # while the service was up


class Soak:
    """One run below the directory `root`."""

    def __init__(self, root: Path, seconds: float, seed: int) -> None:
        self._root, self._rng = root, random.Random(seed)
        self.seconds, self.history, self.seen, self._rows = seconds, History(), Seen(), Rows()
        self._began = time.monotonic()
        self._ended, self._up = threading.Event(), threading.Event()
        self._url, self._service = "", None
        (root / "tierstore.toml").write_text(SETTINGS)

    def run(self) -> None:
        """Run for as long as it was said. What went wrong is in `seen`."""
        self._start()
        self._client().load_snapshot(self._snapshot(1, 0), model=MODEL)
        self._state((1, 0))
        self._began = time.monotonic()
        threads = [threading.Thread(target=self._read, args=(number,)) for number in range(READERS)]
        threads.append(threading.Thread(target=self._sample))
        for thread in threads:
            thread.start()
        try:
            self._change()
        finally:
            self._ended.set()
            for thread in threads:
                thread.join(60)
            assert self._service is not None
            self._service.__exit__(None, None, None)

    # --- the service

    def _start(self) -> None:
        self._service = ServiceProcess(self._root, port=0, host_budget="8MiB")
        self._url = self._service.url()
        with self._client() as client:
            while self.history.since(0) and not client.ready():  # the first start has nothing to be ready with
                time.sleep(0.02)
        self._up.set()

    def _client(self) -> tierstore.Client:
        return tierstore.Client(self._url, timeout_s=30.0)

    def _kill(self) -> None:
        """SIGKILL, half of the times within a delta; then start again. The delta is sent again, as a producer does."""
        assert self._service is not None
        self.seen.counts["kills"] += 1
        sending: threading.Thread | None = None
        if self._rng.random() < 0.5:
            data = self._next_delta()
            sending = threading.Thread(target=self._try_delta, args=(self._client(), data))
            sending.start()
            time.sleep(self._rng.random() * 0.03)
        self._up.clear()
        os.killpg(self._service.process.pid, signal.SIGKILL)
        self._service.process.wait()
        if sending is not None:
            sending.join()
        began = time.monotonic()
        self._start()
        self.seen.counts["ms to start again"] += round((time.monotonic() - began) * 1e3)
        if sending is not None:
            self._client().apply_delta(data)
            self.history.done()

    @staticmethod
    def _try_delta(client: tierstore.Client, data: bytes) -> None:
        with contextlib.suppress(TierstoreError, OSError):
            client.apply_delta(data)

    # --- changes, one after the other

    def _snapshot(self, version: int, delta_seq: int) -> Path:
        where = self._root / f"snapshot-{version}"
        write_snapshot(where, version, delta_seq)
        self.history.delta_seqs[version] = delta_seq
        return where

    def _state(self, state: State) -> None:
        self.history.begin(state)
        self.history.done()

    def _next_delta(self) -> bytes:
        version, seq = self.history.now
        self.history.begin((version, seq + 1))
        return delta(SEED, seq + 1)

    def _change(self) -> None:
        due = {self._load: LOAD_EVERY_S, self._switch: SWITCH_EVERY_S, self._kill: max(30.0, self.seconds / 12)}
        at = {what: self._began + every for what, every in due.items()}
        job: str | None = None
        while (now := time.monotonic()) < self._began + self.seconds or job:
            with self._client() as client:
                while time.monotonic() < now + 5:
                    self._send(client)
                    time.sleep(DELTA_EVERY_S)
            if job:
                job = self._loaded(job)
                continue  # a switch or a kill would end the load
            for what, when in at.items():
                if when < time.monotonic() < self._began + self.seconds:
                    at[what] = time.monotonic() + due[what]
                    job = what() or job
                    break

    def _send(self, client: tierstore.Client) -> None:
        client.apply_delta(self._next_delta())
        self.history.done()
        self.seen.counts["deltas"] += 1

    def _load(self) -> str:
        version = max(self.history.delta_seqs) + 1
        return self._client().start_load(
            self._snapshot(version, self.history.now[1]), model=MODEL, activate=False
        )  # caught up and switched to when it is there

    def _loaded(self, job: str) -> str | None:
        """Switch to what was loaded; the job while it is not."""
        document = self._client().job(job)
        if document["state"] == "running":
            return job
        if document["state"] == "failed":
            self.seen.wrong.append(f"a load failed: {document['error']}")
            return None
        self.seen.counts["loads"] += 1
        self._activate(max(self.history.delta_seqs))
        return None

    def _switch(self) -> None:
        status = self._client().status(MODEL)["models"][MODEL]
        others = [entry["version"] for entry in status["versions"] if entry["version"] != status["active_version"]]
        if others:
            self._activate(self._rng.choice(others))

    def _activate(self, version: int) -> None:
        self.history.begin((version, self.history.now[1]))
        self._client().activate(MODEL, version)
        self.history.done()
        self.seen.counts["switches"] += 1

    # --- readers

    def _read(self, number: int) -> None:
        rng, url, client = np.random.default_rng([SEED, number]), "", None
        while not self._ended.is_set():
            if not self._up.wait(0.2):
                continue
            if client is None or url != self._url:
                url = self._url
                client = tierstore.Client(url, timeout_s=30.0)
            began, low = time.monotonic(), self.history.low
            try:
                (self._predict if DENSE and rng.random() < 0.3 else self._look_up)(client, rng, low)
            except (TierstoreError, OSError) as error:
                if self._up.is_set() and url == self._url:  # else it was killed meanwhile
                    self.seen.failures[f"{type(error).__name__}: {str(error)[:120]}"] += 1
                continue
            now = time.monotonic()
            self.seen.latencies.append((now - self._began, now - began))
            time.sleep(PAUSE_S)

    def _look_up(self, client: tierstore.Client, rng: np.random.Generator, low: int) -> None:
        numbers = {table: rng.integers(0, len(KEYS[table]), 64) for table in DIM}
        keys = {table: [KEYS[table][at] for at in of] for table, of in numbers.items()}
        keys = {table: of if table == "word" else np.array(of) for table, of in keys.items()}
        rows = client.lookup_many(MODEL, keys, return_found=True)
        self.seen.counts["look-ups"] += 1

        def is_of(want: dict[str, np.ndarray], _: int, __: int) -> bool:
            return all(_same(want[table][numbers[table]], *rows[table]) for table in DIM)

        self._compare(low, is_of, "look-up")

    def _predict(self, client: tierstore.Client, rng: np.random.Generator, low: int) -> None:
        users = rng.integers(0, len(KEYS["user"]), 32)
        score = np.asarray(client.predict(MODEL, {"user": users}))
        self.seen.counts["predicts"] += 1

        def is_of(want: dict[str, np.ndarray], version: int, seq: int) -> bool:
            number = expected_dense(version, self.history.delta_seqs[version], seq)
            right = np.nan_to_num(want["user"][users]).sum(axis=1, keepdims=True) + np.float32(number)
            return np.allclose(score, right, rtol=1e-6)

        self._compare(low, is_of, "predict")

    def _compare(self, low: int, is_of: Callable[[dict[str, np.ndarray], int, int], bool], what: str) -> None:
        """Whether it is an answer of one of the states since `low`, newest first."""
        states = self.history.since(low)
        for version, seq in reversed(states):
            if is_of(self._rows.at(version, seq, self.history.delta_seqs[version]), version, seq):
                return
        self.seen.wrong.append(f"a {what} was of none of the states {states[0]} to {states[-1]}")

    # --- what the service uses

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            service = self._service
            if not self._up.is_set() or service is None:
                continue
            process = Path(f"/proc/{service.process.pid}")
            with contextlib.suppress(OSError, StopIteration):
                status = (process / "status").read_text().splitlines()
                number = {line.split(":")[0]: line.split()[1] for line in status if line.split()[1:]}
                self.seen.samples.append(
                    {
                        "s": time.monotonic() - self._began,
                        "MiB": int(number["VmRSS"]) / 1024,
                        "threads": int(number["Threads"]),
                        "descriptors": len(os.listdir(process / "fd")),
                        "disk MiB": tree_bytes(self._root / "data") / 2**20,
                    }
                )

    def windows(self) -> list[dict[str, float]]:
        """The medians of what was sampled, and the p99, by window of at most ten minutes."""
        size = min(600.0, self.seconds / 4)
        found = []
        for start in np.arange(0, self.seconds - size / 2, size):
            samples = [sample for sample in self.seen.samples if start <= sample["s"] < start + size]
            took = [took for at, took in self.seen.latencies if start <= at < start + size]
            if samples and took:
                line = {"minute": (start + size) / 60}
                line |= {
                    name: float(np.median([sample[name] for sample in samples])) for name in ROOM if name in samples[0]
                }
                found.append(line | {"p99 ms": float(np.quantile(took, 0.99)) * 1e3})
        return found


def _same(want: np.ndarray, rows: Any, found: Any) -> bool:
    there = ~np.isnan(want[:, 0])
    return bool(np.array_equal(found, there) and np.array_equal(rows, np.nan_to_num(want)))


def report(soak: Soak) -> bool:
    """Print what was seen. Whether all of it was right."""
    seen, windows = soak.seen, soak.windows()
    names = ["minute", *ROOM]
    print(" | ".join(f"{name:>11}" for name in names))
    for line in windows:
        print(" | ".join(f"{line[name]:11.1f}" for name in names))
    print(dict(seen.counts))
    if windows:
        first, last = windows[0], windows[-1]
        grown = {
            name: f"{first[name]:.1f} to {last[name]:.1f}"
            for name, room in ROOM.items()
            if last[name] > max(first[name] * GROWTH, first[name] + room)
        }
        print(f"grown from the first window to the last: {grown or 'nothing'}")
    for what, count in seen.failures.most_common():
        print(f"FAILED {count} times: {what}")
    for what in seen.wrong[:20]:
        print(f"WRONG {what}")
    with tierstore.open(soak._root / "data") as store:
        verified = store.verify()
        status = store.status(MODEL)["models"][MODEL]
    lost = (status["active_version"], status["log"]["last"]) != soak.history.now
    print(f"verify: {'all is well' if verified.ok else verified.problems}")
    if lost:
        print(
            f"WRONG the store ends with {status['active_version'], status['log']['last']}: expected {soak.history.now}"
        )
    right = verified.ok and not seen.wrong and not lost and not seen.failures
    print("every answer was right, nothing was lost" if right else "NOT as it should be")
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    seconds = options.hours * 3600 + options.minutes * 60 or 600.0
    with tempfile.TemporaryDirectory(prefix="tierstore-soak-") as root:
        soak = Soak(Path(root), seconds, options.seed)
        soak.run()
        right = report(soak)
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
