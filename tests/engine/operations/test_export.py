"""`export`: what is served, at one seq, as a snapshot from which another store answers the same."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tierstore
from tests.counts import few_or_many
from tests.engine import scenes
from tests.predict.onnx_models import linear
from tierstore.errors import Closed, Conflict, InvalidInput, NotFound, NotReady, StorageError
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.types import Progress

pytestmark = pytest.mark.usefixtures("quick_loads")

WAIT_S = 30
KEYS = {"item": np.arange(-5, 1200), "user": np.arange(-5, 700)}
OPTIONS = {"host_budget": "4MiB", "load_workers": 1, "disk_threads": 2}


def answers(store: tierstore.Store, model: str = "ctr") -> list[np.ndarray]:
    """Rows and found of every key there may be, and of pooled bags, as bytes: -0.0 is another answer than 0.0."""
    served = store.model(model)
    bags = served.lookup_bags("clicked", KEYS["item"], np.arange(0, len(KEYS["item"]), 5))
    found = [served.lookup(f"{name}_id", keys, return_found=True) for name, keys in KEYS.items()]
    return [array.view(np.uint8) for array in (bags, *(part for pair in found for part in pair))]


def check_same(store: tierstore.Store, exported: Path, root: Path) -> None:
    """Another store that loads the export answers as `store` does."""
    expected = answers(store)
    with tierstore.open(root, **OPTIONS) as other:
        other.load_snapshot(exported)
        for one, two in zip(expected, answers(other), strict=True):
            np.testing.assert_array_equal(one, two)
        assert other.verify().ok


def frozen(store: tierstore.Store, model: str = "ctr"):
    """Within this block nothing is folded: a request reads beneath it."""
    return store.model(model).view()


# --- rows


changes = st.lists(
    st.tuples(
        st.sampled_from(["item", "user"]),
        st.sets(st.integers(0, 1100), min_size=1, max_size=60),
        st.booleans(),  # whether they are deleted
    ),
    max_size=6,
)


@pytest.mark.thorough
@pytest.mark.parametrize("base", ["sealed", "rocksdb"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int4"])
@given(folded=changes, unfolded=changes, seed=st.integers(0, 1000))
@settings(max_examples=few_or_many(2, 6))
def test_every_row_is_equal_in_another_store(tmp_path_factory, base, dtype, folded, unfolded, seed):
    """Of rows that were loaded, folded and not folded, deleted and absent ones; the mean stays that of the load."""
    root, random = tmp_path_factory.mktemp("export"), np.random.default_rng(seed)

    def deltas(first: int, parts: list) -> list[bytes]:
        made = []
        for seq, (table, keys, gone) in enumerate(parts, first):
            rows = random.normal(3, 40, (len(keys), scenes.DIM[table])).astype(np.float32)
            made.append(
                scenes.delta(seq, **({"deletes": {table: keys}} if gone else {"upserts": {table: (keys, rows)}}))
            )
        return made

    where = scenes.write_snapshot(root, dtype=dtype, default="mean")
    with tierstore.open(root / "data", base=base, fold_grace_s=0.0, **OPTIONS) as store:
        store.load_snapshot(where)
        for delta in deltas(1, folded):
            store.apply_delta(delta)
        scenes.eventually(lambda: store.status()["models"]["ctr"]["overlays"] == 0, "it is folded")
        with frozen(store):
            for delta in deltas(len(folded) + 1, unfolded):
                store.apply_delta(delta)
            report = store.export("ctr", root / "out")
            assert (report.version, report.seq) == (1, len(folded) + len(unfolded))
            check_same(store, root / "out", root / "other")


@given(scale=st.floats(1e-30, 1e30), offset=st.floats(-1e6, 1e6), seed=st.integers(0, 10_000))
@settings(max_examples=few_or_many(15, 60))
def test_int8_rows_are_not_rounded_a_second_time(scale, offset, seed):
    from tierstore.kernels import codec
    from tierstore.types import StorageDtype

    def decoded(vectors: np.ndarray) -> np.ndarray:
        out = np.empty_like(vectors)
        codec.decode(codec.encode(vectors, StorageDtype.INT8), StorageDtype.INT8, out)
        return out

    vectors = (np.random.default_rng(seed).normal(size=(500, 16)) * scale + offset).astype(np.float32)
    once = decoded(vectors)
    np.testing.assert_array_equal(decoded(once), once)


@given(scale=st.floats(-9, 4), offset=st.floats(-6e4, 6e4), dim=st.integers(1, 20), seed=st.integers(0, 10_000))
@settings(max_examples=few_or_many(15, 60))
def test_int4_rows_are_rounded_a_second_time_where_their_numbers_are_alike_alone(scale, offset, dim, seed):
    from tierstore.kernels import codec
    from tierstore.types import StorageDtype

    def decoded(vectors: np.ndarray) -> np.ndarray:
        out = np.empty_like(vectors)
        codec.decode(codec.encode(vectors, StorageDtype.INT4), StorageDtype.INT4, out)
        return out

    vectors = np.random.default_rng(seed).normal(size=(500, dim)) * 10**scale + offset
    once = decoded(vectors.clip(-65e3, 65e3).astype(np.float32))
    changed, apart, size = np.abs(decoded(once) - once).max(axis=1), np.ptp(once, axis=1), np.abs(once).max(axis=1)
    assert not changed[(apart > 0.015 * size) & (apart > 2e-5)].any()
    assert (changed <= 2**-11 * size + 5e-7).all()


# --- one moment


def test_an_export_is_of_one_seq_whatever_is_applied_and_folded_meanwhile(open_store, tmp_path):
    """Each delta rewrites the same keys of both tables, so a mixture of two would show."""
    store = open_store()
    rows = {"user": 500, "item": 30_000}
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows=rows))
    touched = {"item": range(0, 30_000, 50), "user": range(0, 500, 5)}
    stop, failed, count = threading.Event(), [], [0]

    def produce() -> None:
        try:
            while not stop.is_set():
                count[0] += 1
                store.apply_delta(scenes.stamped(count[0], touched))
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    try:
        scenes.eventually(lambda: count[0] > 5, "deltas flow")
        reports = []
        for i in range(4):
            reports.append(store.export("ctr", tmp_path / f"out-{i}", as_version=i + 2))
            scenes.eventually(lambda before=count[0]: count[0] > before + 3, "deltas flow on")
    finally:
        stop.set()
        producer.join(WAIT_S)
    assert not failed
    assert len({report.seq for report in reports}) == 4
    with tierstore.open(tmp_path / "other", **OPTIONS) as other:
        for report, i in zip(reports, range(4), strict=True):
            assert Manifest.read(tmp_path / f"out-{i}" / "snapshot.json").delta_seq == report.seq
            other.load_snapshot(tmp_path / f"out-{i}")
            for table, keys in touched.items():
                got = other.model("ctr").lookup(f"{table}_id", np.array(keys))
                np.testing.assert_array_equal(got, scenes.vectors(table, report.seq, keys))


class Blocked:
    """An export that stands still after its first batch until it is let go on."""

    def __init__(self, store: tierstore.Store, where: Path, **options: object) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.outcome: list[object] = []

        def progress(_: Progress) -> None:
            self.reached.set()
            assert self.go_on.wait(WAIT_S)

        def run() -> None:
            try:
                self.outcome.append(store.export("ctr", where, progress=progress, **options))
            except BaseException as error:  # noqa: BLE001
                self.outcome.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert self.reached.wait(WAIT_S)

    def result(self) -> object:
        self.go_on.set()
        self._thread.join(WAIT_S)
        assert self.outcome
        return self.outcome[0]


def test_deltas_are_folded_and_versions_switched_while_an_export_reads(open_store, tmp_path):
    store = open_store(keep_versions=9)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1))
    with frozen(store):
        store.apply_delta(scenes.stamped(1, {"item": range(40), "user": range(40)}))
        expected = answers(store)
        export = Blocked(store, tmp_path / "out")
    store.apply_delta(scenes.stamped(2, {"item": range(20, 60), "user": range(20, 60)}))
    scenes.eventually(lambda: store.status()["models"]["ctr"]["overlays"] == 0, "nothing waits for the export")
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, stamp=5))
    assert store.model("ctr").active_version == 2
    report = export.result()
    assert isinstance(report, tierstore.types.ExportReport), report
    assert (report.version, report.seq) == (1, 1)
    scenes.eventually(lambda: not store.model("ctr").state.retiring, "the version that was read is closed")
    with tierstore.open(tmp_path / "other", **OPTIONS) as other:
        other.load_snapshot(tmp_path / "out")
        for one, two in zip(expected, answers(other), strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("verb", ["rollback", "drop"])
def test_a_switch_back_to_the_version_that_is_read_ends_the_export(open_store, tmp_path, verb):
    store = open_store(keep_versions=9)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, stamp=1))
    export = Blocked(store, tmp_path / "out")
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, stamp=2))
    call = {"rollback": lambda: store.rollback("ctr"), "drop": lambda: store.drop("ctr", 1)}[verb]
    with ThreadPoolExecutor(1) as other:
        switched = other.submit(call)
        scenes.eventually(lambda: store.model("ctr").state.retiring.is_awaited(1), "the other waits")
        outcome = export.result()
        switched.result(WAIT_S)
    assert isinstance(outcome, Closed), outcome
    assert "version 1 is being switched to or dropped" in str(outcome)
    assert not (tmp_path / "out").exists()
    assert store.model("ctr").versions == ([1, 2] if verb == "rollback" else [2])


def test_an_export_that_is_cancelled_leaves_nothing(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    cancelled = threading.Event()
    export = Blocked(store, tmp_path / "out", cancelled=cancelled)
    cancelled.set()
    assert isinstance(export.result(), Closed)
    assert not (tmp_path / "out").exists()
    store.export("ctr", tmp_path / "out")


def test_a_store_that_is_closed_ends_an_export(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    model, export = store.model("ctr"), Blocked(store, tmp_path / "out")
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    scenes.eventually(lambda: model.state.live.closed, "it is closing")
    assert isinstance(export.result(), Closed)
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert not (tmp_path / "out").exists()


def test_ctrl_c_ends_an_export(store, tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    batches: list[Progress] = []

    def interrupt(step: Progress) -> None:
        batches.append(step)
        if len(batches) == 1:
            time.sleep(0.5)  # the main thread waits by then: a signal before that is noticed late
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(2)

    try:
        with pytest.raises(KeyboardInterrupt):
            store.export("ctr", tmp_path / "out", progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(batches) == 1
    assert not (tmp_path / "out").exists()


# --- everything else


def test_features_defaults_and_warm_up_keys_are_exported(store, open_store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path, default="mean", dtype="float16"))
    store.export("ctr", tmp_path / "out", as_version=7)
    before, after = (Manifest.read(tmp_path / name / "snapshot.json") for name in ("ctr-1", "out"))
    assert (after.model, after.version, after.delta_seq) == ("ctr", 7, 0)
    assert after.feature_specs() == before.feature_specs()
    assert [(table.name, table.rows, table.dtype) for table in after.tables] == [
        (table.name, table.rows, table.dtype) for table in before.tables
    ]
    np.testing.assert_array_equal(np.load(tmp_path / "out" / after.warmup["item"]), np.arange(32))


def test_keys_of_64_bits_without_sign_are_exported(store, tmp_path):
    keys = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    with tierstore.SnapshotWriter(tmp_path / "in", model="ids", version=1) as writer:
        writer.table("id", dim=2, key="uint64").write(keys, np.arange(8, dtype=np.float32).reshape(4, 2))
        writer.feature("id", table="id", combiner="sum", padding_key=2**64 - 1)
        writer.warmup("id", keys)
    store.load_snapshot(tmp_path / "in")
    assert store.export("ids", tmp_path / "out").rows == 4
    with tierstore.open(tmp_path / "other", **OPTIONS) as other:
        other.load_snapshot(tmp_path / "out")
        np.testing.assert_array_equal(other.model("ids").lookup("id", keys), store.model("ids").lookup("id", keys))


@pytest.mark.parametrize("folded", [False, True])
def test_the_dense_part_is_the_one_that_is_served(store, tmp_path, folded):
    pytest.importorskip("onnxruntime")
    first, second = (linear({"user_id": np.full(scenes.DIM["user"], factor)}) for factor in (1.0, 3.0))
    request = {"user_id": np.array([1, 2, 3])}
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=first, requests=[request]))
    store.export("ctr", tmp_path / "before")
    assert (tmp_path / "before" / "dense.onnx").read_bytes() == first
    with frozen(store):
        store.apply_delta(scenes.delta(1, dense=second))
        if not folded:
            store.export("ctr", tmp_path / "after")
    if folded:
        scenes.eventually(lambda: store.status()["models"]["ctr"]["overlays"] == 0, "it is folded")
        store.export("ctr", tmp_path / "after")
    assert (tmp_path / "after" / "dense.onnx").read_bytes() == second
    with tierstore.open(tmp_path / "other", **OPTIONS) as other:
        other.load_snapshot(tmp_path / "after")
        np.testing.assert_array_equal(other.model("ctr").predict(request), store.model("ctr").predict(request))


def test_a_canary_is_exported_by_its_number_or_label(open_store, tmp_path):
    store = open_store(keep_versions=9)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1))
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, stamp=3), activate=False)
    with pytest.raises(NotReady, match="serves version 1, not 2"):
        store.export("ctr", tmp_path / "no", version=2)
    store.canary("ctr", 2, 1.0)
    assert store.export("ctr", tmp_path / "active").version == 1
    assert store.export("ctr", tmp_path / "canary", version="canary").version == 2
    assert store.export("ctr", tmp_path / "two", version=2).version == 2


def test_after_an_export_deltas_go_on_where_it_ends(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.apply_delta(scenes.stamped(1, {"item": [1]}))
    store.export("ctr", tmp_path / "out")
    with tierstore.open(tmp_path / "other", **OPTIONS) as other:
        other.load_snapshot(tmp_path / "out")
        assert not other.apply_delta(scenes.stamped(1, {"item": [1]})).applied
        assert other.apply_delta(scenes.stamped(2, {"item": [2]})).applied


# --- refusals


def test_a_directory_that_exists_is_refused_and_not_touched(store, tmp_path):
    where = scenes.write_snapshot(tmp_path)
    store.load_snapshot(where)
    before = (where / "snapshot.json").read_bytes()
    with pytest.raises(Conflict, match="exists already"):
        store.export("ctr", where)
    assert (where / "snapshot.json").read_bytes() == before
    with pytest.raises(InvalidInput, match="in the data directory"):
        store.export("ctr", store.root.root / "models" / "out")


def test_a_directory_that_cannot_be_made_is_an_error(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot create the directory"):
        store.export("ctr", tmp_path / "file" / "out")


def test_what_is_not_there_is_named(store, tmp_path):
    with pytest.raises(NotFound, match="no model 'ctr'"):
        store.export("ctr", tmp_path / "out")
    store.load_snapshot(scenes.write_snapshot(tmp_path), activate=False)
    with pytest.raises(NotReady, match="no active version"):
        store.export("ctr", tmp_path / "out")
    store.activate("ctr", 1)
    with pytest.raises(NotFound):
        store.export("ctr", tmp_path / "out", version=5)
    with pytest.raises(NotFound, match="no label 'best'"):
        store.export("ctr", tmp_path / "out", version="best")
    with pytest.raises(InvalidInput, match="version"):
        store.export("ctr", tmp_path / "out", as_version=0)
    assert not (tmp_path / "out").exists()
