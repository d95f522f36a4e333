"""Look-ups whose answer stays on the device: keys are uploaded once, only misses are downloaded, their
rows are uploaded in one copy.

One call is one look-up, on the caller's thread, with one workspace for each chunk; any number of threads may call. The
kernels that read the table are put into its stream together, so that no row moves after it is found and before it is
read. Misses are downloaded on the workspace's own stream while resident rows are still being gathered. Later kernels
use only the workspace and the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierstore.kernels.pool import combiner_code
from tierstore.tiers.device.backend import TEAM, Captured, DeviceError, OutOfDeviceMemory
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import ALIGN, DeviceMemory, Workspace
from tierstore.types import Combiner, Keys, States, Tier, Vectors

PADDING = 255  # the state of a key whose answer is zeros and that does not count in a bag
_EARLY = 512  # misses that are downloaded together with their number
_NULL = np.uint64(0)

# distinct keys, dtype → (rows of that dtype, states): the answer of the tiers below
Fetch = Callable[[Keys, Any], tuple[Vectors, States]]


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
) -> Any:
    """A new array of `dtype` on the device with the answer, [n, dim] or [bags, dim]; None where the device cannot.

    See `look_up`.
    """
    shape = (len(keys) if bags is None else len(bags.offsets), table.spec.dim)
    try:
        out = table.device.backend.empty(shape, dtype)
    except OutOfDeviceMemory:
        return None
    return out if look_up(table, keys, state, answered, out, fetch, bags) else None


def look_up(
    table: DeviceTable,
    keys: Keys,
    state: States,
    answered: Vectors,
    out: Any,
    fetch: Fetch,
    bags: Pooling | None = None,
) -> bool:
    """Answer every key, on the device.

    Args:
        keys: int64[n].
        state: uint8[n]: PENDING for keys to look up, PADDING for those that are zeros, else that of a key answered
            already. On return PADDING has become ABSENT and PENDING the tier that answered.
        answered: rows of the keys answered already, in their order; float32 if pooled, else of the dtype of `out`.
        out: an array on the device, from `Backend.empty`: float32 or float16 [n, dim], or [bags, dim].
        fetch: answers distinct keys that the device does not hold. Called on this thread, once a chunk.

    Returns:
        False if the device cannot answer (it has failed, the table was closed, or one bag is larger than a workspace).
        Then `state` and `out` hold anything.

    Raises:
        Captured: a CUDA graph is being captured.
    """
    work = _Work(table, keys, state, answered, out, fetch, bags)
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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


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
    ) -> None:
        self.table, self.keys, self.state, self.answered, self.fetch, self.bags = (
            table,
            keys,
            state,
            answered,
            fetch,
            bags,
        )
        self.address = table.device.backend.address_of(out)
        self.half = int(out.dtype == np.float16)
        self.out_width = table.spec.dim * (4 >> self.half)
        self.rows_dtype = np.float32 if bags is not None or not self.half else np.float16
        self.row_width = table.spec.dim * np.dtype(self.rows_dtype).itemsize
        self.answered_at = np.flatnonzero((state != Tier.PENDING) & (state != PADDING))

    def chunks(self) -> list[_Chunk] | None:
        """The parts of the look-up that fit into a workspace; None where one bag does not."""
        # keys, state, source, claims, ranks, misses, and what may be uploaded: rows, states, positions; see `_cut`
        a_key = 8 + 1 + 8 + 16 + 16 + 8 + self.row_width + 1 + 8
        room = self.table.device.workspace_bytes - 20 * ALIGN
        if self.bags is not None and not len(self.bags.offsets):
            return []
        if self.bags is None:
            step = room // a_key
            if step < 1:
                return None
            return [_Chunk(begin, min(len(self.keys), begin + step)) for begin in range(0, len(self.keys), step)]
        a_key += 4 + self.table.spec.dim * 4  # weight, row kept
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
        """Offsets in a workspace. Parts that are copied together are next to each other."""
        slots = 1 << max(1, 2 * n - 1).bit_length()
        pooled = self.bags is not None
        sizes = {
            # up at once
            "keys": n * 8, "state": n, "offsets": bags * 8, "weights": n * 4 if pooled else 0,
            # of the device alone
            "source": n * 8, "ranks": slots * 4, "kept": n * self.table.spec.dim * 4 if pooled else 0, "done": bags,
            # cleared together; the last two come down together
            "claims": slots * 4, "count": 4, "misses": n * 8,
            # up at once: states, positions and rows, see `_stage_rows`
            "up": n * (1 + 8 + self.row_width) + 2 * ALIGN,
        }  # fmt: skip
        offsets = ws.cut(*sizes.values())
        return {"slots": slots} | dict(zip(sizes, offsets, strict=True))

    def run(self, ws: Workspace, chunk: _Chunk) -> bool:
        n, bags = chunk.end - chunk.begin, chunk.last - chunk.first
        if n == 0 and bags == 0:
            return True
        at = self._cut(ws, n, bags)
        ws.stream.wait_for_caller()
        self._stage(ws, at, chunk)
        launched = self._launch(ws, at, chunk)
        if launched is None:
            ws.stream.synchronize()
            return False
        found, answered, table, buffer = launched
        ws.stream.wait(found)
        misses = self._misses(ws, at, n)
        low, high = np.searchsorted(self.answered_at, (chunk.begin, chunk.end))
        more = len(misses) + high - low
        if more:
            self._stage_rows(ws, at, chunk, misses, int(low), int(high))
        ws.stream.wait(answered)
        if more:
            self._finish(ws, at, chunk, table, len(misses), int(high - low))
        ws.download(at["state"], at["state"] + n)
        ws.stream.synchronize()
        del buffer
        state = ws.staging(at["state"], n)
        state[state == PADDING] = Tier.ABSENT
        self.state[chunk.begin : chunk.end] = state
        return True

    def _stage(self, ws: Workspace, at: dict[str, int], chunk: _Chunk) -> None:
        n, keys = chunk.end - chunk.begin, self.keys[chunk.begin : chunk.end]
        ws.staging(at["keys"], n, np.int64)[:] = keys
        ws.staging(at["state"], n)[:] = self.state[chunk.begin : chunk.end]
        if self.bags is not None:
            offsets = self.bags.offsets[chunk.first : chunk.last]
            np.subtract(offsets, chunk.begin, out=ws.staging(at["offsets"], len(offsets), np.int64))
            if self.bags.weights is not None:
                ws.staging(at["weights"], n, np.float32)[:] = self.bags.weights[chunk.begin : chunk.end]
        ws.upload(at["keys"], at["source"])

    def _launch(self, ws: Workspace, at: dict[str, int], chunk: _Chunk) -> tuple[Any, Any, np.ndarray, Any] | None:
        """Launch all kernels that read the table. Returns events: misses are found, resident rows are answered."""
        n = chunk.end - chunk.begin
        uploaded = ws.stream.record()
        with self.table.reading() as view:
            if view is None:
                return None
            stream, table, buffer = view
            stream.wait(uploaded)
            stream.clear(int(ws.at(at["claims"])), at["misses"] - at["claims"])
            stream.launch(
                "probe", n * TEAM, table, ws.at(at["keys"]), ws.at(at["state"]), np.int64(n), ws.at(at["source"]),
                ws.at(at["claims"]), np.uint64(at["slots"] - 1), ws.at(at["ranks"]), ws.at(at["misses"]),
                ws.at(at["count"]),
            )  # fmt: skip
            stream.launch("resolve", n, ws.at(at["source"]), np.int64(n), ws.at(at["ranks"]))
            found = stream.record()
            if self.bags is None:
                out = np.uint64(self.address + chunk.begin * self.out_width)
                stream.launch("gather", n * TEAM, table, ws.at(at["source"]), np.int64(n), out, np.uint32(self.half))
            else:
                stream.launch("pool", *self._pool(ws, at, chunk, table, _NULL))
            return found, stream.record(), table, buffer

    def _pool(self, ws: Workspace, at: dict[str, int], chunk: _Chunk, table: np.ndarray, rows: np.uint64) -> tuple:
        assert self.bags is not None
        count = chunk.last - chunk.first
        return (
            count * TEAM, table, ws.at(at["source"]), np.int64(chunk.end - chunk.begin), ws.at(at["offsets"]),
            np.int64(count), _NULL if self.bags.weights is None else ws.at(at["weights"]),
            np.uint32(combiner_code(self.bags.combiner)), rows, ws.at(at["kept"]), ws.at(at["done"]),
            np.uint64(self.address + chunk.first * self.out_width), np.uint32(self.half),
        )  # fmt: skip

    def _misses(self, ws: Workspace, at: dict[str, int], n: int) -> Keys:
        """The distinct keys that are not resident."""
        early = at["misses"] + min(n, _EARLY) * 8
        ws.download(at["count"], early)
        ws.stream.synchronize()
        count = int(ws.staging(at["count"], 1, np.uint32)[0])
        if count > _EARLY:
            ws.download(early, at["misses"] + count * 8)
            ws.stream.synchronize()
        return ws.staging(at["misses"], count, np.int64).copy()

    def _stage_rows(self, ws: Workspace, at: dict[str, int], chunk: _Chunk, misses: Keys, low: int, high: int) -> None:
        """Upload rows from the tiers below and rows answered before, in one copy."""
        m, g, dim = len(misses), high - low, self.table.spec.dim
        at["at"] = at["up"] + _aligned(m + g)
        at["rows"] = at["at"] + _aligned(g * 8)
        rows = ws.staging(at["rows"], (m + g) * dim, self.rows_dtype).reshape(m + g, dim)
        states = ws.staging(at["up"], m + g)
        if m:
            rows[:m], states[:m] = self.fetch(misses, self.rows_dtype)
        if g:
            positions = self.answered_at[low:high]
            rows[m:], states[m:] = self.answered[low:high], self.state[positions]
            np.subtract(positions, chunk.begin, out=ws.staging(at["at"], g, np.int64))
        ws.upload(at["up"], at["rows"] + (m + g) * self.row_width)

    def _finish(
        self, ws: Workspace, at: dict[str, int], chunk: _Chunk, table: np.ndarray, misses: int, answered: int
    ) -> None:
        n, stream, source, rows = chunk.end - chunk.begin, ws.stream, ws.at(at["source"]), ws.at(at["rows"])
        if answered:
            stream.launch("place", answered, source, ws.at(at["at"]), np.int64(answered), np.int64(misses))
        stream.launch("set_states", n, source, np.int64(n), ws.at(at["up"]), ws.at(at["state"]))
        if self.bags is None:
            out = np.uint64(self.address + chunk.begin * self.out_width)
            stream.launch("scatter", n * TEAM, table, source, np.int64(n), rows, out, np.uint32(self.half))
        else:
            stream.launch("pool", *self._pool(ws, at, chunk, table, rows))
