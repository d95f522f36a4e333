"""A store with a device tier, on a stand-in for a GPU: same answers, its budget, promotion, and what is said without one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis.stateful import rule

from tests import int4_model
from tests.engine import scenes, ttl_scenes
from tests.engine.model_based import ALL_KEYS, DEFAULT, DIM, History, Stores, StoresAgainstHistory, check
from tests.engine.test_store import folded
from tests.hashed_keys import FEATURES, IDS, UNSIGNED, vectors, write_hashed
from tests.tiers.cuda_shim.backend import OnGpu, ShimDevice
from tests.tiers.devices import ON_GPU, to_host
from tierstore.engine.data.promotion import RING_KEYS
from tierstore.engine.data.table_view import TableView
from tierstore.engine.store import Store
from tierstore.errors import (
    ConfigError,
    InvalidInput,
    MissingExtra,
    NotReady,
    StorageError,
    TierstoreError,
    WrongPartition,
)
from tierstore.formats.keys import partition_of
from tierstore.formats.snapshot.writer import SnapshotWriter
from tierstore.service.admin.metrics import _tables, device_families
from tierstore.tiers.device import gpu
from tierstore.tiers.device.lookup import LookUp
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import WORKSPACES
from tierstore.types import Tier

ITEMS = np.arange(1000, dtype=np.int64)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[ShimDevice]:
    found = [ShimDevice(number=0)]
    monkeypatch.setattr(gpu, "find_backend", lambda: (found[0], None) if found else (None, "no CUDA device"))
    monkeypatch.setattr(gpu, "MIN_BUDGET", 100 << 10)
    return found


@pytest.fixture
def on_stand_in(gpus: list[ShimDevice], open_store: Callable[..., Store]) -> Callable[..., Store]:
    """For what only a stand-in shows, or does when it is told."""
    return lambda **options: open_store(**{"device_budget": "4MiB"} | options)


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=ON_GPU)])
def with_device(
    request: pytest.FixtureRequest, open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Store]:
    if request.param == "stand-in":
        made: Callable[..., Store] = request.getfixturevalue("on_stand_in")
        return made
    monkeypatch.setattr(gpu, "MIN_BUDGET", 100 << 10)
    return lambda **options: open_store(**{"device_budget": "4MiB"} | options)


def promoted(store: Store) -> None:
    promoter = store.shared.devices.promoter
    assert promoter is not None
    promoter.drain()


def counts(store: Store) -> dict[str, int]:
    found: dict[str, int] = store.status()["models"]["ctr"]["tables"]["item"]["lookup_keys"]
    return found


def problems(store: Store) -> list[str]:
    return [problem["text"] for problem in store.status()["problems"] if problem["kind"] == "device"]


def test_keys_of_other_nodes_are_refused_on_the_device_too(with_device: Callable[..., Store], tmp_path: Path) -> None:
    store = with_device(partition="1/4")
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr, is_own = store.model("ctr"), partition_of(ITEMS, 4) == 1
    for _ in range(3):
        ctr.lookup("item_id", ITEMS[is_own])
        promoted(store)
        rows = ctr.lookup("item_id", ITEMS[is_own], device="gpu")
        np.testing.assert_array_equal(to_host(rows), scenes.vectors("item", 0, ITEMS[is_own]))
        for device in (None, "gpu"):
            with pytest.raises(WrongPartition):
                ctr.lookup("item_id", ITEMS, device=device)
            with pytest.raises(WrongPartition):
                ctr.lookup_bags("clicked", ITEMS, [0, 500], device=device)
    assert counts(store)["device"] > 0


def test_keys_of_other_nodes_are_refused_at_once_in_a_stream_too(
    on_stand_in: Callable[..., Store], gpus: list[ShimDevice], tmp_path: Path
) -> None:
    store = on_stand_in(partition="1/4", device_budget="64MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    with pytest.raises(WrongPartition):
        store.model("ctr").lookup("item_id", ITEMS, stream=gpus[0].stream())


class FoldedAtOnce(Stores):
    first_grace_s = 0.0


class WithADevice(StoresAgainstHistory):
    """The same, with every answer asked for in CPU memory, on the device and in a stream, and promotions at any moment."""

    stores = FoldedAtOnce
    options = {"device_budget": "4MiB"}  # noqa: RUF012
    devices = (None, "gpu")

    @rule()
    def wait_for_promotions(self) -> None:
        promoted(self.store)

    def _check_version(self, store: Store, number: int, history: History) -> None:
        super()._check_version(store, number, history)
        memory = store.shared.devices.gpu.memory
        assert memory is not None
        stream: Any = memory.backend.stream()
        with store.model("ctr").view(number) as view:
            of = [
                (table, view.lookup(f"{table}_id", ALL_KEYS, stream=getattr(stream, "_stream", stream)))
                for table in DIM
            ]
        stream.synchronize()
        for table, rows in of:
            want = [history.rows_of(number)[table].get(key, DEFAULT[table]) for key in ALL_KEYS.tolist()]
            np.testing.assert_array_equal(to_host(rows), np.stack(want), err_msg=f"{table} of {number}, in a stream")


@pytest.mark.thorough
def test_a_store_with_a_device_tier_keeps_its_promises(gpus: list[ShimDevice]) -> None:
    check(WithADevice, histories=12, steps=25)
    launched = gpus[0].launched
    assert {"look_up", "put_rows", "pool", "update", "insert"} <= launched.keys()


@pytest.mark.thorough
@pytest.mark.gpu
@ON_GPU[1]
def test_a_store_with_a_device_tier_keeps_its_promises_on_a_gpu() -> None:
    check(WithADevice, histories=12, steps=25)


def test_rows_of_four_bits_are_answered_as_documented_by_the_device(
    with_device: Callable[..., Store], tmp_path: Path
) -> None:
    model, store = int4_model.Model(), with_device()
    store.load_snapshot(model.snapshot(tmp_path / "snapshot"))
    store.apply_delta(model.delta(1))
    for _ in range(3):  # from disk to the host tier; from there to the device
        model.check(store.model("ctr"))
        promoted(store)
    model.check(store.model("ctr"), device="gpu")
    store.apply_delta(model.delta(2))
    model.check(store.model("ctr"), device="gpu")
    folded(store)
    model.check(store.model("ctr"), device="gpu")
    counts = store.status()["models"]["ctr"]["tables"]
    assert all(counts[table]["lookup_keys"]["device"] > int4_model.ROWS for table in int4_model.DIM)


def test_what_the_host_tier_answers_moves_up_and_is_answered_by_the_device(
    with_device: Callable[..., Store], tmp_path: Path
) -> None:
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    for _ in range(2):  # from disk to the host tier; from there to the device
        ctr.lookup("item_id", ITEMS, device="gpu")
        promoted(store)
    before = counts(store)
    np.testing.assert_array_equal(to_host(ctr.lookup("item_id", ITEMS, device="gpu")), scenes.vectors("item", 0, ITEMS))
    half = ctr.lookup("item_id", ITEMS, device="gpu:0", dtype="float16")
    assert half.dtype == np.float16
    np.testing.assert_array_equal(to_host(half), scenes.vectors("item", 0, ITEMS))
    after = counts(store)
    assert after["device"] - before["device"] > 1.9 * len(ITEMS)
    assert sum(after.values()) - sum(before.values()) == 2 * len(ITEMS)
    entry = store.status()["models"]["ctr"]["tables"]["item"]
    assert 0 < entry["tier_bytes"]["device"] <= entry["tier_budget_bytes"]["device"]


def test_keys_on_the_gpu_are_answered_there_whatever_else_answers_them(
    on_stand_in: Callable[..., Store], gpus: list[ShimDevice], tmp_path: Path
) -> None:
    store = on_stand_in()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    expected = scenes.vectors("item", 0, ITEMS)
    offsets, weights = np.arange(0, 1000, 4), np.linspace(0, 1, 1000, dtype=np.float32)
    # from disk; from the host tier and what it promotes; some by the device out of the host tier; beside rows of a delta
    for seq in range(4):
        if seq == 3:
            store.apply_delta(scenes.stamped(1, {"item": ITEMS[::7]}))
            expected[::7] = scenes.vectors("item", 1, ITEMS[::7])
        rows, found = ctr.lookup("item_id", OnGpu(ITEMS), return_found=True)
        np.testing.assert_array_equal(rows, expected)
        assert found.all()
        np.testing.assert_array_equal(ctr.lookup("item_id", OnGpu(ITEMS.astype(np.int32)), device="cpu"), expected)
        for where in (offsets, OnGpu(offsets)):
            for factors in (None, weights, OnGpu(weights)):
                given = None if factors is None else weights
                bags = ctr.lookup_bags("clicked", OnGpu(ITEMS), where, weights=factors, dtype="float16")
                np.testing.assert_array_equal(
                    bags, ctr.lookup_bags("clicked", ITEMS, offsets, weights=given, dtype="float16")
                )
        promoted(store)
    with pytest.raises(InvalidInput, match="expected int64 keys, got float32"):
        ctr.lookup("item_id", OnGpu(weights))


def test_keys_on_the_gpu_stay_there_where_their_rows_are_there_too(
    on_stand_in: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = on_stand_in()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr, few, offsets = store.model("ctr"), ITEMS[:200], np.arange(0, 200, 4)
    for _ in range(3):
        ctr.lookup("item_id", few, device="gpu")
        promoted(store)
    copied: list[Any] = []
    monkeypatch.setattr(gpu, "from_device", lambda memory, array: copied.append(array))
    monkeypatch.setattr("tierstore.engine.data.table_view.from_device", lambda memory, array: copied.append(array))
    np.testing.assert_array_equal(ctr.lookup("item_id", OnGpu(few)), scenes.vectors("item", 0, few))
    weights = np.linspace(0, 1, 200, dtype=np.float32)
    for feature in "item_id", "clicked":  # which has a padding key
        for starts, factors in ((offsets, None), (OnGpu(offsets), None), (OnGpu(offsets), OnGpu(weights))):
            bags = ctr.lookup_bags(feature, OnGpu(few), starts, weights=factors, combiner="sum")
            given = None if factors is None else weights
            np.testing.assert_array_equal(bags, ctr.lookup_bags(feature, few, offsets, weights=given, combiner="sum"))
    with pytest.raises(InvalidInput, match="offsets on the GPU: the first is 0"):
        ctr.lookup_bags("item_id", OnGpu(few), OnGpu(offsets[1:]), combiner="sum")
    assert copied == []
    monkeypatch.undo()
    for starts, factors, error in (
        (OnGpu(offsets[:0]), None, "no offsets"), (OnGpu(offsets), OnGpu(weights[:9]), "weights: expected one a key"),
        (OnGpu(offsets.astype(np.float32)), None, "offsets are integers"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=error):
            ctr.lookup_bags("item_id", OnGpu(few), starts, weights=factors, combiner="sum")


def test_keys_with_a_hash_and_keys_and_offsets_of_other_types_stay_on_the_gpu(
    on_stand_in: Callable[..., Store], gpus: list[ShimDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, stream = on_stand_in(), gpus[0].stream()
    store.load_snapshot(write_hashed(tmp_path))
    ctr, copied = store.model("ctr"), []
    offsets, weights = np.array([0, 1, 4]), np.linspace(1, 2, len(IDS), dtype=np.float32)
    # negative numbers in bits above those of their type
    types = [np.dtype(kind) for kind in (np.int64, np.int32, np.int16, np.int8, np.uint32, np.uint16, np.uint8)]
    keys = {
        kind: np.array([0, 17, 100, 3], kind) if kind.kind == "u" else np.array([0, 17, -128, -3], kind)
        for kind in types
    }
    monkeypatch.setattr(gpu, "from_device", lambda memory, array: copied.append(array))
    for _ in range(2):
        for feature in "by_seed", "by_rest", "unsigned":
            _, given, rows = FEATURES[feature]
            answer = ctr.lookup(feature, OnGpu(given), stream=stream)
            stream.synchronize()
            np.testing.assert_array_equal(answer, vectors(rows))
        for kind, some in keys.items():
            for feature in ("by_seed", "by_rest") if kind.kind == "i" else ("by_seed", "by_rest", "unsigned", "row"):
                answer = ctr.lookup(feature, OnGpu(some), stream=stream)
                stream.synchronize()
                np.testing.assert_array_equal(answer, ctr.lookup(feature, some))
        for starts in offsets.astype(np.int32), offsets.astype(np.uint8), offsets:
            bags = ctr.lookup_bags("bag", OnGpu(IDS), OnGpu(starts), weights=OnGpu(weights), stream=stream)
            stream.synchronize()
            np.testing.assert_array_equal(bags, ctr.lookup_bags("bag", IDS, offsets, weights=weights))
        promoted(store)
    assert copied == []
    assert gpus[0].launched["make_codes"] > 20
    monkeypatch.undo()
    # those that may be out of range are looked at by the CPU
    with pytest.raises(InvalidInput, match="uint64 keys, 0 to"):
        ctr.lookup("unsigned", OnGpu(IDS), stream=stream)
    with pytest.raises(InvalidInput, match="int64 keys, -2"):
        ctr.lookup("by_seed", OnGpu(UNSIGNED), stream=stream)
    for wrong in IDS > 0, IDS.astype(np.float32):
        with pytest.raises(InvalidInput, match=r"expected int64 keys, got (bool|float32)"):
            ctr.lookup("by_seed", OnGpu(wrong), stream=stream)
    with pytest.raises(InvalidInput, match="expected string keys"):
        ctr.lookup("word", OnGpu(IDS), stream=stream)
    np.testing.assert_array_equal(ctr.lookup("by_seed", OnGpu(IDS)), vectors(FEATURES["by_seed"][2]))


def test_keys_on_the_gpu_stay_there_beside_deltas_that_are_not_folded(
    on_stand_in: Callable[..., Store], gpus: list[ShimDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, stream = on_stand_in(), gpus[0].stream()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr, copied, offsets = store.model("ctr"), [], np.arange(0, 1000, 4)
    for _ in range(3):
        ctr.lookup("item_id", ITEMS[:300], device="gpu")
        promoted(store)
    expected, copy = scenes.vectors("item", 0, ITEMS), gpu.from_device
    monkeypatch.setattr(gpu, "from_device", lambda memory, array: copied.append(array) or copy(memory, array))
    with ctr.view():  # so nothing is folded
        for seq in 1, 2:
            changed = ITEMS[seq::7]
            store.apply_delta(scenes.stamped(seq, {"item": changed}))
            expected[changed] = scenes.vectors("item", seq, changed)
        store.apply_delta(scenes.delta(3, deletes={"item": [5, 17, 5000]}))
        expected[[5, 17]] = 0
        for limit in 4, 1 << 40:  # then filters of deltas are too large
            monkeypatch.setattr("tierstore.engine.reads.device._FILTERS", limit)
            rows, found = ctr.lookup("item_id", OnGpu(ITEMS), return_found=True)
            np.testing.assert_array_equal(rows, expected)
            assert np.flatnonzero(~found).tolist() == [5, 17]
            rows, bags = (
                ctr.lookup("item_id", OnGpu(ITEMS), stream=stream),
                ctr.lookup_bags("clicked", OnGpu(ITEMS), OnGpu(offsets), stream=stream),
            )
            stream.synchronize()
            np.testing.assert_array_equal(rows, expected)
            np.testing.assert_array_equal(bags, ctr.lookup_bags("clicked", ITEMS, offsets))
            assert bool(copied) == (limit > 4)


def test_unsigned_keys_stay_on_the_gpu(
    on_stand_in: Callable[..., Store], gpus: list[ShimDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, stream = on_stand_in(), gpus[0].stream()
    with SnapshotWriter(tmp_path, model="ctr", version=1) as writer:
        writer.table("item", dim=4, key="uint64").write(UNSIGNED[:5], vectors(range(5)))
        writer.feature("id", table="item")
    store.load_snapshot(tmp_path)
    ctr, copied = store.model("ctr"), []
    monkeypatch.setattr(gpu, "from_device", lambda memory, array: copied.append(array))
    for keys, rows in (UNSIGNED, [0, 1, 2, 3, 4, 1]), (np.array([17, 0], np.uint16), [1, 0]):
        answer = ctr.lookup("id", OnGpu(keys), stream=stream)
        stream.synchronize()
        np.testing.assert_array_equal(answer, vectors(rows))
    assert copied == []


def test_an_answer_is_written_to_room_on_the_gpu_that_the_caller_has(
    on_stand_in: Callable[..., Store], gpus: list[ShimDevice], tmp_path: Path
) -> None:
    store, stream = on_stand_in(), gpus[0].stream()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr, expected, offsets = store.model("ctr"), scenes.vectors("item", 0, ITEMS), np.arange(0, 1000, 4)
    out, pooled = (OnGpu(gpus[0].pinned(n * 32).view(np.float32).reshape(n, 8)) for n in (1000, 250))
    wanted = ctr.lookup_bags("clicked", ITEMS, offsets)
    for keys in ITEMS, OnGpu(ITEMS):
        for options in {"device": "gpu"}, {"stream": stream}:
            for array in out, pooled:
                array.held[:] = 7
            assert ctr.lookup("item_id", keys, out=out, **options) is out
            rows, found = ctr.lookup_bags("clicked", keys, offsets, out=pooled, return_found=True, **options)
            assert rows is pooled
            assert found.tolist() == [False] + [True] * 999  # the padding key
            stream.synchronize()
            np.testing.assert_array_equal(out.held, expected)
            np.testing.assert_array_equal(pooled.held, wanted)
    with ctr.view() as view:  # also where the device cannot answer
        table = view.open_version.tables["item"]
        table.device, cache = None, table.device
        assert cache is not None
        cache.close()
    out.held[:] = 7
    assert ctr.lookup("item_id", ITEMS, out=out, device="gpu") is out
    np.testing.assert_array_equal(out.held, expected)
    for wrong, error in (
        (OnGpu(out.held[:9]), r"\(1000, 8\) on the GPU, .*got float32 of shape \(9, 8\)"),
        (OnGpu(out.held.astype(np.float16)), "got float16"), (OnGpu(np.zeros((8, 1000), np.float32).T), "C-contiguous"),
        ([1], "got 'list'"), (np.zeros((1000, 8), np.float32), "got one in CPU memory"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=error):
            ctr.lookup("item_id", ITEMS, out=wrong, device="gpu")
    for wrong in out, [1]:
        with pytest.raises(InvalidInput, match="out: expected a NumPy array"):
            ctr.lookup("item_id", ITEMS, out=wrong)


def test_keys_that_a_stream_is_still_to_make_are_waited_for(
    on_stand_in: Callable[..., Store], gpus: list[ShimDevice], tmp_path: Path
) -> None:
    store = on_stand_in()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr, stream, keys = store.model("ctr"), gpus[0].stream(), np.zeros(1000, np.int64)
    for given in (stream, id(stream)):  # an object, or its address
        keys[:] = 0
        stream.upload(keys.ctypes.data, ITEMS[::-1].copy())
        rows = ctr.lookup("item_id", OnGpu(keys), stream=given)
        np.testing.assert_array_equal(rows, scenes.vectors("item", 0, ITEMS[::-1]))
    np.testing.assert_array_equal(ctr.lookup("item_id", ITEMS, stream=stream), scenes.vectors("item", 0, ITEMS))
    with pytest.raises(InvalidInput, match="stream: expected one of CuPy or PyTorch"):
        ctr.lookup("item_id", ITEMS, stream="mine")


def test_an_answer_in_the_callers_stream_is_complete_there_and_of_the_view_of_the_call(
    on_stand_in: Callable[..., Store], gpus: list[ShimDevice], tmp_path: Path
) -> None:
    store = on_stand_in(device_budget="64MiB", fold_grace_s=0.0)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr, stream, expected = store.model("ctr"), gpus[0].stream(), scenes.vectors("item", 0, ITEMS)
    publisher, offsets = ctr.publisher, np.arange(0, 1000, 4)
    for seq in range(1, 4):  # from disk; from the host tier; on the device
        wanted, before = ctr.lookup_bags("clicked", ITEMS, offsets), counts(store)
        promoted(store)
        gpus[0].still = True
        rows = ctr.lookup("item_id", ITEMS, stream=stream)
        bags = ctr.lookup_bags("clicked", ITEMS, offsets, stream=id(stream))
        there = ctr.lookup("item_id", OnGpu(ITEMS), stream=stream)
        assert not any((one[-1] == rows_of[-1]).any() for one, rows_of in ((rows, expected), (bags, wanted)))
        view = publisher.current
        assert view is not None
        assert view.readers == 3
        store.apply_delta(scenes.stamped(seq, {"item": ITEMS[::3]}))
        stream.synchronize()
        with publisher.changed:
            assert publisher.changed.wait_for(lambda view=view: not view.readers, 60)
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(there, expected)
        np.testing.assert_array_equal(bags, wanted)
        assert sum(counts(store).values()) - sum(before.values()) == 2999  # and the padding key of `clicked`
        gpus[0].still = False
        expected[::3] = scenes.vectors("item", seq, ITEMS[::3])
        folded(store)
        promoted(store)
    assert counts(store)["device"] > before["device"]
    rows, found = ctr.lookup("item_id", ITEMS, stream=stream, return_found=True)
    np.testing.assert_array_equal(rows, expected)
    assert found.all()


def test_a_store_closes_after_the_answers_that_are_under_way_in_streams(
    on_stand_in: Callable[..., Store], gpus: list[ShimDevice], tmp_path: Path
) -> None:
    store = on_stand_in(device_budget="64MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    stream = gpus[0].stream()
    answers = [store.model("ctr").lookup("item_id", ITEMS, stream=stream) for _ in range(3)]
    store.close()
    for rows in answers:
        np.testing.assert_array_equal(rows, scenes.vectors("item", 0, ITEMS))


def test_an_answer_in_a_stream_that_cannot_be_read_is_nan_and_said_afterwards(
    on_stand_in: Callable[..., Store], gpus: list[ShimDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise StorageError("the disk failed")

    store, stream = on_stand_in(device_budget="64MiB"), gpus[0].stream()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    with monkeypatch.context() as disk:
        disk.setattr(TableView, "_below_device", fail)
        rows = ctr.lookup("item_id", ITEMS, stream=stream)
        stream.synchronize()
    assert np.isnan(rows).any()
    assert store.status()["device"]["failed_in_streams"] == 1
    with pytest.raises(StorageError, match="the disk failed"):
        ctr.lookup("item_id", ITEMS, stream=stream)
    rows = ctr.lookup("item_id", ITEMS, stream=stream)
    stream.synchronize()
    np.testing.assert_array_equal(rows, scenes.vectors("item", 0, ITEMS))


def test_look_ups_of_several_features_are_on_the_device_at_once(
    with_device: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = with_device(device_budget="64MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr, offsets, weights = store.model("ctr"), np.arange(0, 1000, 4), np.linspace(0, 1, 1000, dtype=np.float32)
    asked = {"user_id": ITEMS[:300], "item_id": ITEMS[::-1], "clicked": (ITEMS, offsets, weights)}
    seen: list[str] = []
    begin, finish = LookUp.begin, LookUp.finish
    with monkeypatch.context() as spied:
        spied.setattr(LookUp, "begin", lambda look_up: (seen.append("begin"), begin(look_up))[1])
        spied.setattr(LookUp, "finish", lambda look_up, *args: (seen.append("finish"), finish(look_up, *args))[1])
        ctr.lookup_many(asked, device="gpu")
    assert seen[:4] == ["begin"] * 3 + ["finish"]
    for _ in range(3):
        for dtype in "float32", "float16":
            wanted = ctr.lookup_many(asked, dtype=dtype, return_found=True)
            came = ctr.lookup_many(asked, device="gpu", dtype=dtype, return_found=True)
            assert list(came) == list(asked)
            for name, (rows, found) in came.items():
                np.testing.assert_array_equal(to_host(rows), wanted[name][0])
                np.testing.assert_array_equal(found, wanted[name][1])
        promoted(store)
    before = store.status()["models"]["ctr"]["tables"]["item"]["lookup_keys"]
    for name, wrong, error in (
        ("item_id", "no numbers", "int64 keys"), ("nothing", ITEMS, "no feature 'nothing'"),
        ("clicked", (ITEMS, None, weights), "offsets"), ("item_id", (ITEMS, offsets), "has no combiner"),
    ):  # fmt: skip
        with pytest.raises(TierstoreError, match=error):
            ctr.lookup_many({"user_id": ITEMS[:300], name: wrong}, device="gpu")
    assert store.status()["models"]["ctr"]["tables"]["item"]["lookup_keys"] == before
    with pytest.raises(InvalidInput, match="offsets are one-dimensional, one start a bag; got None"):
        ctr.lookup_bags("clicked", ITEMS, None, device="gpu")
    with pytest.raises(InvalidInput, match="device 'tpu' is unknown"):
        ctr.lookup_many(asked, device="tpu")
    with pytest.raises(
        InvalidInput,
        match=r"out: expected a C-contiguous float32 array .* on the GPU.* got one in CPU memory",
    ):
        ctr.lookup_many({"item_id": ITEMS}, device="gpu", out=np.empty((1000, 8), np.float32))


def test_rows_that_only_the_host_tier_has_are_read_by_the_device_itself(
    with_device: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the promoter has seen to it; so it is after a table has changed its size, and beside a delta."""
    nobody = np.empty(0, np.int64), np.empty((0, 32), np.uint8)
    monkeypatch.setattr(DeviceTable, "exchange", lambda *_: (0, *nobody))
    by_cpu: list[int] = []
    below = TableView._below_device

    def fetched(under: TableView, keys: np.ndarray, dtype: Any) -> Any:
        by_cpu.append(len(keys))
        return below(under, keys, dtype)

    monkeypatch.setattr(TableView, "_below_device", fetched)
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr, expected = store.model("ctr"), scenes.vectors("item", 0, ITEMS)
    with ctr.view() as view:
        table = view.open_version.tables["item"]
    device, host = table.device, table.host
    assert device is not None
    assert host is not None
    device.resize(0)
    there = np.setdiff1d(ITEMS, device.hot_keys(len(ITEMS)))
    assert len(there) > 100
    for seq in (1, 2):
        for _ in range(3):  # from disk; from the host tier by the CPU; by the device
            before, asked = counts(store), len(by_cpu)
            rows = ctr.lookup("item_id", ITEMS, device="gpu")
            np.testing.assert_array_equal(to_host(rows), expected)
            promoted(store)
        assert len(by_cpu) == asked
        assert counts(store)["host"] - before["host"] >= len(there) - 50
        assert device.stats()["host_problem"] is None
        host.resize(host.smallest_fraction)
        host.resize(1.0)
        assert device.stats()["host_problem"] is not None
        store.apply_delta(scenes.stamped(seq, {"item": there[::3]}))
        expected[np.searchsorted(ITEMS, there[::3])] = scenes.vectors("item", seq, there[::3])
        folded(store)


