"""The device tier: one table's hottest rows in GPU memory.

Any number of threads may call anything. All kernels of a table run in one stream: **the order of that stream is what
makes rows whole and deltas visible**. A kernel that reads never meets one that writes; a look-up that is put in after
`update` has returned sees what it wrote. So kernels need no versions, no fences and no second tries, and may read as
they please. It costs that kernels of one table do not overlap, which a program that launches from Python does not
notice; copies do overlap, they go through the workspaces' own streams. See docs/decisions/device-tier.md.

`_order` is held for the length of a few launches, by whoever puts kernels in. `_lock` makes writers one at a time;
`insert` and `insert_absent` do not wait for it. Nothing survives the process. A device that fails is passed over from
then on: look-ups leave every key to the next tier.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.kernels.codec import out_code
from tierstore.tiers.device_backend import TEAM, Buffer, Captured, DeviceError, OutOfDeviceMemory, Stream
from tierstore.tiers.device_layout import (
    COUNTER_BYTES,
    LINE_BYTES,
    MAX_HEAT,
    WAYS,
    DeviceLayout,
    keys_of,
    runs_of,
)
from tierstore.tiers.device_memory import ALIGN, DeviceMemory, Workspace
from tierstore.types import Keys, Rows, States, TableSpec, Tier, Vectors

log = logging.getLogger(__name__)

ROWS, ABSENT_KEYS, ADMITTED, EVICTED = range(4)  # of the counters
_CHUNK = 8192  # keys of one kernel that writes: look-ups wait for it
_LARGEST = 1 << 20  # keys of one kernel that reads
_PENDING = np.uint8(Tier.PENDING)


class _GivenUp(DeviceError):
    """A look-up has given the table up while a writer was at work."""


class DeviceTable:
    """A set-associative cache of one table of one version in device memory (see `cuda/layout.cuh`). A `CacheTier`.

    It never takes more than `budget_bytes`, all bookkeeping included; workspaces are the device's. `fraction` (1, 1/2
    … 1/64) says how much of it is in use. Where the device has less memory left than that, the table is smaller.
    """

    def __init__(
        self,
        spec: TableSpec,
        budget_bytes: int,
        memory: DeviceMemory,
        *,
        default_vector: np.ndarray,
        fraction: float = 1.0,
    ) -> None:
        # constant after construction
        self.spec, self.budget_bytes, self.memory = spec, int(budget_bytes), memory
        self.layout = DeviceLayout(spec, self.budget_bytes)
        self._lock = threading.Lock()
        self._order = threading.Lock()
        self.problem: str | None = None
        # guarded by _lock
        self._floor_seq = -1
        self._counters = np.zeros(4, np.int64)
        self._dropped_stale = self._dropped_busy = 0
        # guarded by _order
        self._table: np.ndarray | None = None  # None: there is nothing (any more) to look in
        self._segments: list[Buffer] = []
        self._depth = 0
        if self.layout.sets_per_region and self._step:
            self._open(np.ascontiguousarray(default_vector, np.float32), fraction)

    def _open(self, default: np.ndarray, fraction: float) -> None:
        try:
            self._stream: Stream = self.memory.backend.stream()
            self._control = self.memory.backend.alloc(self.layout.control_bytes)
            self._segments = [self._segment(0)]
            self._table = self._described()
            with self.memory.workspace() as ws:
                ws.host(0, self.spec.dim, np.float32)[:] = default
                self._stream.upload(self._control.address + COUNTER_BYTES, ws.host(0, self.spec.dim * 4))
                self._stream.synchronize()
        except DeviceError as error:
            self._fail(error)
            return
        self.resize(fraction)

    def _segment(self, number: int) -> Buffer:
        buffer = self.memory.backend.alloc(self.layout.segment_bytes(number))
        self._stream.clear(buffer.address, buffer.nbytes)
        return buffer

    def _described(self) -> np.ndarray:
        addresses = [segment.address for segment in self._segments]
        return self.layout.table(addresses, self._control.address + COUNTER_BYTES, self._depth)

    def _fail(self, error: DeviceError) -> None:
        """Never look in here again: what is here may be older than what is to be answered."""
        if isinstance(error, _GivenUp):
            return
        if self.problem is None:
            log.error("the device tier of table %s is given up: %s", self.spec.name, error)
        self.problem = str(error)
        with self._order:
            self._table = None
            self._counters[:2] = 0

    # --- look-ups

    def lookup(self, keys: Keys, out: Vectors, state: States) -> int:
        """Answer keys whose state is PENDING: row and DEVICE, or the default and ABSENT; the rest is left as it is.

        `keys` int64[n], `out` float32 or float16 [n, dim], `state` uint8[n], all contiguous, in CPU memory. Rows of
        `out` that stay PENDING hold anything. Counts heat. Returns how many were answered with a row.
        """
        half = out_code(out)
        check_answer(self.spec, keys, out, state)
        pending = np.flatnonzero(state == _PENDING)
        width = self.spec.dim * (4 >> half)
        step = min(_LARGEST, (self.memory.workspace_bytes - 4 * ALIGN) // (17 + width))
        answered = 0
        if step < 1:
            return answered
        for begin in range(0, len(pending), step):
            if self._table is None:
                break
            at = pending[begin : begin + step]
            try:
                with self.memory.workspace() as ws:
                    answered += self._lookup(ws, keys, at, out, state, half)
            except Captured:  # the next tier answers; what writes, on the contrary, may not be left undone
                break
            except DeviceError as error:
                self._fail(error)
        return answered

    def _lookup(self, ws: Workspace, keys: Keys, at: np.ndarray, out: Vectors, state: States, half: int) -> int:
        n, width = len(at), self.spec.dim * (4 >> half)
        keys_at, source_at, state_at, out_at = ws.cut(n * 8, n * 8, n, n * width)
        np.take(keys, at, out=ws.host(keys_at, n, np.int64))
        ws.upload(keys_at, keys_at + n * 8)
        uploaded = ws.stream.record()
        none = np.uint64(0)
        with self._order:
            if self._table is None:
                ws.stream.synchronize()
                return 0
            stream = self._stream
            stream.wait(uploaded)
            stream.clear(int(ws.at(state_at)), n)
            stream.launch(
                "probe", n * TEAM, self._table, ws.at(keys_at), ws.at(state_at), np.int64(n), ws.at(source_at),
                none, none, none, none, none,
            )  # fmt: skip
            stream.launch(
                "gather", n * TEAM, self._table, ws.at(source_at), np.int64(n), ws.at(out_at), np.uint32(half)
            )
            answered = stream.record()
        ws.stream.wait(answered)
        ws.download(state_at, out_at + n * width)
        ws.stream.synchronize()
        found = ws.host(state_at, n)
        rows = ws.host(out_at, n * self.spec.dim, out.dtype).reshape(n, self.spec.dim)
        if n == len(out) and found.all():
            out[:], state[:] = rows, found
        else:
            hit = np.flatnonzero(found)
            out[at[hit]] = rows[hit]
            state[at] = found
        return int(np.count_nonzero(found == Tier.DEVICE))

    @contextmanager
    def ordered(self) -> Iterator[tuple[Stream, np.ndarray, Buffer] | None]:
        """Put kernels that read into the table's stream, with nothing in between, within the block.

        Gives (stream, `TABLE` to launch with, what keeps the default vector in memory), or None where there is nothing
        to look in. What a kernel has learnt of where rows lie is good for those of the same block alone.
        """
        with self._order:
            yield None if self._table is None else (self._stream, self._table, self._control)

    def give_up(self, error: DeviceError) -> None:
        """The device has failed in a look-up: pass it over from now on."""
        self._fail(error)

    # --- writers

    def insert(self, keys: Keys, rows: Rows, seq: int) -> int:
        """Promote distinct keys with rows uint8[n, row_bytes] read under a view of `seq`. Returns rows let in.

        Dropped whole (0) if `seq` is below the floor or another writer is at work; `HostTable._begin_promotion` says why.
        """
        return self.exchange(keys, rows, seq, keep=False)[0]

    def exchange(self, keys: Keys, rows: Rows, seq: int, *, keep: bool = True) -> tuple[int, Keys, Rows]:
        """`insert`, and with `keep` also (keys, rows) of those that were put out for it, current in a view of `seq`."""
        rows = check_rows(self.spec, keys, rows)
        nobody = np.empty(0, np.int64), np.empty((0, self.spec.row_bytes), np.uint8)
        if not self._begin_promotion(seq):
            return 0, *nobody
        try:
            return self._insert(keys, rows, evict=True, keep=keep)
        except DeviceError as error:
            self._fail(error)
            return 0, *nobody
        finally:
            self._lock.release()

    def insert_absent(self, keys: Keys, seq: int) -> int:
        """Remember distinct keys that do not exist in a view of `seq`; dropped as `insert` is. Returns keys let in."""
        if not self._begin_promotion(seq):
            return 0
        try:
            admitted = int(self._counters[ADMITTED])
            order, sets = self.layout.by_set(np.ascontiguousarray(keys), self._depth)
            for begin in range(0, len(keys), self._step):
                part = order[begin : begin + self._step]
                with self.memory.workspace() as ws:
                    at, runs = self._stage(ws, keys[part], sets[begin : begin + self._step])
                    self._write(ws, at[-1], "insert_absent", runs, ws.at(at[0]), ws.at(at[1]), np.int64(runs))
            let_in = int(self._counters[ADMITTED]) - admitted
            self._counters[ADMITTED] = admitted  # which counts rows
            return let_in
        except DeviceError as error:
            self._fail(error)
            return 0
        finally:
            self._lock.release()

    def _begin_promotion(self, seq: int) -> bool:
        """Take the lock if it is free and the promotion is not stale; the caller releases it."""
        if self._table is None:
            return False
        if not self._lock.acquire(blocking=False):
            self._dropped_busy += 1
            return False
        if self._table is None or seq < self._floor_seq:
            self._dropped_stale += 1
            self._lock.release()
            return False
        return True

    def raise_floor(self, seq: int) -> None:
        """From now on promotions read under a view older than `seq` are dropped. Comes before the fold's disk write."""
        with self._lock:
            self._floor_seq = max(self._floor_seq, seq)

    def update(self, keys: Keys, rows: Rows, deleted: np.ndarray) -> None:
        """Fold: bring what is resident up to a delta of distinct `keys`, rows uint8[n, row_bytes], deleted bool[n].

        Rows of deleted keys are not read. Keys that are not resident are not let in. On return every look-up that
        starts sees it. The lock is given up between chunks, as by the host tier.
        """
        rows = check_rows(self.spec, keys, rows)
        if deleted.shape != keys.shape:
            raise ValueError(f"expected deleted[{len(keys)}], got {list(deleted.shape)}")
        begin = 0
        while begin < len(keys):
            with self._lock:
                if self._table is None:
                    return
                end = begin + self._step
                part = np.ascontiguousarray(keys[begin:end])
                try:
                    self._update(part, rows[begin:end], deleted[begin:end])
                except DeviceError as error:
                    self._fail(error)
                    return
                begin = end

    def _update(self, keys: Keys, rows: Rows, deleted: np.ndarray) -> None:
        order, sets = self.layout.by_set(keys, self._depth)
        n = len(keys)
        with self.memory.workspace() as ws:
            at, runs = self._stage(ws, keys[order], sets, n * self.layout.stride, n)
            _, runs_at, rows_at, deleted_at, end = at
            self._stage_rows(ws, rows_at, rows, order)
            ws.host(deleted_at, n)[:] = deleted[order]
            self._write(
                ws, end, "update", runs, ws.at(0), ws.at(rows_at), ws.at(deleted_at), ws.at(runs_at), np.int64(runs)
            )

    def warm(self, keys: Keys, rows: Rows, seq: int | None = None) -> int:
        """Fill free places with distinct keys, hottest first; nobody is put out. Returns rows let in.

        Once the version serves, `seq` is that of the view they were read under; dropped if it is below the floor.
        """
        keys, rows = np.ascontiguousarray(keys), check_rows(self.spec, keys, rows)
        with self._lock:
            if self._table is None or (seq is not None and seq < self._floor_seq):
                return 0
            try:
                return self._insert(keys, rows, evict=False, keep=False)[0]
            except DeviceError as error:
                self._fail(error)
                return 0

    def _insert(self, keys: Keys, rows: Rows, *, evict: bool, keep: bool) -> tuple[int, Keys, Rows]:
        """Holds `_lock`."""
        admitted, stride = int(self._counters[ADMITTED]), self.layout.stride
        order, sets = self.layout.by_set(np.ascontiguousarray(keys), self._depth)
        out_keys, out_rows = [np.empty(0, np.int64)], [np.empty((0, self.spec.row_bytes), np.uint8)]
        for begin in range(0, len(keys), self._step):
            part = order[begin : begin + self._step]
            n = len(part)
            with self.memory.workspace() as ws:
                kept = (n * 8, n * stride) if keep else (0, 0)
                at, runs = self._stage(ws, keys[part], sets[begin : begin + self._step], n * stride, extra=kept)
                _, runs_at, rows_at, end, out_at, out_rows_at = at
                self._stage_rows(ws, rows_at, rows, part)
                where = (ws.at(out_at), ws.at(out_rows_at)) if keep else (np.uint64(0), np.uint64(0))
                evicted = self._write(
                    ws, end, "insert", runs, ws.at(0), ws.at(rows_at), ws.at(runs_at), np.int64(runs),
                    np.uint32(evict), after=where,
                )[EVICTED]  # fmt: skip
                if keep and evicted:
                    ws.download(out_at, out_at + evicted * 8)
                    ws.download(out_rows_at, out_rows_at + evicted * stride)
                    ws.stream.synchronize()
                    out_keys.append(ws.host(out_at, evicted, np.int64).copy())
                    staged = ws.host(out_rows_at, evicted * stride).reshape(evicted, stride)
                    out_rows.append(staged[:, : self.spec.row_bytes].copy())
        return int(self._counters[ADMITTED]) - admitted, np.concatenate(out_keys), np.concatenate(out_rows)

    @property
    def _step(self) -> int:
        """Keys that one kernel writes: as many as a workspace stages with their rows, twice."""
        return min(_CHUNK, (self.memory.workspace_bytes - 8 * ALIGN) // (2 * self.layout.stride + 32))

    def _stage(
        self, ws: Workspace, keys: Keys, sets: np.ndarray, *sizes: int, extra: tuple[int, ...] = ()
    ) -> tuple[list[int], int]:
        """Put sorted keys and their runs into `ws`.

        Returns offsets (keys, runs, each of `sizes`, the end of what goes up, each of `extra`) and the number of runs.
        """
        runs = runs_of(sets)
        at = ws.cut(len(keys) * 8, len(runs) * 4, *sizes, 0, *extra)
        ws.host(at[0], len(keys), np.int64)[:] = keys
        ws.host(at[1], len(runs), np.uint32)[:] = runs
        return at, len(runs) - 1

    def _stage_rows(self, ws: Workspace, at: int, rows: Rows, order: np.ndarray) -> None:
        stride = self.layout.stride
        staged = ws.host(at, len(order) * stride).reshape(len(order), stride)
        staged[:, : self.spec.row_bytes] = rows[order]

    @contextmanager
    def _writing(self) -> Iterator[np.ndarray]:
        """Hold `_order` with a table to write to. Holds `_lock`, which does not keep look-ups from giving the table up."""
        with self._order:
            if self._table is None:
                raise _GivenUp(f"the device tier of table {self.spec.name} was given up")
            yield self._table

    def _write(self, ws: Workspace, end: int, kernel: str, teams: int, *args: Any, after: tuple = ()) -> np.ndarray:
        """Send [0, end) of `ws` up, run a kernel that writes, wait for it, and add its counters up; returns them."""
        if end:
            ws.upload(0, end)
        uploaded = ws.stream.record()
        counters = self._control.address
        with self._writing() as table:
            self._stream.wait(uploaded)
            self._stream.clear(counters, COUNTER_BYTES)
            self._stream.launch(kernel, teams * TEAM, table, *args, np.uint64(counters), *after)
            done = self._stream.record()
        ws.stream.wait(done)
        # what was staged first has been read by now
        counted = ws.host(0, 4, np.int64)
        ws.stream.download(counted.view(np.uint8), counters)
        ws.stream.synchronize()
        result: np.ndarray = counted.copy()
        self._counters += result
        return result

    # --- size

    def resize(self, fraction: float) -> None:
        """Use `fraction` (1, 1/2 … 1/64) of the budget, keeping the hottest rows; the rest of the memory goes back.

        Look-ups go on, behind one kernel a step. A fraction between two goes down to the smaller. Where the device has
        no memory to grow, the table stays as it is, and `problem` says so.
        """
        with self._lock:
            if self._table is None:
                return
            wanted = self._depth_of(fraction)
            try:
                while wanted < self._depth:
                    self._halve()
                while wanted > self._depth:
                    self._double()
                if self._table is not None:
                    self.problem = None  # of an earlier try to grow
            except OutOfDeviceMemory as error:
                self.problem = f"the device has no memory for more than {self.bytes_in_use:,} bytes of table {self.spec.name}: {error}"
                log.warning("%s", self.problem)
            except DeviceError as error:
                self._fail(error)

    def _depth_of(self, fraction: float) -> int:
        halvings = 0
        while fraction < 1 and halvings < self.layout.max_depth:
            fraction, halvings = fraction * 2, halvings + 1
        return self.layout.max_depth - halvings

    def _halve(self) -> None:
        sets = self.layout.sets(self._depth - 1)
        with self.memory.workspace() as ws:
            counters = self._control.address
            with self._writing() as table:
                self._stream.clear(counters, COUNTER_BYTES)
                self._stream.launch("merge", sets * TEAM, table, np.int64(sets), np.uint64(counters))
                counted = ws.host(0, 4, np.int64)
                self._stream.download(counted.view(np.uint8), counters)
                last = self._segments.pop()
                self._depth -= 1
                self._table = self._described()
            self._stream.synchronize()  # from here on no kernel knows the upper half
            self._counters += counted
            last.free()

    def _double(self) -> None:
        sets = self.layout.sets(self._depth)
        buffer = self.memory.backend.alloc(self.layout.segment_bytes(self._depth + 1))
        with self._writing():
            self._stream.clear(buffer.address, buffer.nbytes)
            self._segments.append(buffer)
            self._depth += 1
            self._table = self._described()
            self._stream.launch("split", sets * TEAM, self._table, np.int64(sets))
        self._stream.synchronize()

    def hot_keys(self, limit: int) -> Keys:
        """Resident keys int64[m], m <= limit, hottest first as far as 4 degrees of heat tell."""
        return self.hot(limit)[0]

    def hot(self, limit: int) -> tuple[Keys, npt.NDArray[np.uint8]]:
        """(`hot_keys`, their heat)."""
        nothing = np.empty(0, np.int64), np.empty(0, np.uint8)
        with self._lock:
            if self._table is None or limit <= 0:
                return nothing
            try:
                found = [parts for segment in range(self._depth + 1) for parts in self._read_lines(segment)]
            except DeviceError as error:
                self._fail(error)
                return nothing
        keys, heat = np.concatenate([keys for keys, _ in found]), np.concatenate([heat for _, heat in found])
        hottest = np.argsort(MAX_HEAT - heat, kind="stable")[:limit]
        return keys[hottest], heat[hottest]

    def _read_lines(self, segment: int) -> list[tuple[Keys, np.ndarray]]:
        parts = []
        sets = self.layout.segment_sets(segment)
        step = max(1, self.memory.workspace_bytes // LINE_BYTES)
        for begin in range(0, sets, step):
            n = min(step, sets - begin)
            with self.memory.workspace() as ws:
                staged = ws.host(0, n * LINE_BYTES)
                with self._order:
                    self._stream.download(staged, self._segments[segment].address + begin * LINE_BYTES)
                self._stream.synchronize()
                parts.append(keys_of(staged.view(np.uint64).reshape(n, LINE_BYTES // 8)))
        return parts

    @property
    def rows_resident(self) -> int:
        return int(self._counters[ROWS])

    @property
    def capacity_rows(self) -> int:
        """Rows that fit into the part in use."""
        return 0 if self._table is None else self.layout.sets(self._depth) * WAYS

    @property
    def allowed_bytes(self) -> int:
        """What it may take at the present fraction."""
        return int(self.budget_bytes * 0.5 ** (self.layout.max_depth - self._depth))

    @property
    def bytes_in_use(self) -> int:
        """Bytes of device memory held at the present fraction."""
        return 0 if self._table is None else self.layout.bytes_at(self._depth)

    def stats(self) -> dict[str, Any]:
        """Counts since construction, and sizes; a snapshot that is taken without the lock."""
        rows, absent, admitted, evicted = self._counters.tolist()
        return {
            "rows": rows, "capacity_rows": self.capacity_rows, "absent_keys": absent, "bytes": self.bytes_in_use,
            "budget_bytes": self.budget_bytes, "admitted": admitted, "evicted": evicted,
            "dropped_stale": self._dropped_stale, "dropped_busy": self._dropped_busy, "problem": self.problem,
        }  # fmt: skip

    def close(self) -> None:
        """Give the memory back, once kernels under way have ended; later look-ups leave every key PENDING."""
        with self._lock:
            with self._order:
                self._table = None
                segments, self._segments = self._segments, []
                self._counters[:2] = 0
            if not segments:
                return
            try:
                self._stream.synchronize()
            except DeviceError as error:
                log.warning("table %s: %s", self.spec.name, error)
            for buffer in segments:
                buffer.free()
            del self._control  # its memory goes with the last look-up that answers with the default


def check_answer(spec: TableSpec, keys: Keys, out: Vectors, state: States) -> None:
    """Raise unless `out` and `state` may answer `keys`."""
    out_code(out)
    n = len(keys)
    if out.shape != (n, spec.dim) or state.shape != (n,) or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"expected contiguous out[{n}, {spec.dim}] and state[{n}], got {out.shape} and {state.shape}")


def check_rows(spec: TableSpec, keys: Keys, rows: Rows) -> Rows:
    """`rows` if they are the stored rows of `keys`; ValueError otherwise."""
    if rows.shape != (len(keys), spec.row_bytes) or rows.dtype != np.uint8:
        raise ValueError(f"expected rows uint8[{len(keys)}, {spec.row_bytes}], got {rows.dtype}{list(rows.shape)}")
    return rows
