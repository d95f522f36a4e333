"""Look-ups whose answer stays on the device: a kernel answers what is there or in the host tier, and lists the others.

A second one, where anything is listed, answers with those rows. One call is one look-up, on the caller's thread, with
one workspace for each chunk; any number of threads may call. Kernels read keys and rows in page-locked CPU memory and
write states and lists there; many keys are copied up first. The first kernel answers with the rows that it finds, so
none moves in between; of bags that wait for others it keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierstore.kernels.pool import combiner_code
from tierstore.tiers.device.backend import TEAM, Captured, DeviceError, OutOfDeviceMemory
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import ALIGN, DONE_BYTES, NOTHING, DeviceMemory, Reading, Workspace
from tierstore.tiers.host.table import HostTable
from tierstore.types import Combiner, Keys, States, Tier, Vectors

PADDING = 255  # the state of a key whose answer is zeros and that does not count in a bag

_NONE = np.empty(0, np.int64)

# keys, which may be there several times, dtype → (rows of that dtype, states): the answer of the tiers below
Fetch = Callable[[Keys, Any], tuple[Vectors, States]]


_Where = Callable[[int], int]  # the address at which a kernel reads an offset of a workspace


@dataclass(slots=True, eq=False)
class Pooling:
    """How a look-up is pooled: offsets int64[bags] as `check_offsets` returns them, weights float32[n] or None."""

    offsets: np.ndarray
    weights: np.ndarray | None
    combiner: Combiner


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Keys [begin, end) and, where pooled, bags [first, last) of them."""

    begin: int
    end: int
    first: int = 0
    last: int = 0


def answer(
    table: DeviceTable,
    keys: Keys,
    state: States,
    answered: Vectors,
    dtype: Any,
    fetch: Fetch,
    bags: Pooling | None = None,
    host: HostTable | None = None,
) -> Any:
    """A new array of `dtype` on the device with the answer, [n, dim] or [bags, dim]; None where the device cannot.

    See `look_up`.
    """
    shape = (len(keys) if bags is None else len(bags.offsets), table.spec.dim)
    try:
        out = table.device.backend.empty(shape, dtype)
    except OutOfDeviceMemory:
        return None
    return out if look_up(table, keys, state, answered, out, fetch, bags, host) else None


def look_up(
    table: DeviceTable,
    keys: Keys,
    state: States,
    answered: Vectors,
    out: Any,
    fetch: Fetch,
    bags: Pooling | None = None,
    host: HostTable | None = None,
) -> bool:
    """Answer every key, on the device.

    Args:
        keys: int64[n].
        state: uint8[n]: PENDING for keys to look up, PADDING for those that are zeros, else that of a key answered
            already. On return PADDING has become ABSENT and PENDING the tier that answered.
        answered: rows of the keys answered already, in their order; float32 if pooled, else of the dtype of `out`.
        out: an array on the device, from `Backend.empty`: float32 or float16 [n, dim], or [bags, dim].
        fetch: answers keys that the kernel has not found. Called on this thread, once a chunk.
        host: the host tier below, which the kernel reads where it may.

    Returns:
        False if the device cannot answer (it has failed, the table was closed, or one bag is larger than a workspace).
        Then `state` and `out` hold anything.

    Raises:
        Captured: a CUDA graph is being captured.
    """
    work = _Work(table, keys, state, answered, out, fetch, bags, host)
    chunks = work.chunks()
    if chunks is None:
        return False
    try:
        for chunk in chunks:
            with table.device.workspace(answers=True) as ws:
                if not work.run(ws, chunk):
                    return False
    except OutOfDeviceMemory:
        return False
    except Captured:
        raise
    except DeviceError as error:
        table.give_up(error)
        return False
    return True


def to_device(memory: DeviceMemory, array: np.ndarray) -> Any:
    """A copy of a contiguous array on the device."""
    out = memory.backend.empty(array.shape, array.dtype)
    address, data = memory.backend.address_of(out), array.reshape(-1).view(np.uint8)
    for begin in range(0, len(data), max(1, memory.workspace_bytes)):
        part = data[begin : begin + memory.workspace_bytes]
        with memory.workspace() as ws:
            staged = ws.staging(0, len(part))
            staged[:] = part
            ws.stream.upload(address + begin, staged)
            ws.stream.synchronize()
    return out