def test_answers_in_cpu_memory_come_from_the_host_tier_and_move_nothing_up(
    with_device: Callable[..., Store], tmp_path: Path
) -> None:
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr, offsets = store.model("ctr"), np.arange(0, 1000, 4)
    ctr.lookup("item_id", ITEMS)
    before = counts(store)
    for _ in range(3):
        np.testing.assert_array_equal(ctr.lookup("item_id", ITEMS), scenes.vectors("item", 0, ITEMS))
        ctr.lookup_bags("clicked", ITEMS, offsets)
        promoted(store)
    for tier, keys in counts(store).items():
        assert keys - before[tier] == (0 if tier != "host" else 5997), tier
    with ctr.view() as view:
        device = view.open_version.tables["item"].device
    assert device is not None
    assert device.rows_resident == 32  # of the snapshot's warm-up


def test_look_ups_that_the_device_answers_leave_the_queue_of_promotions_to_others(
    with_device: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    for _ in range(2):
        ctr.lookup("item_id", ITEMS, device="gpu")
        promoted(store)
    with ctr.view() as view:
        device = view.open_version.tables["item"].device
    assert device is not None
    held = device.hot_keys(500)
    offered: list[int] = []
    monkeypatch.setattr(store.shared.devices.promoter, "put", lambda offers: offered.append(offers.waiting))
    ctr.lookup("item_id", held)
    ctr.lookup("item_id", held, device="gpu")
    ctr.lookup("item_id", held[:0])
    assert offered == []


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_a_delta_is_seen_on_the_device_before_and_after_it_is_folded(
    with_device: Callable[..., Store], tmp_path: Path, grace_s: float
) -> None:
    store = with_device(fold_grace_s=grace_s)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    expected = scenes.vectors("item", 0, ITEMS)
    for seq in range(1, 6):
        ctr.lookup("item_id", ITEMS, device="gpu")  # offers what is about to become old
        changed = ITEMS[seq::7]
        store.apply_delta(scenes.stamped(seq, {"item": changed}))
        expected[changed] = scenes.vectors("item", seq, changed)
        np.testing.assert_array_equal(to_host(ctr.lookup("item_id", ITEMS, device="gpu")), expected)
        if not grace_s:
            folded(store)
        promoted(store)
        np.testing.assert_array_equal(to_host(ctr.lookup("item_id", ITEMS, device="gpu")), expected)
        np.testing.assert_array_equal(ctr.lookup("item_id", ITEMS), expected)
    store.apply_delta(scenes.delta(6, deletes={"item": ITEMS[:10]}))
    rows, found = ctr.lookup("item_id", ITEMS, device="gpu", return_found=True)
    assert found.tolist() == [False] * 10 + [True] * 990
    np.testing.assert_array_equal(to_host(rows)[:10], 0)
    bags = np.arange(0, 1000, 4)
    pooled, found = ctr.lookup_bags("clicked", ITEMS, bags, device="gpu", return_found=True)
    np.testing.assert_array_equal(to_host(pooled), ctr.lookup_bags("clicked", ITEMS, bags))
    assert np.count_nonzero(~found) == 10


def test_look_ups_of_many_threads_beside_deltas_are_right(with_device: Callable[..., Store], tmp_path: Path) -> None:
    store = with_device(fold_grace_s=0.0)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    faults: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set() and not faults:
            rows = to_host(ctr.lookup("item_id", ITEMS, device="gpu"))
            seen = {int(seq) for seq in range(6) if (rows == scenes.vectors("item", seq, ITEMS)).all()}
            if not seen:
                faults.append("rows of two deltas, or of none")

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for seq in range(1, 6):
        store.apply_delta(scenes.stamped(seq, {"item": ITEMS}))
        for _ in range(5):
            ctr.lookup("item_id", ITEMS, device="gpu")
    done.set()
    for reader in readers:
        reader.join()
    assert faults == []
    np.testing.assert_array_equal(to_host(ctr.lookup("item_id", ITEMS, device="gpu")), scenes.vectors("item", 5, ITEMS))


def test_a_switch_keeps_to_the_budget_and_what_is_replaced_gives_its_memory_back(
    on_stand_in: Callable[..., Store], gpus: list[ShimDevice], tmp_path: Path
) -> None:
    rows = {"user": 500, "item": 6_000}
    store = on_stand_in(device_budget="400KiB", host_budget="2MiB", keep_versions=9)
    devices = store.shared.devices
    most = 0

    def watch(progress: Any) -> None:
        nonlocal most
        most = max(most, gpus[0].used)

    for version in range(1, 4):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version, stamp=version, rows=rows), progress=watch)
        ctr = store.model("ctr")
        assert ctr.state.retiring.wait_closed(version - 1, 10)
        keys = np.arange(6_000)
        np.testing.assert_array_equal(
            to_host(ctr.lookup("item_id", keys, device="gpu")), scenes.vectors("item", version, keys)
        )
        assert [version.number for version in devices.versions] == [version]
        assert gpus[0].used <= 400 << 10
    assert 200 << 10 < most <= 400 << 10
    assert devices.budget.used <= devices.budget.total < 400 << 10
    assert store.status()["device_budget"] == {"used": devices.budget.used, "total": devices.budget.total}
    store.deactivate("ctr")
    assert ctr.state.retiring.wait_closed(3, 10)
    assert devices.budget.used == 0
    store.close()
    assert gpus[0].used == 0


