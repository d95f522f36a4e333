"""A table of the device tier under everything at once: `python -m tools.soak_device --seconds 600 [--kind late early cupy gpu]`.

Threads look rows and bags up, by keys on the CPU and on the device, with padding, with deltas that no tier has yet, and in streams of their own that they wait for later, while one thread applies deltas, promotes rows and resizes the table and the
host tier below it, which the device reads too. A row tells
its key and how often it was written, so each answer is checked: no older than what was acknowledged before the
look-up, no newer than what was written by its end, whole, and each bag the sum of its rows to the bit. `kind` is one of
`tests/tiers/devices.py`: stand-ins on the CPU, or a GPU. Ends with 1 where an answer was wrong.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from tests.tiers.devices import open_device, to_host
from tierstore.engine.data.overlay import OverlayTable
from tierstore.kernels.pool import pool_bags
from tierstore.tiers.device.lookup import LookUp, OtherTiers, PendingLookup, Pooling, to_device
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import DeviceMemory
from tierstore.tiers.host.table import HostTable
from tierstore.types import Combiner, GpuArray, KeyType, StorageDtype, TableSpec, Tier

DIM, KEYS, READERS = 12, 6000, 3
STEP = 10_000  # between two writings of a row


def rows_of(keys: np.ndarray, written: np.ndarray) -> np.ndarray:
    """Vectors, each exact in float32."""
    rows: np.ndarray = keys[:, None] * 1000 % 977 + np.arange(DIM) + written[:, None] * STEP
    return rows.astype(np.float32)


class Soak:
    """One table and what is known of its rows. `written` and `acknowledged` are guarded by the lock."""

    def __init__(self, kind: str) -> None:
        self.device = open_device(kind)
        spec = TableSpec("t", KeyType.INT64, DIM, StorageDtype.FLOAT32)
        memory = DeviceMemory(self.device, 16 << 20)
        self.table = DeviceTable(spec, 256 << 10, memory, default_vector=np.zeros(DIM, np.float32))
        self.host = HostTable(spec, 256 << 10, default_vector=np.zeros(DIM, np.float32))
        self.written, self.acknowledged = np.zeros(KEYS, np.int64), np.zeros(KEYS, np.int64)
        self.faults: list[Any] = []
        # keys that were looked up; of these, those that the host tier has answered, and those in a thread's stream
        self.keys = self.below = self.put_off = 0
        self._own = threading.local()
        self._lock, self._done = threading.Lock(), threading.Event()

    def run(self, seconds: float) -> None:
        works = [*[self._read] * READERS, self._write]
        threads = [threading.Thread(target=self._repeat, args=(work, seed)) for seed, work in enumerate(works)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.faults:
            self._done.wait(min(0.1, seconds))
        self._done.set()
        for thread in threads:
            thread.join()
        self.host.close()
        self.table.close()

    def _repeat(self, work: Callable[[np.random.Generator], None], seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not self._done.is_set():
                work(rng)
        except BaseException as error:  # noqa: BLE001 - told at the end
            self.faults.append(error)

    def _of(self, known: np.ndarray, keys: np.ndarray) -> np.ndarray:
        with self._lock:
            return known[keys]

    def _below(self, keys: np.ndarray, dtype: Any) -> tuple[Any, np.ndarray]:
        """What the disk answers."""
        return rows_of(keys, self._of(self.written, keys)), np.full(len(keys), Tier.DISK, np.uint8)

    def _read(self, rng: np.random.Generator) -> None:
        n = int(rng.integers(1, 700))
        keys = np.minimum(rng.integers(0, KEYS, n), rng.integers(0, KEYS, n))
        padding = None if rng.random() < 0.5 else int(keys[0])
        counted, least = keys != (-1 if padding is None else padding), self._of(self.acknowledged, keys)
        bags = None
        if rng.random() < 0.5:
            offsets = np.unique(np.append(0, rng.integers(0, n, 20)))
            bags = Pooling(offsets, None, Combiner.SUM)
        out = self._look_up(
            keys, padding, bags, in_stream=(how := rng.random()) < 0.4, early=how > 0.7, there=rng.random() < 0.4
        )
        got, most = to_host(out), self._of(self.written, keys)
        self.keys += n
        if bags is None:
            self._check_rows(got, keys, counted, least, most)
        else:
            self._check_bags(got, keys, bags.offsets, counted, least == most, most)

    def _look_up(
        self, keys: np.ndarray, padding: int | None, bags: Pooling | None, *, in_stream: bool, early: bool, there: bool
    ) -> Any:
        """The answer, complete."""
        ended, pending_lookup = threading.Event(), None
        if in_stream:
            if not hasattr(self._own, "stream"):
                self._own.stream = self.device.stream()
            pending_lookup = PendingLookup(lambda: ended.set, lambda _, states: self._count(states))
        with (
            self.device.in_stream(getattr(self._own.stream, "_stream", self._own.stream))
            if in_stream
            else nullcontext()
        ):
            out = self.device.empty((len(keys) if bags is None else len(bags.offsets), DIM), np.float32)
            deltas = [self._delta(keys[begin::7]) for begin in range(len(keys) % 3)]
            overlays = np.array([delta.words.ctypes.data for delta in deltas], np.int64)
            state = np.zeros(len(keys), np.uint8)
            given: Any = keys
            if there:
                given = GpuArray.of(self.device, to_device(self.table.device, keys))
            filters = sum(delta.filter_bytes for delta in deltas)
            tiers = OtherTiers(self._below, self.host, overlays, filters)
            look_up = LookUp(self.table, given, state, GpuArray.of(self.device, out), tiers, bags, padding)
            if early and look_up.begin():
                time.sleep(0)  # others get on
            if not look_up.finish(pending_lookup):
                raise AssertionError(f"the device does not answer: {self.table.problem}")
        if pending_lookup is None or not pending_lookup.begun:
            self._count(state)
        else:
            self.put_off += len(keys)
            self._own.stream.synchronize()
            if not ended.wait(60):
                raise AssertionError("a look-up in a stream does not end")
        return out

    def _delta(self, keys: np.ndarray) -> OverlayTable:
        """Rows of these keys, as they were written last, that no tier has yet."""
        changed = np.unique(keys)
        rows = rows_of(changed, self._of(self.written, changed)).view(np.uint8)
        return OverlayTable(self.table.spec, changed, rows, np.zeros(len(changed), np.bool_))

    def _count(self, state: np.ndarray) -> int:
        from_host = np.count_nonzero(state == Tier.HOST)
        with self._lock:
            self.below += from_host
        return from_host

    def _check_rows(
        self, got: np.ndarray, keys: np.ndarray, counted: np.ndarray, least: np.ndarray, most: np.ndarray
    ) -> None:
        told = ((got[:, 0] - rows_of(keys, np.zeros(len(keys), np.int64))[:, 0]) / STEP).astype(np.int64)
        told[~counted] = least[~counted]
        whole = rows_of(keys, told)
        whole[~counted] = 0
        if (told < least).any() or (told > most).any() or not np.array_equal(got, whole):
            self.faults.append("a row that is old, torn or another's")

    def _check_bags(
        self,
        got: np.ndarray,
        keys: np.ndarray,
        offsets: np.ndarray,
        counted: np.ndarray,
        sure: np.ndarray,
        most: np.ndarray,
    ) -> None:
        """Of bags none of whose rows was written meanwhile."""
        unsure = np.add.reduceat(~sure, offsets, dtype=np.int64) > 0
        sums = pool_bags(rows_of(keys, most), offsets, None, counted, Combiner.SUM)
        if not np.array_equal(got[~unsure], sums[~unsure]):
            self.faults.append("a bag that is not the sum of its rows")

    def _write(self, rng: np.random.Generator) -> None:
        keys, what = np.unique(rng.integers(0, KEYS, 400)), rng.random()
        if what < 0.4:
            with self._lock:
                self.written[keys] += 1
            now = self._of(self.written, keys)
            for tier in self.table, self.host:
                tier.update(keys, rows_of(keys, now).view(np.uint8), np.zeros(len(keys), np.bool_))
            with self._lock:
                self.acknowledged[keys] = now
        elif what < 0.9:
            tier = self.table if what < 0.6 else self.host
            tier.insert(keys, rows_of(keys, self._of(self.written, keys)).view(np.uint8), 0)
            self.table.read_below(self.host)
        else:
            tier = self.table if what < 0.95 else self.host
            tier.resize(float(rng.choice([1.0, 0.5, 0.25])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each kind")
    parser.add_argument("--kind", nargs="+", default=["late", "early", "cupy"])
    options = parser.parse_args()
    wrong = 0
    for kind in options.kind:
        soak = Soak(kind)
        soak.run(options.seconds)
        print(
            f"{kind}: {soak.keys:,} keys looked up, {soak.below:,} of them by the device in the host tier, {soak.put_off:,} in a stream, {len(soak.faults)} faults {soak.faults[:3]}"
        )
        wrong += len(soak.faults)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
