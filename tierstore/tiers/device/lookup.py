"""Look-ups whose answer stays on the device: one kernel answers the keys that the device or host tier has, and lists the others.

If keys are listed, a second kernel answers them with rows from the tiers below. A call is one look-up, on the caller's thread, with one workspace for
each chunk; any number of threads may call. Kernels read keys and rows in page-locked CPU memory and write states and lists there; many keys are
copied up first. The first kernel writes the rows that it finds to the answer, or, for bags that wait for listed keys, to the workspace.

A caller that says in which stream it reads the answer need not wait: a look-up of one chunk is put off (`PendingLookup`), and a thread ends it (`later.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tierstore.errors import InvalidInput, StorageError
from tierstore.kernels.pool import check_offsets, combiner_code
from tierstore.tiers.device import reports, round_trip
from tierstore.tiers.device.backend import Buffer, Captured, DeviceError, OutOfDeviceMemory
from tierstore.tiers.device.later import Finisher
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import ALIGN, DeviceMemory, Workspace
from tierstore.tiers.host.table import HostTable
from tierstore.types import Combiner, GpuArray, Keys, States, Tier, Vectors

PADDING = 255  # the state of the padding key, which is answered with zeros and does not count in a bag

_ROWS, _BAGS = ("look_up", "put_rows"), ("pool", "pool_waiting")  # the two kernels of a look-up
_AT_ONCE = 2  # parts of one look-up: one is finished while the next is on the device
_NONE, _NO_WEIGHTS = np.empty(0, np.int64), np.empty(0, np.float32)

# answers of the tiers below: (keys, with repeats; dtype) → (rows of that dtype, states)
Fetch = Callable[[Keys, Any], tuple[Vectors, States]]


@dataclass(slots=True, eq=False)
class Pooling:
    """The pooling of a look-up: offsets int64[bags], weights float32[n] or None.

    They may be `GpuArray`, if the keys are. Offsets on the CPU are as `check_offsets` returns them; those on the device are
    checked by the kernel.
    """

    offsets: Any
    weights: Any
    combiner: Combiner

    def here(self, memory: DeviceMemory, n: int) -> Pooling:
        """The same in CPU memory, checked for `n` keys. InvalidInput."""
        offsets, weights = (
            from_device(memory, one) if isinstance(one, GpuArray) else one for one in (self.offsets, self.weights)
        )
        return Pooling(check_offsets(offsets, n), weights, self.combiner)


@dataclass(slots=True, eq=False)
class PendingLookup:
    """A look-up whose caller does not wait: its answer is complete in the order of the caller's stream.

    `hold` keeps the tiers below as they are, and returns what ends that. `after` gets (keys, states), which are not kept, on any thread, and
    returns how many the host tier has answered; it is not called if rows could not be read. `begun`: whether the look-up was put off; otherwise it is complete when the call returns.
    """

    hold: Callable[[], Callable[[], None]]
    after: Callable[[Keys, States], int]
    begun: bool = False


class OtherTiers(NamedTuple):
    """Where a look-up on the device finds the rows that the device tier lacks.

    fetch: answers keys that the kernel has not found; of keys on the device, overlays may have these. Called on the thread that calls `finish`, once a
        chunk.
    host: the host tier below, which the kernel reads if it may.
    overlays: addresses int64[m] of overlays, newest first, which are kept alive until `finish` has returned.
    filters: the bytes of the overlays' filters.
    """

    fetch: Fetch
    host: HostTable | None = None
    overlays: Keys = _NONE
    filters: int = 0


class _Chunk(NamedTuple):
    """A part of a look-up: keys [begin, end) and, if pooled, their bags [first, last)."""

    begin: int
    end: int
    first: int = 0
    last: int = 0


def look_up_into(
    out: GpuArray | np.dtype[Any],
    table: DeviceTable,
    keys: Keys | GpuArray,
    state: States,
    tiers: OtherTiers,
    bags: Pooling | None = None,
    padding: int | None = None,
) -> LookUp | None:
    """A look-up into `out`, or into a new array of that dtype, [n, dim] or [bags, dim]; None if the device has no room for one.

    Arguments as of `LookUp`, errors as of `Backend.empty`.
    """
    backend = table.device.backend
    if isinstance(out, GpuArray):
        backend.check_capture()
    else:
        shape = len(keys) if bags is None else len(bags.offsets), table.spec.dim
        try:
            out = GpuArray.of(backend, backend.empty(shape, out))
        except OutOfDeviceMemory:
            return None
    return LookUp(table, keys, state, out, tiers, bags, padding)


def to_device(memory: DeviceMemory, array: np.ndarray, there: GpuArray | None = None) -> Any:
    """A copy of a contiguous array on the device, made after the work in the caller's stream; with `there`, in it."""
    out = memory.backend.empty(array.shape, array.dtype) if there is None else there.array
    address = memory.backend.address_of(out) if there is None else there.address
    data = array.reshape(-1).view(np.uint8)
    for begin in range(0, len(data), max(1, memory.workspace_bytes)):
        part = data[begin : begin + memory.workspace_bytes]
        with memory.workspace() as ws:
            staged = ws.staging(0, len(part))
            staged[:] = part
            ws.stream.wait_for_caller()
            ws.stream.upload(address + begin, staged)
            ws.stream.synchronize()
    return out