def test_a_canary_has_device_tables_of_its_own_within_the_same_budget(
    on_stand_in: Callable[..., Store], gpus: list[ShimDevice], tmp_path: Path
) -> None:
    store = on_stand_in(device_budget="400KiB", keep_versions=9)
    rows = {"user": 500, "item": 4_000}
    for version in (1, 2):
        where = scenes.write_snapshot(tmp_path, version, stamp=version, rows=rows)
        store.load_snapshot(where, activate=version == 1)
    store.canary("ctr", 2, 0.5)
    ctr, keys = store.model("ctr"), np.arange(4_000)
    store.apply_delta(scenes.stamped(1, {"item": [3]}))
    for version in (1, 2, 1, 2):
        expected = scenes.vectors("item", version, keys)
        expected[3] = scenes.vector("item", 1, 3)
        for device in (None, "gpu"):
            np.testing.assert_array_equal(ctr.lookup("item_id", keys, version=version, device=device), expected)
        promoted(store)
    versions = store.shared.devices.versions
    assert sorted(version.number for version in versions) == [1, 2]
    for version in versions:
        table = version.tables["item"]
        assert table.device is not None
        assert table.device.rows_resident > 0
    assert gpus[0].used <= 400 << 10


def test_a_start_warms_the_device_with_the_hottest_keys_whatever_order_they_are_read_in(
    on_stand_in: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = on_stand_in()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    for _ in range(4):
        store.model("ctr").lookup("item_id", ITEMS[::3], device="gpu")
        promoted(store)
    store.model("ctr").lookup("item_id", ITEMS)
    store.close()
    assert sorted(np.load(tmp_path / "data/models/ctr/1/hot/item.npy")) == sorted(ITEMS)
    saved = np.load(tmp_path / "data/models/ctr/1/hot-device/item.npy")
    assert set(ITEMS[::3]) <= set(saved.tolist())
    into_device: list[int] = []
    warm = DeviceTable.warm

    def noted(table: DeviceTable, keys: Any, rows: Any, seq: int | None = None) -> int:
        if table.spec.name == "item":
            into_device.extend(keys.tolist())
        return warm(table, keys, rows, seq)

    monkeypatch.setattr(DeviceTable, "warm", noted)
    monkeypatch.setattr(DeviceTable, "capacity_rows", 100)
    scenes.warmed(on_stand_in())
    assert sorted(set(into_device)) == sorted(set(saved[:100].tolist()))


def test_who_is_put_out_of_the_device_goes_back_to_the_host_tier(
    with_device: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has forgotten nearly all rows meanwhile."""
    rows = {"user": 10, "item": 5_000}
    store = with_device(device_budget="200KiB", host_budget="8MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows=rows))
    ctr = store.model("ctr")
    with ctr.view() as view:
        table = view.open_version.tables["item"]
    host, keys = table.host, np.arange(5_000)
    assert host is not None
    put_out: list[Any] = []
    exchange = DeviceTable.exchange

    def noted(device: DeviceTable, *args: Any) -> Any:
        came = exchange(device, *args)
        host.resize(host.smallest_fraction)
        host.resize(1.0)
        put_out.append((came[1], {key for key in came[1].tolist() if host.peek(key).row is None}))
        return came

    monkeypatch.setattr(DeviceTable, "exchange", noted)
    for begin in range(0, 5_000, 1000):
        for _ in range(5):  # from disk to the host tier; from there, once they came often enough, to the device
            ctr.lookup("item_id", keys[begin : begin + 1000], device="gpu")
            promoted(store)
            if put_out and len(put_out[-1][1]):
                gone, forgotten = put_out[-1]
                assert sum(host.peek(key).row is not None for key in forgotten) > 0.9 * len(forgotten)
                back = ctr.lookup("item_id", gone)
                np.testing.assert_array_equal(back, scenes.vectors("item", 0, gone))
    assert table.device is not None
    assert table.device.rows_resident > 0.8 * table.device.capacity_rows
    assert sum(len(forgotten) for _, forgotten in put_out) > 100


def test_a_device_that_fails_while_serving_costs_no_answer_in_cpu_memory(
    on_stand_in: Callable[..., Store], gpus: list[ShimDevice], tmp_path: Path
) -> None:
    store = on_stand_in()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    for _ in range(2):
        ctr.lookup("item_id", ITEMS, device="gpu")
        promoted(store)
    gpus[0].broken = True
    with pytest.raises(StorageError, match="fell off the bus"):
        ctr.lookup("item_id", ITEMS, device="gpu")
    np.testing.assert_array_equal(ctr.lookup("item_id", ITEMS), scenes.vectors("item", 0, ITEMS))
    store.apply_delta(scenes.stamped(1, {"item": ITEMS}))
    folded(store)
    assert problems(store) == ["device 0: the device fell off the bus"]
    gpus[0].broken = False  # what it holds is from before the delta
    for device in (None, "gpu"):
        rows = ctr.lookup("item_id", ITEMS, device=device)
        np.testing.assert_array_equal(to_host(rows), scenes.vectors("item", 1, ITEMS))
    assert "fell off the bus" in store.status()["models"]["ctr"]["tables"]["item"]["device"]["problem"]


def test_answers_come_to_the_device_where_a_table_has_no_room_on_it(
    with_device: Callable[..., Store], tmp_path: Path
) -> None:
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    with ctr.view() as view:
        table = view.open_version.tables["item"]
        table.device, cache = None, table.device
        assert cache is not None
        cache.close()
    np.testing.assert_array_equal(to_host(ctr.lookup("item_id", ITEMS, device="gpu")), scenes.vectors("item", 0, ITEMS))
    bags = np.arange(0, 1000, 4)
    pooled = ctr.lookup_bags("clicked", ITEMS, bags, device="gpu", dtype="float16")
    np.testing.assert_array_equal(to_host(pooled), ctr.lookup_bags("clicked", ITEMS, bags, dtype="float16"))


def test_without_a_device_it_is_said_why(
    open_store: Callable[..., Store], tmp_path: Path, gpus: list[ShimDevice]
) -> None:
    store = open_store()
    assert store.status()["device"]["present"] is False
    assert store.status()["device"]["reason"] in (
        "extra gpu is not installed",
        "device_budget is 0: no device memory is given",
    )
    assert problems(store) == []
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    with pytest.raises((MissingExtra, NotReady), match="there is no device tier"):
        store.model("ctr").lookup("item_id", [1], device="gpu")
    with pytest.raises(InvalidInput, match="on 'cpu' or 'gpu'"):
        store.model("ctr").lookup("item_id", [1], device="tpu")
    store.close()
    gpus.clear()
    store = open_store(device_budget="1MiB")
    assert store.status()["device"].items() >= {"present": False, "reason": "no CUDA device"}.items()
    assert problems(store) == ["there is no device tier: no CUDA device"]
    assert len(store.model("ctr").lookup("item_id", [1], device="cpu")) == 1
    with pytest.raises(NotReady, match="no CUDA device"):
        store.model("ctr").lookup("item_id", OnGpu(ITEMS))
    with pytest.raises(NotReady, match="no CUDA device"):
        store.model("ctr").lookup("item_id", [1], device="gpu")


def test_a_budget_without_the_extra_is_refused_at_start(
    open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "find_backend", lambda: (None, gpu.NOT_INSTALLED))
    with pytest.raises(ConfigError, match="at least"):
        open_store(device_budget="99KiB")
    with pytest.raises(MissingExtra, match=r"tierstore\[gpu\]"):
        open_store(device_budget="1MiB")


def test_a_device_that_is_not_there_is_named(with_device: Callable[..., Store], tmp_path: Path) -> None:
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    with pytest.raises(NotReady, match="no device 3: a store uses the first GPU"):
        store.model("ctr").lookup("item_id", [1], device="gpu:3")
    with pytest.raises(InvalidInput, match="on the GPU, where the answer is"):
        store.model("ctr").lookup("item_id", [1], device="gpu", out=np.empty((1, 8), np.float32))


def test_the_queue_of_promotions_and_the_workspaces_show_how_full_they_are(
    with_device: Callable[..., Store], tmp_path: Path
) -> None:
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    promoter = store.shared.devices.promoter
    assert promoter is not None
    held, go_on = threading.Event(), threading.Event()
    other = threading.Thread(target=promoter.alone, args=(lambda: (held.set(), go_on.wait(30)),))
    other.start()
    assert held.wait(30)
    with store.model("ctr").view() as view:
        offer, tables = view.open_version.tables["item"].offer, len(view.open_version.tables)
    assert offer is not None
    dropped = store.status()["device"]["promotions_dropped"]
    offer(np.arange(RING_KEYS - 3), np.full(RING_KEYS - 3, Tier.HOST, np.uint8))
    offer(ITEMS[:5], np.array([Tier.HOST, Tier.DISK, Tier.HOST, Tier.DEVICE, Tier.HOST], np.uint8))
    offer(ITEMS[:5], np.full(5, Tier.HOST, np.uint8))
    device = store.status()["device"]
    assert device["promotions_waiting"] == RING_KEYS
    assert device["promotions_limit"] == RING_KEYS * tables
    assert device["promotions_dropped"] == dropped + 5
    assert (device["workspaces"], device["workspaces_taken"]) == (WORKSPACES, 0)
    go_on.set()
    other.join()
    promoted(store)
    assert store.status()["device"]["promotions_waiting"] == 0


def test_the_metrics_page_tells_of_the_device_tier(with_device: Callable[..., Store], tmp_path: Path) -> None:
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    status = store.status()
    samples = {
        (sample.name, sample.labels.get("table"), sample.labels.get("tier")): sample.value
        for metric in (*_tables(status["models"]), *device_families(status["device"]))
        for sample in metric.samples
    }
    assert samples["tierstore_device_present", None, None] == 1
    assert samples["tierstore_device_promotions_limit", None, None] % RING_KEYS == 0
    assert (
        0
        < samples["tierstore_tier_bytes", "item", "device"]
        <= samples["tierstore_tier_budget_bytes", "item", "device"]
    )


def test_rows_that_expire_are_not_on_the_device_either(
    with_device: Callable[..., Store], tmp_path: Path, days_later: Callable[[float], None]
) -> None:
    store = with_device()
    store.load_snapshot(ttl_scenes.write(tmp_path))
    ctr = store.model("ctr")
    for _ in range(3):  # on the device from the second time on
        ctr.lookup("user", np.arange(400), device="gpu")
        promoted(store)
    assert store.status()["models"]["ctr"]["tables"]["user"]["lookup_keys"]["device"] > 0
    days_later(20)
    ttl_scenes.check(store)
    assert ctr.problem is None
    for device in (None, "gpu"):
        _, found = ctr.lookup("user", np.arange(400), return_found=True, device=device)
        assert np.flatnonzero(found).tolist() == list(range(201))


def test_work_that_is_done_alone_is_between_two_promotions(with_device: Callable[..., Store]) -> None:
    promoter = with_device().shared.devices.promoter
    assert promoter is not None
    names: list[str] = []
    promoter.alone(lambda: names.append(threading.current_thread().name))
    assert names == ["tierstore-promoter"]
    with pytest.raises(NotReady):
        promoter.alone(lambda: (_ for _ in ()).throw(NotReady("injected")))
    promoter.drain()
