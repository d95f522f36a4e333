"""The device tier: one table's hottest rows in GPU memory (docs/decisions/device-tier.md).

Any thread may call anything. All kernels of a table run in one stream, and **the order of that stream keeps rows whole and makes deltas visible**: a
kernel that reads never runs beside one that writes, and a look-up that is launched after `update` has returned sees what it wrote. So kernels need no
versions, fences or retries. The price: kernels of one table do not overlap. Kernels that write read their input in page-locked memory, where compiled
code has staged it.

`_lock` is held by one writer at a time; `insert` and `insert_absent` do not wait for it. After a failure the device is not used any more: look-ups
leave every key to the next tier. Nothing survives the process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tierstore.kernels.codec import address_of
from tierstore.threads import Pool
from tierstore.tiers.checks import check_rows
from tierstore.tiers.device import staging as device_staging
from tierstore.tiers.device.backend import DeviceError, OutOfDeviceMemory
from tierstore.tiers.device.layout import MAX_HEAT, WAYS, DeviceLayout
from tierstore.tiers.device.memory import Counters, GivenUp, TableMemory
from tierstore.tiers.device.peek import Peek, peek
from tierstore.tiers.device.workspaces import (
    ALIGN,
    NOTHING,
    WRITING,
    WRITTEN_BYTES,
    DeviceMemory,
    Workspace,
)
from tierstore.tiers.host.table import HostTable
from tierstore.types import Keys, Rows, TableSpec

log = logging.getLogger(__name__)

ROWS, ABSENT_KEYS, ADMITTED, EVICTED = range(4)  # places in the counters
_CHUNK, _FILLED = 8192, 16_384  # keys of one kernel that writes, for which look-ups wait; of one that fills a new table
_ALL_THERE = np.empty(0, np.bool_)


class _Staged(NamedTuple):
    """Places in a workspace: input of a kernel that writes (addresses), and its output (offsets)."""

    keys: int
    runs: int
    rows: int
    deleted: int
    out_keys: int
    out_rows: int
    done: int


class DeviceTable:
    """A set-associative cache of one table of one version in device memory (see `cuda/layout.cuh`), of which is asked what `HostTable` is, but for look-ups.

    It never uses more than `budget_bytes`, including all bookkeeping; workspaces belong to the device. `fraction` (1, 1/2 … 1/64) of it is in use. If
    the device has less free memory, the table is smaller.
    """

    def __init__(
        self,
        spec: TableSpec,
        budget_bytes: int,
        device: DeviceMemory,
        *,
        default_vector: np.ndarray,
        fraction: float = 1.0,
    ) -> None:
        # constant after construction
        self.spec, self.budget_bytes, self.device = spec, int(budget_bytes), device
        self.layout = DeviceLayout(spec, self.budget_bytes)
        self._lock = threading.Lock()
        self.memory: TableMemory | None = None
        self.problem: str | None = None
        # guarded by _lock
        self._floor_seq = -1
        self._counters = np.zeros(4, np.int64)
        self._dropped_stale = self._dropped_busy = 0
        if self.layout.sets_per_region and self._step:
            try:
                default = np.ascontiguousarray(default_vector, np.float32)
                self.memory = TableMemory(spec, self.layout, device, default)
            except DeviceError as error:
                self.give_up(error)
            else:
                self.resize(fraction)

    @property
    def is_in_use(self) -> bool:
        return self.memory is not None and self.memory.table is not None

    @property
    def _depth(self) -> int:
        return 0 if self.memory is None else self.memory.depth

    def give_up(self, error: DeviceError) -> None:
        """After a failure of the device: never read the table again, because it may be out of date."""
        if isinstance(error, GivenUp):
            return
        if self.problem is None:
            log.error("the device tier of table %s is given up: %s", self.spec.name, error)
        self.problem = str(error)
        if self.memory is not None:
            self.memory.give_up()
        self._counters[:2] = 0

    # --- look-ups

    def read_below(self, host: HostTable) -> None:
        """Let look-ups whose answer stays on the device read this host tier too. For a background thread."""
        if self.is_in_use:
            assert self.memory is not None
            self.memory.host_registration.open(host)

    def peek(self, key: int) -> Peek:
        """The table's entry for a key, read without counting. A promotion at that moment is dropped."""
        with self._lock:
            return peek(self.memory, self.layout, key, self.give_up)

    # --- writers

    def insert(self, keys: Keys, rows: Rows, seq: int) -> int:
        """Promote distinct keys with rows uint8[n, row_bytes] read under a view of `seq`. Returns the rows admitted.

        Dropped as a whole (0) if `seq` is below the floor or another writer is at work; `HostTable` says why.
        """
        return self.exchange(keys, rows, seq, keep=False)[0]

    def exchange(self, keys: Keys, rows: Rows, seq: int, *, keep: bool = True) -> tuple[int, Keys, Rows]:
        """`insert`; with `keep`, also returns (keys, rows) of the evicted keys, current in a view of `seq`."""
        rows = check_rows(self.spec, keys, rows)
        nobody = np.empty(0, np.int64), np.empty((0, self.spec.row_bytes), np.uint8)
        if not self._begin_promotion(seq):
            return 0, *nobody
        try:
            return self._insert(keys, rows, keep=keep)
        except DeviceError as error:
            self.give_up(error)
            return 0, *nobody
        finally:
            self._lock.release()

    def insert_absent(self, keys: Keys, seq: int) -> int:
        """Remember distinct keys that a view of `seq` lacks; dropped as by `insert`. Returns the keys admitted."""
        if not self._begin_promotion(seq):
            return 0
        try:
            admitted, keys = 0, np.ascontiguousarray(keys)
            for begin in range(0, len(keys), self._step):
                with self.device.workspace() as ws:
                    at, runs = self._stage(ws, keys[begin : begin + self._step])
                    admitted += self._write(ws, at.done, "insert_absent", runs, at.keys, at.runs, runs)
            return admitted
        except DeviceError as error:
            self.give_up(error)
            return 0
        finally:
            self._lock.release()

    def _begin_promotion(self, seq: int) -> bool:
        """Take the lock if it is free and the promotion is not stale; the caller releases it."""
        if not self.is_in_use:
            return False
        if not self._lock.acquire(blocking=False):
            self._dropped_busy += 1
            return False
        if not self.is_in_use or seq < self._floor_seq:
            self._dropped_stale += 1
            self._lock.release()
            return False
        return True

    def raise_floor(self, seq: int) -> None:
        """Drop, from now on, promotions read under a view older than `seq`. Call it before the fold writes."""
        with self._lock:
            self._floor_seq = max(self._floor_seq, seq)

    def update(self, keys: Keys, rows: Rows, deleted: np.ndarray) -> None:
        """Fold: apply a delta to resident rows of distinct `keys`; rows uint8[n, row_bytes], deleted bool[n].

        Rows of deleted keys are not read. Keys that are not resident are not admitted. Every look-up that starts after the return sees the delta. The
        lock is released between chunks, as in the host tier.
        """
        rows = check_rows(self.spec, keys, rows)
        keys, deleted = np.ascontiguousarray(keys), np.ascontiguousarray(deleted)
        if deleted.shape != keys.shape:
            raise ValueError(f"expected deleted[{len(keys)}], got {list(deleted.shape)}")
        begin = 0
        while begin < len(keys):
            with self._lock:
                if not self.is_in_use:
                    return
                end = begin + self._step
                try:
                    self._update(keys[begin:end], rows[begin:end], deleted[begin:end])
                except DeviceError as error:
                    self.give_up(error)
                    return
                begin = end

    def _update(self, keys: Keys, rows: Rows, deleted: np.ndarray) -> None:
        with self.device.workspace() as ws:
            at, runs = self._stage(ws, keys, rows, deleted)
            self._write(ws, at.done, "update", runs, at.keys, at.rows, at.deleted, at.runs, runs)

    def warm(self, keys: Keys, rows: Rows, seq: int | None = None) -> int:
        """Fill free places with distinct keys, hottest first; nothing is evicted. Returns the rows admitted.

        Once the version serves, `seq` is the seq of the view under which they were read; dropped if it is below the floor.
        """
        keys, rows = np.ascontiguousarray(keys), check_rows(self.spec, keys, rows)
        with self._lock:
            if not self.is_in_use or (seq is not None and seq < self._floor_seq):
                return 0
            try:
                return self._fill(keys, rows)
            except DeviceError as error:
                self.give_up(error)
                return 0

    def _insert(self, keys: Keys, rows: Rows, *, keep: bool) -> tuple[int, Keys, Rows]:
        """`insert` and `exchange`, with `_lock` held."""
        admitted, stride = int(self._counters[ADMITTED]), self.layout.stride
        keys, rows = np.ascontiguousarray(keys), np.ascontiguousarray(rows)
        out_keys, out_rows = [np.empty(0, np.int64)], [np.empty((0, self.spec.row_bytes), np.uint8)]
        for begin in range(0, len(keys), self._step):
            part = keys[begin : begin + self._step]
            n = len(part)
            with self.device.workspace() as ws:
                at, runs = self._stage(ws, part, rows[begin : begin + n], evicted=n if keep else 0)
                back = (ws.here(at.out_keys), ws.here(at.out_rows)) if keep else (NOTHING, NOTHING)
                evicted = self._write(ws, at.done, "insert", runs, at.keys, at.rows, at.runs, runs, *back)
                if evicted:
                    out_keys.append(ws.staging(at.out_keys, evicted, np.int64).copy())
                    staged = ws.staging(at.out_rows, evicted * stride).reshape(evicted, stride)
                    out_rows.append(staged[:, : self.spec.row_bytes].copy())
        return int(self._counters[ADMITTED]) - admitted, np.concatenate(out_keys), np.concatenate(out_rows)

    def _fill(self, keys: Keys, rows: Rows) -> int:
        """Fill free places, with `_lock` held. Several threads stage parts, as one copies less than the bus can take."""
        before = int(self._counters[ADMITTED])
        step = min(_FILLED, (self.device.workspace_bytes - 4 * ALIGN) // (self.layout.stride + 8))
        parts = [(keys[begin : begin + step], rows[begin : begin + step]) for begin in range(0, len(keys), step)]
        if len(parts) < 2:
            totals = [self._fill_part(*part) for part in parts]
        else:
            with Pool(min(WRITING, len(parts)), "device-fill") as threads:
                totals = threads.map(lambda part: self._fill_part(*part), parts)
        if totals and self.is_in_use:
            self._counters = max(totals, key=lambda each: int(each[ADMITTED]))
        return int(self._counters[ADMITTED]) - before

    def _fill_part(self, keys: Keys, rows: Rows) -> Counters:
        assert self.memory is not None
        n, stride = len(keys), self.layout.stride
        with self.device.workspace() as ws:
            keys_at, rows_at, done_at = ws.cut(n * 8, n * stride, WRITTEN_BYTES)
            ws.staging(keys_at, n, np.int64)[:] = keys
            device_staging.spread(rows, ws.here(rows_at), stride)
            return self.memory.run_writer(ws, done_at, "fill", n, ws.here(keys_at), ws.here(rows_at), n)[0]

    @property
    def _step(self) -> int:
        """The number of keys for one kernel that writes: half of what a workspace can stage with rows."""
        return min(_CHUNK, (self.device.workspace_bytes - 10 * ALIGN) // (2 * self.layout.stride + 32))

    def _stage(
        self, ws: Workspace, keys: Keys, rows: Rows | None = None, deleted: np.ndarray = _ALL_THERE, evicted: int = 0
    ) -> tuple[_Staged, int]:
        """Stage input for a kernel that writes. Returns its place, and the number of sets written to."""
        n, layout = len(keys), self.layout
        row_bytes = 0 if rows is None else layout.stride
        keys_at, runs_at, rows_at, deleted_at, *others = ws.cut(
            n * 8, (n + 1) * 4, n * row_bytes, len(deleted), evicted * 8, evicted * layout.stride, WRITTEN_BYTES
        )
        runs = device_staging.stage(
            keys, self._depth, layout.sets_per_region, 0 if rows is None else address_of(rows), self.spec.row_bytes,
            ws.here(rows_at), layout.stride, deleted, ws.staging(keys_at, n, np.int64),
            ws.staging(runs_at, n + 1, np.uint32), ws.staging(deleted_at, len(deleted), np.bool_),
        )  # fmt: skip
        return _Staged(*map(ws.here, (keys_at, runs_at, rows_at, deleted_at)), *others), int(runs)

    def _write(self, ws: Workspace, done_at: int, kernel: str, teams: int, *args: Any) -> int:
        """`TableMemory.run_writer`, keeping the totals; returns its second result. Holds `_lock`."""
        assert self.memory is not None
        totals, listed = self.memory.run_writer(ws, done_at, kernel, teams, *args)
        if self.is_in_use:
            self._counters = totals
        return listed

    # --- size

    def resize(self, fraction: float) -> None:
        """Use `fraction` (1, 1/2 … 1/64) of the budget, keep the hottest rows, and free the other memory.

        Look-ups go on, and wait for one kernel a step. Other fractions are rounded down. If the device has no memory to grow, the table stays as it
        is, and `problem` says so.
        """
        with self._lock:
            memory = self.memory
            if memory is None or memory.table is None:
                return
            wanted = self._depth_of(fraction)
            try:
                while wanted < memory.depth:
                    self._counters = memory.halve()
                while wanted > memory.depth:
                    memory.double()
                if memory.table is not None:
                    self.problem = None  # from an earlier try to grow
            except OutOfDeviceMemory as error:
                self.problem = f"no device memory beyond {self.bytes_in_use:,} bytes of table {self.spec.name}: {error}"
                log.warning("%s", self.problem)
            except DeviceError as error:
                self.give_up(error)

    def _depth_of(self, fraction: float) -> int:
        halvings = 0
        while fraction < 1 and halvings < self.layout.max_depth:
            fraction, halvings = fraction * 2, halvings + 1
        return self.layout.max_depth - halvings

    def hot_keys(self, limit: int) -> Keys:
        """Resident keys int64[m], m <= limit, hottest first, by 4 degrees of heat."""
        nothing = np.empty(0, np.int64)
        with self._lock:
            if self.memory is None or self.memory.table is None or limit <= 0:
                return nothing
            try:
                found = self.memory.resident()
            except DeviceError as error:
                self.give_up(error)
                return nothing
        keys, heat = np.concatenate([keys for keys, _ in found]), np.concatenate([heat for _, heat in found])
        hottest: Keys = keys[np.argsort(MAX_HEAT - heat, kind="stable")[:limit]]
        return hottest

    def hot_keys_by_part(self) -> Iterator[list[Keys]]:
        """All resident keys, hottest first."""
        yield [self.hot_keys(self.capacity_rows)]

    @property
    def rows_resident(self) -> int:
        return int(self._counters[ROWS])

    @property
    def capacity_rows(self) -> int:
        """Rows that fit into the part in use."""
        return 0 if not self.is_in_use else self.layout.sets(self._depth) * WAYS

    @property
    def allowed_bytes(self) -> int:
        """Bytes that the table may use at the present fraction."""
        return int(self.budget_bytes * 0.5 ** (self.layout.max_depth - self._depth))

    @property
    def bytes_in_use(self) -> int:
        """Bytes of device memory held at the present fraction."""
        return 0 if not self.is_in_use else self.layout.bytes_at(self._depth)

    def stats(self) -> dict[str, Any]:
        """Counts since construction, and sizes; read without the lock."""
        rows, absent, admitted, evicted = self._counters.tolist()
        return {
            "rows": rows, "capacity_rows": self.capacity_rows, "absent_keys": absent, "bytes": self.bytes_in_use,
            "budget_bytes": self.budget_bytes, "admitted": admitted, "evicted": evicted,
            "dropped_stale": self._dropped_stale, "dropped_busy": self._dropped_busy, "problem": self.problem,
            "host_problem": None if self.memory is None else self.memory.host_registration.problem,
        }  # fmt: skip

    def close(self) -> None:
        """Free the memory after kernels under way have ended; later look-ups leave every key PENDING."""
        with self._lock:
            self._counters[:2] = 0
            if self.memory is not None:
                try:
                    self.memory.free()
                except DeviceError as error:
                    log.warning("table %s: %s", self.spec.name, error)
