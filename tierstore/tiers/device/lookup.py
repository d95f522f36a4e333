"""Look-ups whose answer stays on the device: one kernel answers the keys that the device or host tier has, and lists the others.

If keys are listed, a second kernel answers them with rows from the tiers below. A call is one look-up, on the caller's thread, with one workspace for
each chunk; any number of threads may call. Kernels read keys and rows in page-locked CPU memory and write states and lists there; many keys are
copied up first. The first kernel writes the rows that it finds to the answer, or, for bags that wait for listed keys, to the workspace.

A caller that says in which stream it reads the answer need not wait: a look-up of one chunk is put off (`Unwaited`), and a thread ends it (`later.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tierstore.errors import StorageError
from tierstore.kernels.pool import combiner_code
from tierstore.tiers.device import round_trip
from tierstore.tiers.device.backend import TEAM, WARP, Buffer, Captured, DeviceError, OutOfDeviceMemory
from tierstore.tiers.device.driver_calls import NOBODY
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import ALIGN, NOTHING, DeviceMemory, Workspace
from tierstore.tiers.host.table import HostTable
from tierstore.types import Combiner, Keys, States, Tier, Vectors

PADDING = 255  # the state of a key that is answered with zeros and does not count in a bag

_NONE, _NO_WEIGHTS = np.empty(0, np.int64), np.empty(0, np.float32)
_PARTS = (
    "keys", "offsets", "weights", "before", "state", "missing", "places", "rows", "done", "source", "kept", "whole",
)  # fmt: skip

# answers of the tiers below: (keys, with repeats; dtype) → (rows of that dtype, states)
Fetch = Callable[[Keys, Any], tuple[Vectors, States]]


@dataclass(slots=True, eq=False)
class Pooling:
    """The pooling of a look-up: offsets int64[bags] as `check_offsets` returns them, weights float32[n] or None."""

    offsets: np.ndarray
    weights: np.ndarray | None
    combiner: Combiner


@dataclass(slots=True, eq=False)
class Unwaited:
    """A look-up whose caller does not wait: its answer is complete in the order of the caller's stream.

    `hold` keeps the tiers below as they are, and returns what ends that. `after` gets (keys, states), which are not kept, on another thread; it is
    not called if rows could not be read. `begun`: whether the look-up was put off; otherwise it is complete when the call returns.
    """

    hold: Callable[[], Callable[[], None]]
    after: Callable[[Keys, States], None]
    begun: bool = False


@dataclass(slots=True, eq=False)
class KeysThere:
    """Codes int64[n] in device memory, valid after the work in the caller's stream."""

    array: Any  # from `Backend.adopt`
    address: int

    def __len__(self) -> int:
        return int(self.array.shape[0])


class _Chunk(NamedTuple):
    """A part of a look-up: keys [begin, end) and, if pooled, their bags [first, last)."""

    begin: int
    end: int
    first: int = 0
    last: int = 0


def answer(
    table: DeviceTable,
    keys: Keys | KeysThere,
    state: States,
    answered: Vectors,
    dtype: Any,
    fetch: Fetch,
    bags: Pooling | None = None,
    host: HostTable | None = None,
    unwaited: Unwaited | None = None,
) -> Any:
    """A new array of `dtype` on the device with the answer, [n, dim] or [bags, dim]; None if the device cannot answer.

    See `look_up`.
    """
    shape = (len(keys) if bags is None else len(bags.offsets), table.spec.dim)
    try:
        out = table.device.backend.empty(shape, dtype)
    except OutOfDeviceMemory:
        return None
    return out if look_up(table, keys, state, answered, out, fetch, bags, host, unwaited) else None


