"""Rows that deltas change while they are asked for, and what the service itself counts of it.

`Changing` sends deltas to a service of this machine and remembers how often it has changed each row, so that answers can be
checked. One thread at a time may change rows; another may ask meanwhile what they are, if it looks at `stamp` before and after.
"""

from __future__ import annotations

import http.client
import io
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tierstore
from benchmarks.wild_traffic import of_reactors
from benchmarks.wire_lookup import cpu_s

Counts = dict[str, float]
Vectors = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of rows by their numbers, changed so many times
_QUIET_S, _QUIET_CPU_S = 0.02, 0.0003  # a process is quiet that uses no more than so much in so long
_LOOKED_UP = re.compile(r'^tierstore_lookup_keys_total\{[^}]*tier="([^"]*)"[^}]*\} (\S+)', re.M)
_UNFOLDED = re.compile(r"^tierstore_overlay_bytes\{[^}]*\} (\S+)", re.M)


class Service:
    """A service's counters, and its processor time."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid, self.port = pid, port
        self._link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def post(self, path: str, body: bytes) -> None:
        self._link.request("POST", path, body, {"Content-Type": "application/vnd.apache.arrow.stream"})
        answer = self._link.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {said[:300]!r}")

    def _metrics(self) -> str:
        self._link.request("GET", "/metrics")
        return self._link.getresponse().read().decode()

    def counts(self) -> Counts:
        """`answers` of reactors, `handed_on.REASON` of what they did not answer, `keys.TIER` of keys by where they were."""
        text = self._metrics()
        found = of_reactors(text)
        for tier, value in _LOOKED_UP.findall(text):
            found[f"keys.{tier}"] = found.get(f"keys.{tier}", 0.0) + float(value)
        return found

    def wait_until_folded(self, timeout_s: float = 120.0, pause_s: float = 0.02) -> None:
        until = time.monotonic() + timeout_s
        while any(float(size) for size in _UNFOLDED.findall(self._metrics())):
            if time.monotonic() > until:
                raise TimeoutError(f"deltas were not folded after {timeout_s:.0f} s")
            time.sleep(pause_s)

    def settled_cpu_s(self, timeout_s: float = 5.0) -> float:
        """Its processor time when nothing is left to do of what it was asked."""
        until, before = time.monotonic() + timeout_s, cpu_s(self.pid)
        while True:
            time.sleep(_QUIET_S)
            now = cpu_s(self.pid)
            if now - before < _QUIET_CPU_S or time.monotonic() > until:
                return before
            before = now


class Changing:
    """The rows of one table, numbered from 0, and how often a delta has changed each."""

    def __init__(
        self, service: Service, model: str, table: str, rows: int, keys_of: Callable[[np.ndarray], np.ndarray], vectors: Vectors
    ) -> None:  # fmt: skip
        self.service, self._model, self._table, self._keys_of, self._vectors = service, model, table, keys_of, vectors
        self.times = np.zeros(rows, np.int64)
        self.seq = 0
        self.stamp = 0  # odd while a delta is under way: either of two rows is right then

    def expected(self, rows: np.ndarray) -> np.ndarray:
        return self._vectors(rows, self.times[rows])

    def change(self, rows: np.ndarray) -> None:
        """Send a delta of these rows, each of them once, and return when it is visible."""
        self.seq += 1
        sink = io.BytesIO()
        with tierstore.DeltaWriter(sink, model=self._model, seq=self.seq) as delta:
            delta.upsert(self._table, self._keys_of(rows), self._vectors(rows, self.times[rows] + 1))
        self.stamp += 1
        self.service.post(f"/admin/models/{self._model}/deltas", sink.getvalue())
        self.times[rows] += 1
        self.stamp += 1


def small_vectors(rows: np.ndarray, times: np.ndarray, dim: int) -> np.ndarray:
    """float32[n, dim] from -1 to 1, known from a row's number and how often it was changed."""
    with np.errstate(over="ignore"):
        mixed = (rows.astype(np.int64) + times * 1_000_003)[:, None] * (np.arange(dim) * 2 + 2_654_435_761)
    made: np.ndarray = (((mixed >> 7) & 0xFFFF).astype(np.float32) - 32768) / 32768
    return made


def difference(after: Counts, before: Counts) -> Counts:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def told(counts: Counts, requests: int) -> dict[str, Any]:
    """Columns of a table: shares of the requests that reactors answered and of keys by tier, and why they handed on others.

    Deltas and readings of counts are not among these requests.
    """
    tiers = {name.partition(".")[2]: value for name, value in counts.items() if name.startswith("keys.")}
    keys = max(1.0, sum(tiers.values()))
    reasons = {name.partition(".")[2]: value for name, value in counts.items() if name.startswith("handed_on.")}
    said = ", ".join(f"{name} {value:.0f}" for name, value in reasons.items() if value and name != "other_request")
    shares = {f"from_{tier}": tiers.get(tier, 0.0) / keys for tier in ("disk", "overlay")}
    return {**shares, "compiled": counts["answers"] / requests, "handed_on": said or None}