def from_device(memory: DeviceMemory, array: Any) -> np.ndarray:
    """A copy in CPU memory of an array on the device, of any library, made after the work in the caller's stream."""
    mine = array if isinstance(array, GpuArray) else GpuArray.of(memory.backend, memory.backend.adopt(array))
    out = np.empty(mine.shape, mine.dtype)
    address, data = mine.address, out.reshape(-1).view(np.uint8)
    for begin in range(0, len(data), max(1, memory.workspace_bytes)):
        part = data[begin : begin + memory.workspace_bytes]
        with memory.workspace(answers=True) as ws:
            staged = ws.staging(0, len(part))
            ws.stream.wait_for_caller()
            ws.stream.download(staged, address + begin)
            ws.stream.synchronize()
            part[:] = staged
    return out


class LookUp:
    """One look-up, which is made by `finish`. `out`: the answer.

    Args:
        keys: int64[n].
        state: uint8[n], which gets the tier that answered, or PADDING.
        out: float32 or float16 [n, dim], or [bags, dim].
        padding: the padding key, if there is one.
    """

    __slots__ = (
        "_address", "_begun", "_fetch", "_filters", "_half", "_keys", "_of", "_out_width", "_overlays", "_padding", "_room_width", "_row_dtype",
        "_state", "_todo", "bags", "host", "out", "table", "there",
    )  # fmt: skip

    def __init__(
        self,
        table: DeviceTable,
        keys: Keys | GpuArray,
        state: States,
        out: GpuArray,
        tiers: OtherTiers,
        bags: Pooling | None = None,
        padding: int | None = None,
    ) -> None:
        self._fetch, self.host, overlays, filters = tiers
        self.table, self._state, self._overlays, self._padding = table, state, overlays, padding
        self.out: GpuArray | None = out
        self.there = keys if isinstance(keys, GpuArray) else None
        self._keys: Keys = _NONE if isinstance(keys, GpuArray) else np.ascontiguousarray(keys)
        self.bags, self._of = bags, 0 if self.host is None else id(self.host)
        self._filters = 0 if self.there is None or not overlays.size else filters + 8 * (overlays.size + 1)
        self._address = out.address
        self._half = int(out.dtype.itemsize == 2)
        self._out_width = table.spec.dim * (4 >> self._half)
        self._row_dtype = np.float32 if bags is not None or not self._half else np.float16
        row_width = table.spec.dim * (2 if self._row_dtype is np.float16 else 4)
        self._room_width = max(row_width, table.layout.stride)  # of rows from the tiers below, decoded or as stored
        self._todo: deque[_Chunk] | None = None  # parts that have not begun, once it is cut
        self._begun: deque[tuple[Workspace, _Chunk]] = deque()  # parts whose kernels are under way

    def take(self) -> Any:
        """The answer, after `finish`. One that is put off does not keep it."""
        assert self.out is not None
        out, self.out = self.out, None
        return out.array

    def begin(self) -> bool:
        """Put the kernel into the table's stream, if it is one and that needs no wait. Returns whether it did: then `finish` or `abandon` must follow."""
        todo = self._parts()
        if todo is not None and len(todo) == 1:  # `finish` of one of several parts may wait for a workspace
            self._begin_more(todo)
        return bool(self._begun)

    def abandon(self) -> None:
        """Give back what `begin` took, if `finish` was not called."""
        while self._begun:
            workspace, chunk = self._begun.popleft()
            with suppress(DeviceError), workspace as ws:
                self._call(round_trip.finish, ws, self._state[chunk.begin : chunk.end])  # the kernel writes to `out`

    def finish(self, pending_lookup: PendingLookup | None = None) -> bool:
        """Answer every key, on the device. With `pending_lookup` it does not wait, if possible; then the states are not written.

        Returns:
            False if the device cannot answer (it has failed, the table was closed, or one bag is larger than a workspace).
            Then `state` and `out` are undefined.

        Raises:
            Captured: a CUDA graph is being captured. StorageError: an earlier look-up in the caller's stream, that was put off, has failed.
        """
        try:
            return self._finish(pending_lookup)
        except OutOfDeviceMemory:
            return False
        except Captured:
            raise
        except DeviceError as error:
            self.table.give_up(error)
            return False
        finally:
            self.abandon()

    def _finish(self, pending_lookup: PendingLookup | None) -> bool:
        todo, device = self._parts(), self.table.device
        if todo is None:
            return False
        if pending_lookup is not None and device.finisher is not None:
            stream = device.backend.callers()[0]
            device.finisher.prepare(stream)
            if len(todo) == 1:
                return self._put_off(todo[0], stream, pending_lookup, device.finisher)
        if len(todo) == 1:
            with device.workspace(answers=True) as ws:
                return self._complete(ws, todo[0], self._launch(ws, todo[0]))
        while todo or self._begun:
            if not self._begun and not self._begin_next(device.workspace(answers=True), todo):
                return False
            self._begin_more(todo)
            workspace, chunk = self._begun.popleft()
            with workspace as ws:
                if not self._complete(
                    ws, chunk, self._call(round_trip.finish, ws, self._state[chunk.begin : chunk.end])
                ):
                    return False
        return True

    def _begin_more(self, todo: deque[_Chunk]) -> None:
        """Begin further parts as far as workspaces are free: whoever waits for one must not hold one."""
        while todo and len(self._begun) < _AT_ONCE and (workspace := self.table.device.free_workspace()) is not None:
            try:
                if not self._begin_next(workspace, todo):
                    break
            except DeviceError:  # which `finish` meets again
                break

    def _begin_next(self, workspace: Workspace, todo: deque[_Chunk]) -> bool:
        """Put the kernel of the next part into the table's stream. False if the table is not in use."""
        with workspace as ws:
            if self._launch(ws, todo[0], round_trip.BEGUN) == round_trip.NOT_IN_USE:
                return False
            ws.leave()
        self._begun.append((ws, todo.popleft()))
        return True

    def _parts(self) -> deque[_Chunk] | None:
        """The parts that have not begun; None if it cannot be cut."""
        if self._todo is None and (chunks := self._chunks()) is not None:
            self._todo = deque(chunks)
        return self._todo

    def _chunks(self) -> list[_Chunk] | None:
        """The look-up cut into parts that fit a workspace; None if one bag does not."""
        a_key = 8 + 1 + 1 + 8 + 4 + self._room_width  # as `round_trip.py` divides a workspace
        room = self.table.device.workspace_bytes - 20 * ALIGN - self._filters
        n = len(self._state)
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
        self.bags = self.bags.here(self.table.device, n)
        return self._bag_chunks(self.bags.offsets, room, a_key, a_bag)

    def _bag_chunks(self, offsets: Any, room: int, a_key: int, a_bag: int) -> list[_Chunk] | None:
        ends = np.append(offsets[1:], len(self._state))
        cost = ends * a_key + np.arange(1, len(ends) + 1) * a_bag  # of all bags up to and including this one
        chunks, first, spent = [], 0, 0
        while first < len(ends):
            last = int(np.searchsorted(cost, spent + room, side="right"))
            if last == first:
                return None
            chunks.append(_Chunk(int(offsets[first]), int(ends[last - 1]), first, last))
            first, spent = last, int(cost[last - 1])
        return chunks

    def _complete(self, ws: Workspace, chunk: _Chunk, said: int) -> bool:
        """What is to be done after the compiled call."""
        if said == round_trip.NOT_IN_USE:
            return False
        begin, end, *_ = chunk
        if said and self.host is not None:
            keys = self._keys[begin:end]
            if self.there is not None:  # to CPU memory, from where rows are put to their places later, if there are any
                keys = ws.part(round_trip.AT_ROWS, end - begin, np.int64)
                ws.stream.download(keys, self.there.address + 8 * begin)
                ws.stream.synchronize()
            self.host.note_answered(keys, ws.part(round_trip.AT_STATE, end - begin))
        return said < 2 or self._answer_listed(ws, chunk, said // 2)

    def _put_off(self, chunk: _Chunk, stream: int, pending_lookup: PendingLookup, finisher: Finisher) -> bool:
        """The look-up in the caller's stream. False if the table is not in use."""
        device = self.table.device
        control = getattr(self.table.memory, "control", None)
        if control is None:  # the table is closed
            return False
        put_off = _PutOff(self, chunk, stream, pending_lookup, control)
        try:
            with device.workspace(answers=True) as ws:
                ws.leave()
                put_off.owned = [ws]  # so that it gives it back
            put_off.begin()
            finisher.add(put_off)  # which may end it from now on, and the workspace be in use again
            pending_lookup.begun = self._launch(ws, chunk, round_trip.PUT_OFF) != round_trip.NOT_IN_USE
        except BaseException as error:  # or Ctrl-C, of which Python hears when the compiled call returns
            if not put_off.owned:  # not yet, or not any more
                raise
            try:
                device.backend.synchronize()  # meanwhile rows that are missing come
            except Captured:
                if not isinstance(error, DeviceError):
                    raise error from None  # it may be whole in the stream, which waits for the thread then
            except DeviceError:
                pass
            finally:
                self.out = None  # of which the thread must not have the last reference
            finisher.take_back(put_off)
            put_off.give_back(Workspace.abandon)
            raise
        if not pending_lookup.begun:
            finisher.take_back(put_off)
            put_off.give_back(Workspace.give_back)
        return pending_lookup.begun

    def _launch(self, ws: Workspace, chunk: _Chunk, when: int = round_trip.WAITED) -> int:
        """The compiled call, with its result. `when`: see `round_trip.look_up`."""
        table, bags, there = self.table, self.bags, self.there
        device = table.device
        begin, end, first_bag, last_bag = chunk
        keys, state = self._keys, self._state
        if end - begin != len(state):
            keys, state = keys[begin:end], state[begin:end]
        kernels, offsets, weights, combiner, first, starts_at, weights_at = _ROWS, _NONE, _NO_WEIGHTS, 0, begin, 0, 0
        if bags is not None:
            kernels, combiner, first = _BAGS, combiner_code(bags.combiner), first_bag
            if isinstance(bags.offsets, GpuArray):
                starts_at = bags.offsets.address
            else:
                offsets = bags.offsets[first_bag:last_bag]
            if isinstance(bags.weights, GpuArray):
                weights_at = bags.weights.address
            elif bags.weights is not None:
                weights = bags.weights[begin:end]
        ws.set_job(
            *map(device.driver.kernels.__getitem__, kernels), when, *device.backend.callers(), self._of, self._address + first * self._out_width, self._half,
            self._room_width, table.layout.stride, table.spec.dim, begin, combiner, 0 if there is None else there.address + 8 * begin, self._padding or 0, self._padding is not None,
            last_bag - first_bag, starts_at, weights.size != 0 or weights_at != 0, weights_at, self._filters,
        )  # fmt: skip
        return self._call(round_trip.look_up, ws, keys, state, offsets, weights, self._overlays)

    def _call(self, function: Callable[..., int], ws: Workspace, *args: Any) -> int:
        memory, driver = self.table.memory, self.table.device.driver
        if memory is None:
            return round_trip.NOT_IN_USE
        said = function(driver.calls, memory.order.words, ws.frame, *args)
        if said < 0 and said != round_trip.NOT_IN_USE:
            driver.check(round_trip.FAILED - said)
        return said

    def _answer_listed(self, ws: Workspace, chunk: _Chunk, listed: int) -> bool:
        """Put the rows of the listed keys to their places, or pool the bags that waited for them."""
        ws.rests = True
        self.stage_rows(ws, chunk, listed)
        ws.rests = False
        state = self._state[chunk.begin : chunk.end]
        return self._call(round_trip.answer_listed, ws, state, listed) != round_trip.NOT_IN_USE

    def stage_rows(self, ws: Workspace, chunk: _Chunk, listed: int) -> None:
        """Put the rows of the listed keys where a kernel reads them. InvalidInput if offsets on the device do not fit the keys."""
        n, places = chunk.end - chunk.begin, round_trip.AT_PLACES
        if ws.frame[round_trip.OFFSETS] and (listed > n or ws.part(places, listed, np.uint32).max() >= n):
            raise InvalidInput(f"offsets on the GPU: the first is 0, none decreases, and none passes the {n} keys")
        state, positions = ws.part(round_trip.AT_STATE, n), ws.part(places, listed, np.uint32)
        missing = ws.part(round_trip.AT_MISSING, listed, np.int64)
        self.room_of_rows(ws, listed)[:], state[positions] = self._fetch(missing.copy(), self._row_dtype)

    def room_of_rows(self, ws: Workspace, listed: int) -> np.ndarray:
        """Where a kernel reads the rows of listed keys, if there is room: [listed, dim]."""
        dim, listed = self.table.spec.dim, min(listed, len(self._state))
        return ws.part(round_trip.AT_ROWS, listed * dim, self._row_dtype).reshape(listed, dim)


class _PutOff:
    """A look-up in the caller's stream, as an `UnderWay`. `control`: memory that its second kernel reads, kept until then.

    `owned`: its workspace, from when it has one until it is given back. Afterwards it keeps nothing of the caller's, whoever still has it.
    """

    __slots__ = (
        "_chunk", "_control", "_failed", "_held", "_listed", "_stream", "_table", "_unwaited", "_work", "kept", "number", "owned",
        "report",
    )  # fmt: skip

    def __init__(
        self, work: LookUp, chunk: _Chunk, stream: int, pending_lookup: PendingLookup, control: Buffer
    ) -> None:
        self._work: LookUp | None = work
        self._table, self._chunk, self._stream, self._unwaited = work.table, chunk, stream, pending_lookup
        self._control: Buffer | None = control
        self.kept: Any = (work.there, work.bags)
        self._listed, self._failed = 0, False
        self.number, self.report = -1, 0  # until `begin`
        self.owned: list[Workspace] = []
        self._held: list[Callable[[], None]] = []  # what ends `Unwaited.hold`

    def begin(self) -> None:
        """Hold the tiers below, and say that nothing has come."""
        (ws,) = self.owned
        self.number, self.report = ws.number, ws.here(0)
        reports.begin(self.report)
        self._held.append(self._unwaited.hold())

    def answer_missing(self, listed: int, failed: Callable[[int, Exception], None]) -> None:
        (ws,), work = self.owned, self._work
        assert work is not None
        self._listed = listed
        try:
            if not self._held:
                raise StorageError("the device has failed")
            work.stage_rows(ws, self._chunk, listed)
        except Exception as error:  # noqa: BLE001 - raised for the caller
            self._failed = True
            work.room_of_rows(ws, listed)[:] = np.nan
            failed(self._stream, error)
        finally:
            reports.say(self.report, reports.WHOLE | listed << 32)  # after this, others may end it

    def end(self) -> None:
        ws, release, work = _popped(self.owned), _popped(self._held), self._work
        try:
            if ws is not None and release is not None and work is not None and not self._failed:
                self._count(ws, work)
        finally:
            self._let_go(ws, Workspace.give_back, release)

    def give_back(self, how: Callable[[Workspace], None]) -> None:
        """Give everything back that is not given back yet, in place of `end`."""
        self._let_go(_popped(self.owned), how, _popped(self._held))

    def _let_go(
        self, ws: Workspace | None, how: Callable[[Workspace], None], release: Callable[[], None] | None
    ) -> None:
        if ws is not None:
            how(ws)
        self.kept = self._work = None  # of which the thread may have a reference for long, and must not have the last
        self._control = None  # before the release, after which this might be the last reference
        if release is not None:
            release()

    def _count(self, ws: Workspace, work: LookUp) -> None:
        n, host = self._chunk.end - self._chunk.begin, work.host
        keys = ws.part(round_trip.AT_KEYS if work.there is None else round_trip.AT_ROWS, n, np.int64)
        state = ws.part(round_trip.AT_STATE, n)
        from_host = self._unwaited.after(keys, state)
        if from_host and host is not None:
            # listed keys were noted when the host tier was asked for them
            state[ws.part(round_trip.AT_PLACES, self._listed, np.uint32)] = Tier.PENDING
            host.note_answered(keys, state)

    def forsake(self) -> bool:
        if self._table.is_in_use:
            return False
        if (release := _popped(self._held)) is not None:
            release()
        return True


def _popped(things: list[Any]) -> Any:
    """The last of a list, for one of several threads; None for the others."""
    try:
        return things.pop()
    except IndexError:
        return None
