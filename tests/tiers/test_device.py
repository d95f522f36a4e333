"""The device tier on the CPU: the contract of every cache, over the kernels' own source compiled by g++."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from tests.tiers.cache_contract import (
    DEFAULT,
    DIM,
    ODD_KEYS,
    SPEC,
    CacheTierContract,
    ask,
    no_deletes,
    rows_of,
    vectors_of,
)
from tests.tiers.cuda_shim.backend import ShimDevice
from tests.tiers.devices import ON_GPU, ReadTable, open_device
from tierstore.tiers.device.backend import DeviceError
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import WORKSPACES, DeviceMemory, Workspace
from tierstore.types import KeyType, StorageDtype, TableSpec, Tier


class _OverDevice(CacheTierContract):
    kind: str

    def open_cache(
        self, spec: TableSpec, budget_bytes: int, default: npt.NDArray[np.float32], fraction: float = 1.0
    ) -> ReadTable:
        memory = DeviceMemory(open_device(self.kind), 64 << 20)
        return ReadTable(spec, budget_bytes, memory, default_vector=default, fraction=fraction)


class TestDeviceTable(_OverDevice):
    kind = "late"
    torn_batches = 200  # kernels are slow here, and never meet


class TestDeviceTableThroughTheDoor(_OverDevice):
    kind = "cupy"
    torn_batches = 50


class TestDeviceTableOnAGpu(_OverDevice):
    pytestmark = ON_GPU
    kind = "gpu"


def open_table(
    device: ShimDevice, budget_bytes: int = 1 << 20, fraction: float = 1.0, dtype: StorageDtype = StorageDtype.FLOAT32
) -> ReadTable:
    spec = TableSpec("t", KeyType.INT64, DIM, dtype)
    return ReadTable(spec, budget_bytes, DeviceMemory(device, 8 << 20), default_vector=DEFAULT, fraction=fraction)


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25, 1 / 16])
def test_a_peek_finds_every_resident_key_however_many_segments_there_are(fraction: float) -> None:
    table = open_table(ShimDevice(), fraction=fraction)
    keys = np.arange(-500, 3000, dtype=np.int64)
    table.insert(keys, rows_of(keys), 1)
    resident = set(table.hot_keys(10_000).tolist())
    assert len(resident) > 200
    for key in keys[::3].tolist():
        found = table.peek(key)
        assert (found.row is not None) == (key in resident)
        assert found.row in (None, rows_of(np.array([key]))[0].tobytes())


def test_keys_of_one_set_that_are_looked_up_at_once_are_all_remembered() -> None:
    """Four teams of a warp read the same line before any of them writes to it."""
    table = open_table(ShimDevice())
    keys = np.arange(2000, dtype=np.int64)
    sets = np.array([table.layout.set_of(key, table._depth) for key in keys.tolist()])
    crowded = int(np.argmax(np.bincount(sets)))
    together = keys[sets == crowded][:4]
    assert len(together) == 4
    table.insert(together, rows_of(together), 1)
    gone = np.flatnonzero(sets == crowded + 1)[:3].astype(np.int64)
    table.insert_absent(gone, 1)
    ask(table, np.concatenate([together, gone]))
    assert [table.peek(key).heat for key in together.tolist()] == [{"hits": 1}] * 4
    assert table.memory is not None
    _, absent, _ = table.memory.read_set(crowded + 1)
    assert int(absent[0]) >> 4 & 7 == (1 << len(gone)) - 1


@pytest.mark.parametrize("budget", [1000, 4096, 100_000, 1 << 20, (1 << 22) + 12345])
@pytest.mark.parametrize("dtype", list(StorageDtype))
@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_a_table_takes_what_it_says_and_never_more_than_its_budget(
    budget: int, dtype: StorageDtype, fraction: float
) -> None:
    device = ShimDevice()
    table = open_table(device, budget, fraction, dtype)
    workspaces = WORKSPACES * table.device.workspace_bytes
    assert table.bytes_in_use == device.used - workspaces
    assert table.bytes_in_use <= budget
    if budget >= 1 << 20 and fraction == 1:
        assert table.bytes_in_use > 0.95 * budget
    for wanted in (0.5, 1.0, 1 / 64):
        table.resize(wanted)
        assert table.bytes_in_use == device.used - workspaces <= budget
    table.close()
    assert device.used == workspaces
    table.device.close()
    assert device.used == 0


def test_a_device_that_is_full_makes_a_smaller_cache_and_says_so() -> None:
    device = ShimDevice(1 << 20)
    memory = DeviceMemory(device, 1 << 19)
    table = ReadTable(SPEC, 1 << 20, memory, default_vector=DEFAULT)
    assert 0 < table.bytes_in_use <= device.total - WORKSPACES * memory.workspace_bytes
    assert "no device memory beyond" in table.stats()["problem"]
    keys = np.arange(200, dtype=np.int64)
    assert table.insert(keys, rows_of(keys), 1) == 200
    np.testing.assert_array_equal(ask(table, keys)[0], vectors_of(keys))
    rest = memory.backend.alloc(device.total - device.used)
    other = ReadTable(SPEC, 1 << 20, memory, default_vector=DEFAULT)
    assert other.capacity_rows == other.insert(keys, rows_of(keys), 1) == 0
    assert (ask(other, keys)[1] == Tier.PENDING).all()
    rest.free()
    table.close()


def test_who_is_put_out_is_handed_over_with_its_row() -> None:
    table = open_table(ShimDevice())
    first = np.arange(table.capacity_rows, dtype=np.int64)
    table.warm(first, rows_of(first))
    resident = np.sort(table.hot_keys(table.capacity_rows))
    second = np.arange(10_000, 12_000, dtype=np.int64) + table.capacity_rows
    admitted, keys, rows = table.exchange(second, rows_of(second), 1)
    assert admitted == 2000
    assert 0 < len(keys) <= 2000
    assert np.isin(keys, resident).all()
    np.testing.assert_array_equal(rows, rows_of(keys))
    assert (ask(table, keys)[1] == Tier.PENDING).all()
    assert table.stats()["evicted"] == len(keys)
    table.close()


def test_a_row_that_is_asked_for_outlives_a_stream_of_others() -> None:
    table = open_table(ShimDevice())
    hot = np.arange(table.capacity_rows // 8, dtype=np.int64)
    table.insert(hot, rows_of(hot), 1)
    for begin in range(1, 9):
        cold = np.arange(table.capacity_rows // 4, dtype=np.int64) + begin * 1_000_000
        table.insert(cold, rows_of(cold), 1)
        ask(table, hot)
    assert np.count_nonzero(ask(table, hot)[1]) > 0.95 * len(hot)
    table.close()


def test_an_update_is_seen_by_a_look_up_that_starts_after_it_while_others_are_under_way() -> None:
    table = open_table(ShimDevice())
    keys = np.arange(300, dtype=np.int64)
    table.insert(keys, rows_of(keys), 1)
    faults: list[str] = []
    acknowledged = [0]
    done = threading.Event()

    def read() -> None:
        while not done.is_set() and not faults:
            at_least = acknowledged[0]
            out, state = ask(table, keys)
            if (out[state != 0] < vectors_of(keys, at_least)[state != 0]).any():
                faults.append("older than what was acknowledged")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for generation in range(1, 60):
        table.update(keys, rows_of(keys, generation), no_deletes(keys))
        acknowledged[0] = generation
        if generation % 20 == 0:
            table.resize((1.0, 0.5)[generation // 20 % 2])
    done.set()
    for reader in readers:
        reader.join()
    assert faults == []
    table.close()


@pytest.mark.parametrize("deltas", [False, True])
def test_what_is_written_lies_in_the_order_of_sets_where_kernels_find_them(deltas: bool) -> None:
    table, rng = open_table(ShimDevice()), np.random.default_rng(5)
    keys = rng.permutation(np.concatenate([ODD_KEYS, np.arange(5000, 5800, dtype=np.int64)]))
    rows, deleted = rows_of(keys), rng.random(len(keys)) < 0.3
    with table.device.workspace() as ws:
        at, runs = table._stage(ws, keys, rows, deleted) if deltas else table._stage(ws, keys, rows)
        begin = ws.here(0)
        placed = ws.staging(at.keys - begin, len(keys), np.int64)
        starts = ws.staging(at.runs - begin, runs + 1, np.uint32)
        order = np.argsort(placed)[np.argsort(np.argsort(keys))]  # where each key was placed
        staged = ws.staging(at.rows - begin, len(keys) * table.layout.stride).reshape(len(keys), -1)
        np.testing.assert_array_equal(staged[order][:, : rows.shape[1]], rows)
        if deltas:
            np.testing.assert_array_equal(ws.staging(at.deleted - begin, len(keys), np.bool_)[order], deleted)
        sets = np.array([table.layout.set_of(key, table._depth) for key in placed.tolist()])
    assert (np.diff(sets) >= 0).all()
    np.testing.assert_array_equal(starts, [*np.flatnonzero(np.diff(sets, prepend=-1)), len(keys)])
    for start, end in pairwise(starts):  # equal sets in the order in which they came
        assert (np.diff(np.argsort(order)[start:end]) > 0).all()
    table.insert(keys, rows, 1)
    assert table.memory is not None
    assert sum(len(found) for found, _ in table.memory.resident()) == table.rows_resident


@pytest.mark.parametrize(
    "write",
    [
        lambda table: table.update(ODD_KEYS[:1], rows_of(ODD_KEYS[:1], 2), no_deletes(ODD_KEYS[:1])),
        lambda table: table.insert(ODD_KEYS[1:2], rows_of(ODD_KEYS[1:2], 2), 9),
        lambda table: table.insert_absent(ODD_KEYS[1:2], 9),
        lambda table: table.warm(ODD_KEYS[1:2], rows_of(ODD_KEYS[1:2], 2)),
        lambda table: table.resize(0.25),
        lambda table: table.hot_keys(10),
    ],
)
def test_a_table_that_a_look_up_gives_up_stays_given_up_whatever_a_writer_is_doing(
    write: Callable[[DeviceTable], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_table(ShimDevice())
    table.insert(ODD_KEYS[:1], rows_of(ODD_KEYS[:1], 1), 0)
    workspace = table.device.workspace

    def failing(*, answers: bool = False) -> AbstractContextManager[Workspace]:
        table.give_up(DeviceError("the device fell off the bus"))  # as a look-up does beside the writer
        return workspace(answers=answers)

    monkeypatch.setattr(table.device, "workspace", failing)
    write(table)
    monkeypatch.undo()
    _, state = ask(table, ODD_KEYS[:1])
    assert (state == Tier.PENDING).all()
    assert "fell off the bus" in str(table.stats()["problem"])
    table.close()
