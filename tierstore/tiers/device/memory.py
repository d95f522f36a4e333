"""The device memory of one table, and the one stream of all its kernels. `table.py` says why there is one stream.

`order` is held for a few launches, while kernels are put into the stream. Methods that write are for one thread at a time. Errors of the device are
DeviceError. Nothing survives the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.tiers.device import round_trip
from tierstore.tiers.device.backend import TEAM, Buffer, DeviceError, DeviceStream
from tierstore.tiers.device.host_registration import HostRegistration
from tierstore.tiers.device.layout import (
    ABSENT_BYTES,
    COUNTER_BYTES,
    LINE_BYTES,
    READERS_AT,
    WAYS,
    DeviceLayout,
    occupied_keys,
)
from tierstore.tiers.device.order import Order
from tierstore.tiers.device.workspaces import DONE_BYTES, DeviceMemory, Launching, Workspace
from tierstore.types import Keys, Rows, TableSpec

Counters = npt.NDArray[np.int64]  # of a table: rows, absent keys, admitted, evicted


class GivenUp(DeviceError):
    """Another thread has given the table up while a writer was at work."""


class TableMemory:
    """Segments of sets, smallest first, of which `depth` + 1 are in use.

    No longer in use once `table` is None.
    """

    def __init__(self, spec: TableSpec, layout: DeviceLayout, device: DeviceMemory, default: np.ndarray) -> None:
        # constant after construction
        self._name, self._layout, self._device = spec.name, layout, device
        self.stream: DeviceStream = device.backend.stream()
        self.control: Buffer = device.backend.alloc(layout.control_bytes)  # counters, default vector
        self.order = Order(self.stream, self.control.address + READERS_AT)
        self.host_registration = HostRegistration(device.backend, self.stream, self.order)
        # guarded by order
        self.depth = 0
        self._segments = [self._new_segment(0)]
        self.table: np.ndarray | None = None
        self._use(self._described())
        with device.workspace() as ws:
            ws.staging(0, spec.dim, np.float32)[:] = default
            self.stream.clear(self.control.address, COUNTER_BYTES)
            self.stream.upload(self.control.address + COUNTER_BYTES, ws.staging(0, spec.dim * 4))
            self.stream.synchronize()

    def _new_segment(self, number: int) -> Buffer:
        buffer = self._device.backend.alloc(self._layout.segment_bytes(number))
        self.stream.clear(buffer.address, buffer.nbytes)
        return buffer

    def _described(self) -> np.ndarray:
        addresses = [segment.address for segment in self._segments]
        return self._layout.table(addresses, self.control.address + COUNTER_BYTES, self.depth)

    def _use(self, table: np.ndarray | None) -> None:
        """Set the table that kernels are launched with; None: the table is not in use."""
        self.table = table
        self.order.words[round_trip.TABLE] = 0 if table is None else table.ctypes.data

    @contextmanager
    def launching(self) -> Iterator[Launching]:
        """In the block, put a kernel into the stream. Raises GivenUp."""
        with self.order:
            if self.table is None:
                raise GivenUp(f"the device tier of table {self._name} was given up")
            yield Launching(self.stream, self.table, self.control)

    def run_writer(self, ws: Workspace, done_at: int, kernel: str, teams: int, *args: Any) -> tuple[Counters, int]:
        """Run a kernel that writes, and wait for it. Returns the table's totals, and the number of rows handed back or of keys marked absent.

        `args` are the kernel's arguments between the table and the totals; it uses WRITTEN_BYTES of `ws` at `done_at`.
        """
        with self.launching() as view:
            _launch(ws, view, view.table, done_at, kernel, teams, *args)
        return _totals(ws, done_at)

    def halve(self) -> Counters:
        """Merge the upper half of the sets into the lower and free it. Returns the totals."""
        sets = self._layout.sets(self.depth - 1)
        with self._device.workspace() as ws:
            with self.launching() as view:
                _launch(ws, view, view.table, 0, "merge", sets, sets)
                last = self._segments.pop()
                self.depth -= 1
                self._use(self._described())
            totals, _ = _totals(ws, 0)  # after this no kernel uses the upper half
            last.free()
            return totals

    def double(self) -> None:
        """Double the number of sets. Raises OutOfDeviceMemory with nothing changed."""
        sets = self._layout.sets(self.depth)
        buffer = self._device.backend.alloc(self._layout.segment_bytes(self.depth + 1))
        with self._device.workspace() as ws:
            with self.launching() as view:
                self.stream.clear(buffer.address, buffer.nbytes)
                self._segments.append(buffer)
                self.depth += 1
                table = self._described()
                self._use(table)
                _launch(ws, view, table, 0, "split", sets, sets)
            _totals(ws, 0)

    def resident(self) -> list[tuple[Keys, npt.NDArray[np.uint8]]]:
        """(keys, heat) of all sets in use, in parts. For the writer: nothing else may write meanwhile."""
        return [part for segment in range(self.depth + 1) for part in self._read_segment(segment)]

    def _read_segment(self, segment: int) -> list[tuple[Keys, npt.NDArray[np.uint8]]]:
        parts = []
        sets = self._layout.segment_sets(segment)
        step = max(1, self._device.workspace_bytes // LINE_BYTES)
        for begin in range(0, sets, step):
            n = min(step, sets - begin)
            with self._device.workspace() as ws:
                staged = ws.staging(0, n * LINE_BYTES)
                with self.order:
                    self.stream.download(staged, self._segments[segment].address + begin * LINE_BYTES)
                self.stream.synchronize()
                parts.append(occupied_keys(staged.view(np.uint64).reshape(n, LINE_BYTES // 8)))
        return parts

    def read_set(self, number: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], Rows]:
        """(line, absent keys, rows at their stride) of a set in use. For the writer, as `resident`."""
        layout = self._layout
        segment = (number // layout.sets_per_region).bit_length()
        index = number - (layout.sets_per_region << (segment - 1) if segment else 0)
        sets, rows_bytes = layout.segment_sets(segment), WAYS * layout.stride
        parts = []
        for begin, each in (
            (0, LINE_BYTES),
            (LINE_BYTES * sets, ABSENT_BYTES),
            ((LINE_BYTES + ABSENT_BYTES) * sets, rows_bytes),
        ):
            with self._device.workspace() as ws:
                staged = ws.staging(0, each)
                with self.order:
                    self.stream.download(staged, self._segments[segment].address + begin + index * each)
                self.stream.synchronize()
                parts.append(staged.copy())
        return parts[0].view(np.uint64), parts[1].view(np.uint64), parts[2].reshape(WAYS, layout.stride)

    def give_up(self) -> None:
        """Stop using the table. Its memory is held until `free`, because kernels may still be running."""
        with self.order:
            self._use(None)

    def free(self) -> None:
        """Free the memory after kernels under way have ended. May be repeated.

        Frees it even if it raises DeviceError.
        """
        with self.order:
            self._use(None)
            segments, self._segments = self._segments, []
        if not segments:
            return
        self.host_registration.close()
        try:
            self.stream.synchronize()
        finally:
            for buffer in segments:
                buffer.free()
            del self.control  # its memory is freed with the last look-up that answers with the default


def _launch(
    ws: Workspace, view: Launching, table: np.ndarray, done_at: int, kernel: str, teams: int, *args: Any
) -> None:
    totals = view.control.address, ws.here(done_at + DONE_BYTES)
    ws.launch(view, done_at, kernel, teams * TEAM, table, *args, *totals)


def _totals(ws: Workspace, done_at: int) -> tuple[Counters, int]:
    """Wait for a kernel that writes. Returns the totals, and the number of listed keys or rows."""
    listed = ws.wait(done_at)
    return ws.staging(done_at + DONE_BYTES, 4, np.int64).copy(), listed
