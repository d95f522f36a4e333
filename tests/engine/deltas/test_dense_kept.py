"""A delta's dense part and the versions that do not serve: applied where it fits, passed over where it does not, once."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.reads.test_dense import folded, state
from tests.predict import onnx_models as om
from tests.tiers.full_disk import full_disk
from tierstore.engine.data.dense_head import DenseHead
from tierstore.engine.data.overlay import Overlay, encode_delta
from tierstore.engine.operations.from_peers import follow_delta
from tierstore.errors import DeltaError, InvalidInput, StorageError
from tierstore.formats import files
from tierstore.formats.delta.reader import read_delta
from tierstore.formats.files import FileSystem
from tierstore.tiers.disk.tier import DiskTier

pytestmark = pytest.mark.usefixtures("quick_loads")

DIM = 4
OLD = om.linear({"user_id": np.ones(DIM)})
CITY = {"user_id": np.ones(DIM), "city": np.ones(DIM)}  # of a version with the feature `city`


def snapshot(root: Path, version: int, features: dict[str, str | None], dense: bytes, *, delta_seq: int = 0) -> Path:
    """One table of ten rows that name the version; `features` of it, each with its combiner."""
    where = root / f"kept-{version}"
    with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=delta_seq) as writer:
        writer.table("user", dim=DIM).write(np.arange(10), np.full((10, DIM), version, np.float32))
        for name, combiner in features.items():
            writer.feature(name, table="user", combiner=combiner)
        writer.dense(dense)
    return where


def rows(seq: int, **options: object) -> bytes:
    """A delta that has row 1 name `seq`."""
    return scenes.delta(seq, {"user": ([1], np.full((1, DIM), seq, np.float32))}, **options)


def two(store: tierstore.Store, root: Path, newer: dict[str, str | None], dense: bytes) -> tierstore.Model:
    """Versions 1, kept, with the feature `user_id` alone, and 2, active, with `newer` ones beside it."""
    store.load_snapshot(snapshot(root, 1, {"user_id": None}, OLD))
    store.load_snapshot(snapshot(root, 2, {"user_id": None} | newer, dense))
    return store.model("ctr")


def graph(weights: dict[str, np.ndarray]) -> bytes:
    return om.linear(weights, 100.0)


@pytest.mark.parametrize("behind", ["at the rollback", "in the background"])
def test_a_dense_part_that_does_not_fit_a_kept_version_is_passed_over_and_rolled_back_past(
    open_store, tmp_path, monkeypatch, behind
):
    store = open_store()
    ctr = two(store, tmp_path, {"city": None}, graph(CITY))
    store.apply_delta(rows(1, dense=graph(CITY)))
    store.apply_delta(rows(2))
    if behind == "in the background":
        monkeypatch.setattr("tierstore.engine.lifecycle.tasks.KEPT_LAG", 0)
        ctr.housekeeping.tasks.run()
        assert ctr.catalogue.info(1).watermark == 2
    assert store.rollback("ctr") == 1
    assert ctr.predict({"user_id": [1, 2]})[:, 0].tolist() == [2 * DIM, 1 * DIM], "new rows, its own dense part"
    why = "input 'city' is a feature of version 2 and none of version 1"
    assert state(store).startswith("served; a newer one was passed over: delta 1:")
    assert why in state(store)
    store.close()
    store = open_store()
    assert why in state(store), "after a restart"
    store.apply_delta(rows(3, dense=om.linear({"user_id": np.ones(DIM)}, 7.0)))
    assert state(store) == "served"
    store.close()
    store = open_store()
    assert state(store) == "served"
    assert store.model("ctr").predict({"user_id": [1]})[0, 0] == 3 * DIM + 7
    assert store.activate("ctr", 2) is None
    assert store.model("ctr").signature.inputs[0].name == "user_id"


def test_a_dense_part_whose_shapes_do_not_fit_is_passed_over(store, tmp_path):
    bags = om.build(
        [om.node("ReduceSum", "clicked axes", "score", keepdims=0)],
        {"clicked": (om.FLOAT, ["batch", "k", DIM])},
        {"score": (om.FLOAT, ["batch", DIM])},
        {"axes": np.array([1], np.int64)},
    )
    store.load_snapshot(snapshot(tmp_path, 1, {"clicked": "sum"}, om.linear({"clicked": np.ones(DIM)})))
    store.load_snapshot(snapshot(tmp_path, 2, {"clicked": None}, bags))
    store.apply_delta(rows(1, dense=bags))
    store.rollback("ctr")
    assert store.model("ctr").predict({"clicked": [1]})[0, 0] == 1 * DIM
    assert "input 'clicked'" in state(store)


def test_of_several_that_a_version_lacks_the_newest_that_fits_is_taken(store, tmp_path):
    ctr = two(store, tmp_path, {"city": None}, graph(CITY))
    store.apply_delta(rows(1, dense=om.linear({"user_id": np.ones(DIM)}, 1.0)))
    store.apply_delta(rows(2, dense=om.linear({"user_id": np.ones(DIM)}, 2.0)))
    store.apply_delta(rows(3, dense=graph(CITY)))
    store.rollback("ctr")
    assert ctr.predict({"user_id": [1]})[0, 0] == 3 * DIM + 2
    assert "delta 3" in state(store)


def test_a_snapshot_that_is_loaded_keeps_its_dense_part_where_a_later_delta_brings_one_that_does_not_fit(
    store, tmp_path
):
    store.load_snapshot(snapshot(tmp_path, 1, {"user_id": None, "city": None}, graph(CITY)))
    store.apply_delta(rows(1, dense=graph(CITY)))
    store.load_snapshot(snapshot(tmp_path, 2, {"user_id": None}, OLD))
    assert store.model("ctr").predict({"user_id": [1]})[0, 0] == DIM
    assert "delta 1" in state(store, 2)


def test_a_delta_for_a_kept_version_alone_need_not_suit_what_is_active(store, tmp_path):
    store.load_snapshot(snapshot(tmp_path, 1, {"user_id": None, "city": None}, graph(CITY)))
    store.load_snapshot(snapshot(tmp_path, 2, {"user_id": None}, OLD))
    store.apply_delta(rows(1, base_version=1, dense=om.linear(CITY, 7.0)))
    store.rollback("ctr")
    assert store.model("ctr").predict({"user_id": [1], "city": [2]})[0, 0] == DIM + DIM + 7


@pytest.mark.parametrize("reopen", [False, True], ids=["goes on", "reopens"])
def test_what_a_version_accepted_while_it_served_is_its_own_though_the_next_one_lacks_a_feature(
    open_store, tmp_path, reopen
):
    store = open_store(fold_grace_s=60)
    store.load_snapshot(snapshot(tmp_path, 1, {"user_id": None, "city": None}, graph(CITY)))
    store.apply_delta(rows(1, dense=om.linear(CITY, 7.0)))  # not folded before the next version takes over
    store.load_snapshot(snapshot(tmp_path, 2, {"user_id": None}, OLD, delta_seq=1))
    if reopen:
        store.close()
        store = open_store()
    store.rollback("ctr")
    assert store.model("ctr").predict({"user_id": [1], "city": [1]})[0, 0] == DIM + DIM + 7


def test_a_new_input_that_the_next_version_has_for_a_feature_stays_an_input_of_the_one_that_accepted_it(
    store, tmp_path
):
    store.load_snapshot(snapshot(tmp_path, 1, {"user_id": None}, OLD))
    with store.model("ctr").view():  # nothing is folded meanwhile
        store.apply_delta(rows(1, dense=om.linear(CITY)))
        store.load_snapshot(snapshot(tmp_path, 2, {"user_id": None, "city": None}, graph(CITY), delta_seq=1))
    store.rollback("ctr")
    assert store.model("ctr").predict({"user_id": [1], "city": np.ones((1, DIM))})[0, 0] == DIM + DIM


def test_a_canary_is_asked_whether_inputs_mean_the_same_to_it(store, tmp_path):
    store.load_snapshot(snapshot(tmp_path, 1, {"user_id": None, "city": None}, graph(CITY)))
    store.load_snapshot(snapshot(tmp_path, 2, {"user_id": None}, OLD), activate=False)
    store.canary("ctr", 2)
    with pytest.raises(
        DeltaError, match=r"'city' is a feature of version 1 and none of version 2; version 2 is the canary"
    ):
        store.apply_delta(rows(1, dense=graph(CITY)))
    store.apply_delta(rows(1, dense=graph(CITY), base_version=1))


# --- rows and dense part on disk: both or neither


class Refusing(FileSystem):
    """Fails to write, or to rename, a dense part on its way."""

    def __init__(self, what: str) -> None:
        self._what = what

    def create(self, path):
        if self._what == "write" and "dense-" in path.name:
            raise OSError(errno.ENOSPC, "injected failure")
        return super().create(path)

    def rename(self, old, new):
        if self._what == "rename" and old.name.startswith("dense-"):
            raise OSError(errno.EIO, "injected failure")
        super().rename(old, new)


def left_over(root: Path) -> list[str]:
    """Dense parts on their way: in the directory of version 1, beside the one that holds and the one that was loaded."""
    return [path.name for path in (root / "data/models/ctr/1").glob("dense-*") if path.name != "dense-loaded.onnx"]


def scores(store: tierstore.Store) -> list[float]:
    return store.model("ctr").predict({"user_id": [1, 2]})[:, 0].tolist()


@pytest.mark.parametrize("crash", [False, True], ids=["goes on", "crashes"])
@pytest.mark.parametrize("what", ["write", "ingest", "rename"])
def test_a_kept_version_has_rows_and_dense_part_of_a_delta_or_neither(open_store, tmp_path, monkeypatch, what, crash):
    """At whichever step of a catch-up the disk fails; and whether or not the log still has the delta afterwards."""
    store = open_store()
    for version in (1, 2):
        store.load_snapshot(snapshot(tmp_path, version, {"user_id": None}, OLD))
    store.apply_delta(rows(1, dense=om.linear({"user_id": np.ones(DIM)}, 50.0)))
    ingested = DiskTier.ingest

    def ingest(self, parts):
        if "/1/" in str(self.path):
            raise StorageError("injected failure")
        ingested(self, parts)

    with files.use(Refusing(what)), monkeypatch.context() as patch:
        if what == "ingest":
            patch.setattr("tierstore.tiers.disk.tier.DiskTier.ingest", ingest)
        with pytest.raises(StorageError, match="injected"):
            store.rollback("ctr")
    assert store.model("ctr").active_version == 2
    if crash:
        store.close()
        image = tmp_path / "left"
        shutil.copytree(tmp_path / "data", image)
        for entry in (image / "models/ctr/log").glob("*.arrow"):
            entry.unlink()  # as if the log had gone on without this version
        (image / "models/ctr/log.end").unlink()
        with tierstore.open(image, host_budget="4MiB", load_workers=1) as other:
            other.activate("ctr", 1, force=True)
            assert scores(other) in ([DIM, DIM], [DIM + 50, DIM + 50]), "both or neither"
            assert (scores(other)[0] == DIM + 50) == (what == "rename"), "once the watermark has moved, it is done"
        store = open_store()
    store.rollback("ctr")
    assert scores(store) == [DIM + 50, DIM + 50]
    assert left_over(tmp_path) == []


def test_without_the_extra_nothing_is_checked_and_the_newest_is_kept(open_store, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("tierstore.predict.runtime.missing_extra", lambda: "install tierstore[dense] (no module)")
        store = open_store()
        for version in (1, 2):
            store.load_snapshot(snapshot(tmp_path, version, {"user_id": None}, OLD))
        store.apply_delta(rows(1, dense=b"not looked into"))
        store.rollback("ctr")
        assert state(store) == "kept, not served: install tierstore[dense] (no module)"
        store.close()
    assert "not an ONNX model" in state(open_store())


def test_what_was_accepted_by_the_version_that_served_is_not_passed_over_at_a_start(open_store, tmp_path, monkeypatch):
    """Then older scores would come back in silence; it is said that there are none."""
    store = open_store(fold_grace_s=60)
    store.load_snapshot(snapshot(tmp_path, 1, {"user_id": None}, OLD))
    store.apply_delta(rows(1, dense=om.linear({"user_id": np.ones(DIM)}, 50.0)))
    store.close()
    load = type(store.shared.dense).load

    def choosy(self, model, *args, **options):
        if model != OLD:
            raise InvalidInput("another release of the runtime refuses it")
        return load(self, model, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("tierstore.predict.runtime.Runtime.load", choosy)
        store = open_store()
        assert state(store) == "kept, not served: another release of the runtime refuses it"
        store.close()
    assert scores(open_store()) == [DIM + 50, DIM + 50]


@pytest.mark.parametrize("folds_after_s", [0, 3600], ids=["folded", "in memory"])
def test_a_dense_part_of_a_peer_that_does_not_fit_stays_passed_over_at_every_start(open_store, tmp_path, folds_after_s):
    """The peer acknowledged it, so its rows are taken; the version goes on with the dense part that it has."""
    store = open_store(fold_grace_s=folds_after_s)
    store.load_snapshot(snapshot(tmp_path, 1, {"user_id": None}, OLD))
    follow_delta(store.model("ctr"), rows(1, dense=om.linear({"user_id": np.ones(DIM + 1)})), 1)

    def check(key_2: float = 1.0, *, more: float = 0.0) -> None:
        assert scores(store) == [DIM + more, key_2 * DIM + more]
        assert state(store).startswith("served; a newer one was passed over: delta 1:")

    check()
    for _ in range(2):
        store.close()
        store = open_store(fold_grace_s=folds_after_s)
        check()
    follow_delta(store.model("ctr"), scenes.delta(2, {"user": ([2], np.full((1, DIM), 2, np.float32))}), 2)
    check(2)
    store.close()
    store = open_store(fold_grace_s=folds_after_s)
    check(2)
    fits = om.linear({"user_id": np.ones(DIM)}, 50.0)
    follow_delta(store.model("ctr"), scenes.delta(3, dense=fits), 3)
    follow_delta(store.model("ctr"), rows(4, dense=om.linear({"user_id": np.ones(DIM + 1)})), 4)
    for _ in range(2):
        assert scores(store) == [4 * DIM + 50, 2 * DIM + 50], "what fits is taken, before and after what does not"
        assert "passed over: delta 4:" in state(store)
        store.close()
        store = open_store(fold_grace_s=folds_after_s)


def test_deltas_that_merge_in_memory_say_what_the_newest_of_them_passes_over():
    none = Overlay(1, 1, {})
    refused = Overlay(2, 2, {}, passed_over={"": "delta 2: why", "cvr": "delta 2: why not"})
    fits = Overlay(3, 3, {}, {"": DenseHead(graph=b"d")})
    other = Overlay(4, 4, {}, passed_over={"": "delta 4: why"})
    assert none.merged(refused).passed_over == refused.passed_over
    assert refused.merged(none).passed_over == refused.passed_over
    assert refused.merged(fits).passed_over == {"cvr": "delta 2: why not"}
    both = fits.merged(other)
    assert (both.heads[""].graph, both.passed_over) == (b"d", {"": "delta 4: why"})
    assert both.merged(none).passed_over == {"": "delta 4: why"}


def test_why_a_dense_part_is_not_served_is_said_as_well_once_its_delta_is_folded(open_store, tmp_path, monkeypatch):
    """Not that something has to be installed, which is."""
    store = open_store(fold_grace_s=60)
    store.load_snapshot(snapshot(tmp_path, 1, {"user_id": None}, OLD))
    store.apply_delta(rows(1, dense=om.linear({"user_id": np.ones(DIM)}, 50.0)))
    store.close()
    load, why = type(store.shared.dense).load, "another release of the runtime refuses it"

    def choosy(self, model, *args, **options):
        if model != OLD:
            raise InvalidInput(why)
        return load(self, model, *args, **options)

    monkeypatch.setattr("tierstore.predict.runtime.Runtime.load", choosy)
    with full_disk() as disk:
        disk.full = True
        store = open_store()  # the delta is served from memory
        assert store.model("ctr").served.active.overlays
        assert state(store) == "kept, not served: delta 1: the dense part cannot be served: " + why
        disk.full = False
        folded(store)
    assert state(store) == "kept, not served: delta 1: the dense part cannot be served: " + why


def test_folds_that_fail_leave_one_dense_part_on_its_way_at_most(open_store, tmp_path, monkeypatch):
    """However many deltas come until the disk tier takes them, each making another name of the next try."""
    store = open_store()
    store.load_snapshot(snapshot(tmp_path, 1, {"user_id": None}, OLD))
    version = store.model("ctr").served.active.open_version

    def refuse(self, parts):
        raise StorageError("injected failure")

    overlay = encode_delta(
        read_delta(rows(1, dense=om.linear({"user_id": np.ones(DIM)}, 50.0))), version.specs, {}, for_this_version=True
    )
    with monkeypatch.context() as patch:
        patch.setattr("tierstore.tiers.disk.tier.DiskTier.ingest", refuse)
        for seq in range(1, 4):
            if seq > 1:
                overlay = overlay.merged(encode_delta(read_delta(rows(seq)), version.specs, {}, for_this_version=True))
            with pytest.raises(StorageError, match="injected"):
                version.fold(overlay)
    on_its_way = left_over(tmp_path)
    assert on_its_way == ["dense-3.onnx"]
    version.fold(overlay)
    assert left_over(tmp_path) == []
