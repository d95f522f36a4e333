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
from tierstore.tiers.device import reports, round_trip
from tierstore.tiers.device.backend import TEAM, WARP, Buffer, Captured, DeviceError, OutOfDeviceMemory
from tierstore.tiers.device.driver_calls import NOBODY
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import ALIGN, NOTHING, DeviceMemory, Workspace
from tierstore.tiers.host.table import HostTable
from tierstore.types import Combiner, Keys, States, Tier, Vectors

PADDING = 255  # the state of a key that is answered with zeros and does not count in a bag

_NONE, _NO_WEIGHTS = np.empty(0, np.int64), np.empty(0, np.float32)

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

    `hold` keeps the tiers below as they are, and returns what ends that. `after` gets (keys, states), which are not kept, on any thread, and
    returns how many the host tier has answered; it is not called if rows could not be read. `begun`: whether the look-up was put off; otherwise it is complete when the call returns.
    """

    hold: Callable[[], Callable[[], None]]
    after: Callable[[Keys, States], int]
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
                keys = ws.part(round_trip.AT_ROWS, end - begin, np.int64)
                ws.stream.download(keys, self.there.address + 8 * begin)
                ws.stream.synchronize()
            self.host.note_answered(keys, ws.part(round_trip.AT_STATE, end - begin))
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
        table, bags, there = self.table, self.bags, self.there
        memory, device = table.memory, table.device
        if memory is None:
            return round_trip.NOT_IN_USE
        begin, end, first_bag, last_bag = chunk
        keys, state, kernels = self.keys, self.state, device.driver.kernels
        if end - begin != len(state):
            keys, state = keys[begin:end], state[begin:end]
        kernel, second, offsets, weights, combiner, first = "look_up", "put_rows", _NONE, _NO_WEIGHTS, 0, begin
        if bags is not None:
            kernel, second, combiner, first = "pool", "pool_waiting", combiner_code(bags.combiner), first_bag
            offsets = bags.offsets[first_bag:last_bag]
            weights = _NO_WEIGHTS if bags.weights is None else bags.weights[begin:end]
        ws.set_job(
            kernels[kernel], *device.backend.callers(), self.of, self.address + first * self.out_width, self.half,
            self.room_width, table.spec.dim, begin, combiner, 0 if there is None else there.address + 8 * begin,
            kernels[second] if put_off else 0,
        )  # fmt: skip
        said: int = round_trip.look_up(device.driver.calls, memory.order.words, ws.frame, keys, state, offsets, weights)
        if said < 0 and said != round_trip.NOT_IN_USE:
            device.driver.check(round_trip.FAILED - said)
        return said

    def _answer_listed(self, ws: Workspace, chunk: _Chunk, listed: int) -> bool:
        """Put the rows of the listed keys to their places, or pool the bags that waited for them."""
        self.stage_rows(ws, chunk, listed)
        done_at = int(ws.frame[round_trip.AT_DONE])
        with self.table.reading() as view:
            if view is None:
                return False
            kernel, threads, *args = self._second(ws, chunk, view.table, listed)
            ws.launch(view, done_at, kernel, threads, *args)
        ws.wait(done_at)
        self.state[chunk.begin : chunk.end] = ws.part(round_trip.AT_STATE, chunk.end - chunk.begin)
        return True

    def _second(self, ws: Workspace, chunk: _Chunk, table: np.ndarray, listed: int) -> tuple:
        """The second kernel, which answers listed keys: its name, threads and arguments."""
        at, half = ws.frame.tolist(), self.half
        rows = ws.here(at[round_trip.AT_ROWS])
        if self.bags is None:
            out, dim = self.address + chunk.begin * self.out_width, self.table.spec.dim
            places = ws.here(at[round_trip.AT_PLACES])
            return "put_rows", listed * TEAM, rows, places, listed, NOTHING, out, dim, half
        where = ws.at if at[round_trip.COPIED] else ws.here
        count, out = chunk.last - chunk.first, self.address + chunk.first * self.out_width
        weights = NOTHING if self.bags.weights is None else where(at[round_trip.AT_WEIGHTS])
        return (
            "pool_waiting", count * WARP, table, chunk.end - chunk.begin, where(at[round_trip.AT_OFFSETS]), count, weights,
            combiner_code(self.bags.combiner), ws.at(at[round_trip.AT_SOURCE]), ws.at(at[round_trip.AT_KEPT]),
            ws.at(at[round_trip.AT_WHOLE]), rows, out, half,
        )  # fmt: skip

    def stage_rows(self, ws: Workspace, chunk: _Chunk, listed: int) -> None:
        """Put the rows of the listed keys (read below or answered before) where a kernel reads them."""
        state = ws.part(round_trip.AT_STATE, chunk.end - chunk.begin)
        positions = ws.part(round_trip.AT_PLACES, listed, np.uint32)
        missing = ws.part(round_trip.AT_MISSING, listed, np.int64)
        rows = self.room_of_rows(ws, listed)
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

    def room_of_rows(self, ws: Workspace, listed: int) -> np.ndarray:
        """Where a kernel reads the rows of listed keys: [listed, dim]."""
        dim = self.table.spec.dim
        return ws.part(round_trip.AT_ROWS, listed * dim, self.row_dtype).reshape(listed, dim)


class _PutOff:
    """A look-up in the caller's stream, as an `UnderWay`. `control`: memory that its second kernel reads, kept until then."""

    __slots__ = (
        "_chunk", "_control", "_failed", "_held", "_listed", "_stream", "_unwaited", "_work", "_ws", "number", "report",
    )  # fmt: skip

    def __init__(
        self, work: _Work, ws: Workspace, chunk: _Chunk, stream: int, unwaited: Unwaited, control: Buffer
    ) -> None:
        self._work, self._ws, self._chunk, self._stream, self._unwaited = work, ws, chunk, stream, unwaited
        self._control, self._listed, self._failed = control, 0, False
        self._held = [unwaited.hold()]  # empty once that is released
        self.number, self.report = ws.number, ws.here(int(ws.frame[round_trip.AT_DONE]))

    def answer_missing(self, listed: int, failed: Callable[[int, Exception], None]) -> None:
        self._listed = listed
        try:
            if not self._held:
                raise StorageError("the device has failed")
            self._work.stage_rows(self._ws, self._chunk, listed)
        except Exception as error:  # noqa: BLE001 - raised for the caller
            self._failed = True
            self._work.room_of_rows(self._ws, listed)[:] = np.nan
            failed(self._stream, error)
        finally:
            reports.say(self.report, reports.WHOLE | listed << 32)  # after this, others may end it

    def end(self) -> None:
        try:
            if self._held and not self._failed:
                self._count()
        finally:
            self._ws.give_back()
            self._release()

    def _count(self) -> None:
        n, host, ws = self._chunk.end - self._chunk.begin, self._work.host, self._ws
        keys = ws.part(round_trip.AT_KEYS if self._work.there is None else round_trip.AT_ROWS, n, np.int64)
        state = ws.part(round_trip.AT_STATE, n)
        from_host = self._unwaited.after(keys, state)
        if (
            from_host and host is not None and not self._listed
        ):  # otherwise the host tier has noted what it was asked for
            host.note_answered(keys, state)

    def forsake(self) -> bool:
        if self._work.table.is_in_use:
            return False
        self._release()
        return True

    def _release(self) -> None:
        try:
            release = self._held.pop()  # by one of two threads
        except IndexError:
            return
        release()