def look_up(
    table: DeviceTable,
    keys: Keys | KeysThere,
    state: States,
    answered: Vectors,
    out: Any,
    fetch: Fetch,
    bags: Pooling | None = None,
    host: HostTable | None = None,
    unwaited: Unwaited | None = None,
) -> bool:
    """Answer every key, on the device.

    Args:
        keys: int64[n]; on the device only if none is answered yet and none is PADDING.
        state: uint8[n]: PENDING for keys to look up, PADDING for zeros, otherwise the state of a key that is answered
            already. On return PADDING has become ABSENT, and PENDING the tier that answered.
        answered: rows of the keys answered already, in their order; float32 if pooled, else of the dtype of `out`.
        out: an array on the device, from `Backend.empty`: float32 or float16 [n, dim], or [bags, dim].
        fetch: answers keys that the kernel has not found. Called on this thread, once a chunk.
        host: the host tier below, which the kernel reads if it may.
        unwaited: do not wait, if possible; then `state` is not written.

    Returns:
        False if the device cannot answer (it has failed, the table was closed, or one bag is larger than a workspace).
        Then `state` and `out` are undefined.

    Raises:
        Captured: a CUDA graph is being captured. StorageError: an earlier look-up in the caller's stream, that was put off, has failed.
    """
    work = _Work(table, keys, state, answered, out, fetch, bags, host)
    chunks = work.chunks()
    if chunks is None:
        return False
    finisher, stream = table.device.finisher, NOBODY
    if unwaited is not None and finisher is not None and len(chunks) == 1:
        stream = table.device.backend.callers()[0]
        if stream != NOBODY:
            finisher.prepare(stream)
    try:
        for chunk in chunks:
            with table.device.workspace(answers=True) as ws:
                if unwaited is None or finisher is None or stream == NOBODY:
                    if not work.run(ws, chunk):
                        return False
                elif (begun := work.put_off(ws, chunk, stream, unwaited)) is None:
                    return False
                else:
                    finisher.add(begun)
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
    """The state of one look-up; see `look_up`."""

    __slots__ = (
        "address", "answered", "answered_at", "bags", "fetch", "half", "host", "keys", "of", "out_width", "room_width",
        "row_dtype", "state", "table", "there",
    )  # fmt: skip

    def __init__(
        self,
        table: DeviceTable,
        keys: Keys | KeysThere,
        state: States,
        answered: Vectors,
        out: Any,
        fetch: Fetch,
        bags: Pooling | None,
        host: HostTable | None,
    ) -> None:
        self.table, self.state, self.answered = table, state, answered
        self.there = keys if isinstance(keys, KeysThere) else None
        self.keys: Keys = _NONE if isinstance(keys, KeysThere) else np.ascontiguousarray(keys)
        self.fetch, self.bags, self.host = fetch, bags, host
        self.of = 0 if host is None else id(host)
        self.address = table.device.backend.address_of(out)
        self.half = int(out.dtype.itemsize == 2)
        self.out_width = table.spec.dim * (4 >> self.half)
        self.row_dtype = np.float32 if bags is not None or not self.half else np.float16
        row_width = table.spec.dim * (2 if self.row_dtype is np.float16 else 4)
        self.room_width = max(row_width, table.layout.stride)  # of rows from the tiers below, decoded or as stored
        self.answered_at = _NONE
        if len(answered):
            self.answered_at = np.flatnonzero((state != Tier.PENDING) & (state != PADDING))

    def chunks(self) -> list[_Chunk] | None:
        """The look-up cut into parts that fit a workspace; None if one bag does not."""
        a_key = 8 + 1 + 1 + 8 + 4 + self.room_width  # as `round_trip.py` divides a workspace
        room = self.table.device.workspace_bytes - 20 * ALIGN
        n = len(self.state)
        if self.bags is None:
            if 0 < n * a_key <= room:
                return [_Chunk(0, n)]
            step = room // a_key
            if step < 1:
                return None
            return [_Chunk(begin, min(n, begin + step)) for begin in range(0, n, step)]
        a_key, a_bag = a_key + 4 + 8 + self.table.spec.dim * 4, 8 + 1  # weight, source, row kept
        count = len(self.bags.offsets)
        if n * a_key + count * a_bag <= room:
            return [_Chunk(0, n, 0, count)] if count else []
        return self._bag_chunks(room, a_key, a_bag)

    def _bag_chunks(self, room: int, a_key: int, a_bag: int) -> list[_Chunk] | None:
        assert self.bags is not None
        ends = np.append(self.bags.offsets[1:], len(self.state))
        cost = ends * a_key + np.arange(1, len(ends) + 1) * a_bag  # of all bags up to and including this one
        chunks, first, spent = [], 0, 0
        while first < len(ends):
            last = int(np.searchsorted(cost, spent + room, side="right"))
            if last == first:
                return None
            chunks.append(_Chunk(int(self.bags.offsets[first]), int(ends[last - 1]), first, last))
            first, spent = last, int(cost[last - 1])
        return chunks

    def run(self, ws: Workspace, chunk: _Chunk) -> bool:
        said = self._launch(ws, chunk)
        if said == round_trip.NOT_IN_USE:
            return False
        begin, end, *_ = chunk
        if said and self.host is not None:
            keys = self.keys[begin:end]
            if self.there is not None:  # to CPU memory, from where rows are put to their places later, if there are any
                keys = ws.staging(int(ws.frame[round_trip.AT_ROWS]), end - begin, np.int64)
                ws.stream.download(keys, self.there.address + 8 * begin)
                ws.stream.synchronize()
            self.host.note_answered(keys, ws.staging(int(ws.frame[round_trip.AT_STATE]), end - begin))
        return said < 2 or self._answer_listed(ws, chunk, said // 2)

    def put_off(self, ws: Workspace, chunk: _Chunk, stream: int, unwaited: Unwaited) -> _PutOff | None:
        """`run` without waiting. None if the table is not in use."""
        memory = self.table.memory
        if memory is None or self._launch(ws, chunk, put_off=True) == round_trip.NOT_IN_USE:
            return None
        ws.leave()
        unwaited.begun = True
        return _PutOff(self, ws, chunk, stream, unwaited, memory.control)

    def _launch(self, ws: Workspace, chunk: _Chunk, *, put_off: bool = False) -> int:
        """The compiled call, with its result."""
        memory, bags = self.table.memory, self.bags
        if memory is None:
            return round_trip.NOT_IN_USE
        begin, end, *_ = chunk
        keys, state = self.keys[begin:end], self.state[begin:end]
        kernel, second, offsets, weights, combiner, first = "look_up", "put_rows", _NONE, _NO_WEIGHTS, 0, begin
        if bags is not None:
            kernel, second, combiner, first = "pool", "pool_waiting", combiner_code(bags.combiner), chunk.first
            offsets = bags.offsets[chunk.first : chunk.last]
            weights = _NO_WEIGHTS if bags.weights is None else bags.weights[begin:end]
        device = self.table.device
        ws.job[:] = (
            device.driver.kernels[kernel], *device.backend.callers(), self.of, self.address + first * self.out_width,
            self.half, self.room_width, self.table.spec.dim, begin, combiner,
            0 if self.there is None else self.there.address + 8 * begin,
            device.driver.kernels[second] if put_off else 0,
        )  # fmt: skip
        calls, order = device.driver.calls, memory.order.words
        said = int(round_trip.look_up(calls, order, ws.frame, keys, state, offsets, weights))
        if said < 0 and said != round_trip.NOT_IN_USE:
            device.driver.check(round_trip.FAILED - said)
        return said

    def _answer_listed(self, ws: Workspace, chunk: _Chunk, listed: int) -> bool:
        """Put the rows of the listed keys to their places, or pool the bags that waited for them."""
        at = _parts_of(ws)
        self.stage_rows(ws, at, chunk, listed)
        with self.table.reading() as view:
            if view is None:
                return False
            kernel, threads, *args = self._second(ws, at, chunk, view.table, listed)
            ws.launch(view, at["done"], kernel, threads, *args)
        ws.wait(at["done"])
        self.state[chunk.begin : chunk.end] = ws.staging(at["state"], chunk.end - chunk.begin)
        return True

    def _second(self, ws: Workspace, at: dict[str, int], chunk: _Chunk, table: np.ndarray, listed: int) -> tuple:
        """The second kernel, which answers listed keys: its name, threads and arguments."""
        rows, half = ws.here(at["rows"]), self.half
        if self.bags is None:
            out, dim = self.address + chunk.begin * self.out_width, self.table.spec.dim
            return "put_rows", listed * TEAM, rows, ws.here(at["places"]), listed, NOTHING, out, dim, half
        where = ws.at if ws.frame[round_trip.COPIED] else ws.here
        count, out = chunk.last - chunk.first, self.address + chunk.first * self.out_width
        weights = NOTHING if self.bags.weights is None else where(at["weights"])
        return (
            "pool_waiting", count * WARP, table, chunk.end - chunk.begin, where(at["offsets"]), count, weights,
            combiner_code(self.bags.combiner), ws.at(at["source"]), ws.at(at["kept"]), ws.at(at["whole"]), rows, out,
            half,
        )  # fmt: skip

    def stage_rows(self, ws: Workspace, at: dict[str, int], chunk: _Chunk, listed: int) -> None:
        """Put the rows of the listed keys (read below or answered before) where a kernel reads them."""
        state = ws.staging(at["state"], chunk.end - chunk.begin)
        positions = ws.staging(at["places"], listed, np.uint32)
        missing = ws.staging(at["missing"], listed, np.int64)
        rows = ws.staging(at["rows"], listed * self.table.spec.dim, self.row_dtype).reshape(listed, -1)
        if not len(self.answered_at):
            rows[:], state[positions] = self.fetch(missing.copy(), self.row_dtype)
            return
        was = self.state[chunk.begin + positions.astype(np.int64)]
        wanted, given = np.flatnonzero(was == Tier.PENDING), np.flatnonzero(was != Tier.PENDING)
        if len(wanted):
            rows[wanted], state[positions[wanted]] = self.fetch(missing[wanted], self.row_dtype)
        if len(given):
            rows[given] = self.answered[
                np.searchsorted(self.answered_at, chunk.begin + positions[given].astype(np.int64))
            ]
            state[positions[given]] = was[given]


def _parts_of(ws: Workspace) -> dict[str, int]:
    """The offsets of a workspace's parts, by name."""
    return dict(zip(_PARTS, ws.frame[round_trip.AT : round_trip.COPIED].tolist(), strict=True))


class _PutOff:
    """A look-up in the caller's stream, as an `UnderWay`. `control`: memory that its second kernel reads, kept until then."""

    __slots__ = (
        "_at", "_chunk", "_control", "_failed", "_listed", "_release", "_report", "_stream", "_unwaited", "_work", "_ws",
        "word",
    )  # fmt: skip

    def __init__(
        self, work: _Work, ws: Workspace, chunk: _Chunk, stream: int, unwaited: Unwaited, control: Buffer
    ) -> None:
        self._work, self._ws, self._chunk, self._stream, self._unwaited = work, ws, chunk, stream, unwaited
        self._control, self._at, self._listed, self._failed = control, _parts_of(ws), 0, False
        self._release: Callable[[], None] | None = unwaited.hold()
        self.word = self._report = ws.here(self._at["done"])

    def _part(self, name: str, count: int, dtype: Any = np.uint8) -> np.ndarray:
        return self._ws.staging(self._at[name], count, dtype)

    def answer_missing(self, failed: Callable[[int, Exception], None]) -> None:
        if self.word != self._report or not (said := int(round_trip.said(self._report))):
            return
        self._listed = said >> 32
        try:
            if self._listed:
                self._read_missing()
        except Exception as error:  # noqa: BLE001 - raised for the caller
            self._failed = True
            self._part("rows", self._listed * self._work.table.spec.dim, self._work.row_dtype)[:] = np.nan
            failed(self._stream, error)
        finally:
            round_trip.say(self._report, round_trip.WHOLE | self._listed << 32)
            self.word += round_trip.OVER

    def _read_missing(self) -> None:
        if self._release is None:
            raise StorageError("the device has failed")
        self._work.stage_rows(self._ws, self._at, self._chunk, self._listed)

    def end(self) -> None:
        if self.word == self._report or not round_trip.said(self.word):
            return
        try:
            if not self._failed and self._release is not None:
                self._count()
        finally:
            self._ws.give_back()
            self.word = 0
            self.forsake()

    def _count(self) -> None:
        n, there, host = self._chunk.end - self._chunk.begin, self._work.there, self._work.host
        keys, state = self._part("keys" if there is None else "rows", n, np.int64), self._part("state", n)
        if host is not None and not self._listed:  # otherwise the host tier has noted what it was asked for
            host.note_answered(keys, state)
        self._unwaited.after(keys, state)

    def forsake(self) -> bool:
        if self.word and self._work.table.is_in_use:
            return False
        if self._release is not None:
            self._release()
            self._release = None
        return True