def from_device(memory: DeviceMemory, array: Any) -> np.ndarray:
    """A copy in CPU memory of an array on the device, of any library, made after the work in the caller's stream."""
    mine = memory.backend.adopt(array)
    out = np.empty(mine.shape, mine.dtype)
    address, data = memory.backend.address_of(mine), out.reshape(-1).view(np.uint8)
    for begin in range(0, len(data), max(1, memory.workspace_bytes)):
        part = data[begin : begin + memory.workspace_bytes]
        with memory.workspace(answers=True) as ws:
            staged = ws.staging(0, len(part))
            ws.stream.wait_for_caller()
            ws.stream.download(staged, address + begin)
            ws.stream.synchronize()
            part[:] = staged
    return out


class _Work:
    """One look-up; see `look_up`."""

    def __init__(
        self,
        table: DeviceTable,
        keys: Keys,
        state: States,
        answered: Vectors,
        out: Any,
        fetch: Fetch,
        bags: Pooling | None,
        host: HostTable | None,
    ) -> None:
        self.table, self.keys, self.state, self.answered = table, keys, state, answered
        self.fetch, self.bags, self.host = fetch, bags, host
        self.address = table.device.backend.address_of(out)
        self.half = int(out.dtype == np.float16)
        self.out_width = table.spec.dim * (4 >> self.half)
        self.rows_dtype = np.float32 if bags is not None or not self.half else np.float16
        self.row_width = table.spec.dim * np.dtype(self.rows_dtype).itemsize
        self.room_width = max(self.row_width, table.layout.stride)  # of rows that were read below, decoded or as stored
        self.pending = not state.any()
        self.answered_at = _NONE if self.pending else np.flatnonzero((state != Tier.PENDING) & (state != PADDING))

    def chunks(self) -> list[_Chunk] | None:
        """The parts of the look-up that fit into a workspace; None where one bag does not."""
        a_key = 8 + 1 + 1 + 8 + 4 + self.room_width  # see `_cut`
        room = self.table.device.workspace_bytes - 20 * ALIGN
        if self.bags is not None and not len(self.bags.offsets):
            return []
        if self.bags is None:
            step = room // a_key
            if step < 1:
                return None
            return [_Chunk(begin, min(len(self.keys), begin + step)) for begin in range(0, len(self.keys), step)]
        a_key += 4 + 8 + self.table.spec.dim * 4  # weight, source, row kept
        return self._bag_chunks(room, a_key, 8 + 1)

    def _bag_chunks(self, room: int, a_key: int, a_bag: int) -> list[_Chunk] | None:
        assert self.bags is not None
        ends = np.append(self.bags.offsets[1:], len(self.keys))
        cost = ends * a_key + np.arange(1, len(ends) + 1) * a_bag  # of all bags up to and with this one
        chunks, first, spent = [], 0, 0
        while first < len(ends):
            last = int(np.searchsorted(cost, spent + room, side="right"))
            if last == first:
                return None
            chunks.append(_Chunk(int(self.bags.offsets[first]), int(ends[last - 1]), first, last))
            first, spent = last, int(cost[last - 1])
        return chunks

    def _cut(self, ws: Workspace, n: int, bags: int) -> dict[str, int]:
        """Offsets in a workspace."""
        pooled = self.bags is not None
        sizes = {
            # read by kernels, where they lie or after one copy up
            "keys": n * 8, "before": n, "offsets": bags * 8, "weights": n * 4 if pooled else 0,
            # in CPU memory alone; but on the device `rows` are those that a kernel has read in the host tier
            "state": n, "missing": n * 8, "at": n * 4, "rows": n * self.room_width, "done": DONE_BYTES,
            # on the device alone
            "source": n * 8 if pooled else 0, "kept": n * self.table.spec.dim * 4 if pooled else 0, "whole": bags,
        }  # fmt: skip
        return dict(zip(sizes, ws.cut(*sizes.values()), strict=True))

    def run(self, ws: Workspace, chunk: _Chunk) -> bool:
        n, bags = chunk.end - chunk.begin, chunk.last - chunk.first
        if n == 0 and bags == 0:
            return True
        at = self._cut(ws, n, bags)
        self._stage(ws, at, chunk)
        with self.table.reading() as view:
            if view is None:
                return False
            view.stream.wait_for_caller()
            where = ws.send(view.stream, at["keys"], at["state"])
            kernel, threads, *args = self._first(ws, at, chunk, view, where)
            ws.launch(view, at["done"], kernel, threads, *args)
        listed = ws.wait(at["done"])
        if self.host is not None:
            self.host.note_answered(ws.staging(at["keys"], n, np.int64), ws.staging(at["state"], n))
        if listed:
            self._stage_rows(ws, at, chunk, listed)
            with self.table.reading() as view:
                if view is None:
                    return False
                kernel, threads, *args = self._second(ws, at, chunk, view.table, where, listed)
                ws.launch(view, at["done"], kernel, threads, *args)
            ws.wait(at["done"])
        self.state[chunk.begin : chunk.end] = ws.staging(at["state"], n)
        return True

    def _stage(self, ws: Workspace, at: dict[str, int], chunk: _Chunk) -> None:
        n = chunk.end - chunk.begin
        ws.staging(at["keys"], n, np.int64)[:] = self.keys[chunk.begin : chunk.end]
        if not self.pending:
            ws.staging(at["before"], n)[:] = self.state[chunk.begin : chunk.end]
        if self.bags is not None:
            offsets = self.bags.offsets[chunk.first : chunk.last]
            np.subtract(offsets, chunk.begin, out=ws.staging(at["offsets"], len(offsets), np.int64))
            if self.bags.weights is not None:
                ws.staging(at["weights"], n, np.float32)[:] = self.bags.weights[chunk.begin : chunk.end]

    def _first(self, ws: Workspace, at: dict[str, int], chunk: _Chunk, view: Reading, where: _Where) -> tuple:
        """The kernel that answers what is here: its name, threads and arguments."""
        n = chunk.end - chunk.begin
        before = NOTHING if self.pending else where(at["before"])
        common = (
            view.table, view.window.words_of(self.host), where(at["keys"]), before, ws.here(at["state"]), n,
            ws.here(at["missing"]), ws.here(at["at"]), ws.at(at["rows"]),
        )  # fmt: skip
        if self.bags is None:
            return "look_up", -(-n // 2) * TEAM, *common, self._out(chunk.begin), self.half
        count = chunk.last - chunk.first
        return (
            "pool", count * TEAM, *common, *self._bags(at, count, where), ws.at(at["source"]), ws.at(at["kept"]),
            ws.at(at["whole"]), self._out(chunk.first), self.half,
        )  # fmt: skip

    def _second(
        self, ws: Workspace, at: dict[str, int], chunk: _Chunk, table: np.ndarray, where: _Where, listed: int
    ) -> tuple:
        """The kernel that answers what was listed, as `_first`."""
        rows, half = ws.here(at["rows"]), self.half
        if self.bags is None:
            out, dim = self._out(chunk.begin), self.table.spec.dim
            return "put_rows", listed * TEAM, rows, ws.here(at["at"]), listed, out, dim, half
        count = chunk.last - chunk.first
        return (
            "pool_waiting", count * TEAM, table, chunk.end - chunk.begin, *self._bags(at, count, where),
            ws.at(at["source"]), ws.at(at["kept"]), ws.at(at["whole"]), rows, self._out(chunk.first), half,
        )  # fmt: skip

    def _bags(self, at: dict[str, int], count: int, where: _Where) -> tuple:
        """Arguments that say how rows are pooled."""
        assert self.bags is not None
        weights = NOTHING if self.bags.weights is None else where(at["weights"])
        return where(at["offsets"]), count, weights, combiner_code(self.bags.combiner)

    def _out(self, first: int) -> int:
        """The address of a vector of the answer."""
        return self.address + first * self.out_width

    def _stage_rows(self, ws: Workspace, at: dict[str, int], chunk: _Chunk, listed: int) -> None:
        """Put the rows of the listed keys, from the tiers below or answered before, where a kernel reads them."""
        state = ws.staging(at["state"], chunk.end - chunk.begin)
        positions = ws.staging(at["at"], listed, np.uint32)
        missing = ws.staging(at["missing"], listed, np.int64)
        rows = ws.staging(at["rows"], listed * self.table.spec.dim, self.rows_dtype).reshape(listed, -1)
        if self.pending:
            rows[:], state[positions] = self.fetch(missing.copy(), self.rows_dtype)
            return
        was = self.state[chunk.begin + positions.astype(np.int64)]
        wanted, given = np.flatnonzero(was == Tier.PENDING), np.flatnonzero(was != Tier.PENDING)
        if len(wanted):
            rows[wanted], state[positions[wanted]] = self.fetch(missing[wanted], self.rows_dtype)
        if len(given):
            rows[given] = self.answered[
                np.searchsorted(self.answered_at, chunk.begin + positions[given].astype(np.int64))
            ]
            state[positions[given]] = was[given]
