"""A rollback to a delta: what serves then equals a store that never had the deltas after it, whatever happens on the way."""

from __future__ import annotations

import importlib.util
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.test_faults import PowerCut
from tests.engine.test_store import folded
from tests.formats.disks import FailingDisk
from tierstore.engine.serving.undone import Undone
from tierstore.errors import Conflict, InvalidInput, TierstoreError
from tierstore.formats import files

pytestmark = pytest.mark.usefixtures("quick_loads")

KEYS = np.array([*range(40), 499, 999, 1000, 7000, 7001, 7002, 7003, 7004, 7005, -5])
CAN_PREDICT = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))

OpenStore = Callable[..., tierstore.Store]


@pytest.fixture
def reference(tmp_path: Path) -> Iterator[tierstore.Store]:
    """A store that never sees what is bad."""
    with tierstore.open(tmp_path / "reference", host_budget="4MiB", disk_threads=1) as store:
        yield store


def delta(seq: int, *, bad: bool = False, **options: object) -> bytes:
    """Rewrites some rows, adds one and deletes one."""
    keys = [seq, 10, 7000 + seq] if not bad else [*range(30), 7000 + seq, 999]
    gone = [20 + seq] if not bad else [31, 32, 33, *range(7000, 7000 + seq)]
    rows = scenes.vectors("item", seq + 3 * bad, keys)
    return scenes.delta(seq, {"item": (keys, rows)}, {"item": gone, "user": [seq]}, **options)  # type: ignore[arg-type]


def empty(seq: int) -> bytes:
    return scenes.delta(seq, {}, {"user": [123456]})


def content(store: tierstore.Store, version: int | str = "stable") -> dict[str, np.ndarray]:
    with store.model("ctr").view(version) as view:
        found = {}
        for feature in ("user_id", "item_id"):
            found[feature], found[f"{feature}.found"] = view.lookup(feature, KEYS, return_found=True)
        found["bags"] = view.lookup_bags("clicked", KEYS, np.arange(0, len(KEYS), 5))
        if view.session is not None:
            found["predicted"] = view.predict({"user_id": KEYS})
        return found


def assert_equal(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)


def undone(store: tierstore.Store) -> list[list[int]]:
    ranges: list[list[int]] = store.status()["models"]["ctr"]["undone"]
    return ranges


def state_of(store: tierstore.Store, version: int) -> str:
    entries = store.status()["models"]["ctr"]["versions"]
    return next(entry["state"] for entry in entries if entry["version"] == version)


def dense_of(seq: int) -> bytes | None:
    if not CAN_PREDICT:
        return None
    from tests.predict import onnx_models

    return onnx_models.linear({"user_id": np.ones(scenes.DIM["user"])}, bias=float(seq))


@pytest.mark.parametrize("default", ["zeros", "mean", [float(i) for i in range(4)]], ids=["zeros", "mean", "vector"])
@pytest.mark.parametrize("fold", [False, True], ids=["in memory", "folded"])
def test_the_model_is_as_if_it_had_never_seen_them(tmp_path, open_store, reference, fold, default):
    dim4 = {"user": 4, "item": 4}
    store = open_store(fold_grace_s=0.0 if fold else 60.0)
    default_of_all = default
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenes, "DIM", dim4)
        where = scenes.write_snapshot(tmp_path, default=default_of_all, dense=dense_of(0))
        store.load_snapshot(where)
        reference.load_snapshot(where)
        for seq in range(1, 8):
            is_bad = seq in (4, 5, 6)
            dense = dense_of(seq) if seq in (2, 5) else None
            store.apply_delta(delta(seq, bad=is_bad, dense=dense)) if seq < 7 else None
            reference.apply_delta(empty(seq) if is_bad else delta(seq, dense=dense)) if seq < 7 else None
        if fold:
            folded(store)
        assert store.rollback("ctr", to_seq=3) == 1
        assert undone(store) == [[4, 6]]
        assert_equal(content(store), content(reference))
        for each in (store, reference):
            assert each.apply_delta(delta(7)).applied
        assert_equal(content(store), content(reference))
        store.close()
        again = open_store()
        assert_equal(content(scenes.warmed(again)), content(reference))
        assert again.verify().ok
        assert undone(again) == [[4, 6]]
        scenes.housekeep(again)
        assert sorted(path.name for path in (tmp_path / "data/models/ctr").iterdir() if path.is_dir()) == ["1.1", "log"]


@pytest.mark.skipif(not CAN_PREDICT, reason="needs the extra `dense`")
def test_the_dense_part_as_loaded_comes_back(tmp_path, open_store):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=dense_of(100)))
    loaded = content(store)
    for seq in (1, 2):
        store.apply_delta(delta(seq, dense=dense_of(seq)))
        folded(store)
    store.rollback("ctr", to_seq=0)
    assert_equal(content(store), loaded)
    store.apply_delta(delta(3, dense=dense_of(3)))
    folded(store)
    store.close()
    store = open_store()
    store.rollback("ctr", to_seq=2)
    assert content(store)["predicted"].reshape(-1)[10] == content(store)["user_id"][10].sum() + 2
    store.rollback("ctr", to_seq=0)
    assert_equal(content(store), loaded)
    assert store.verify().ok
    store.apply_delta(delta(4, dense=dense_of(4)))
    folded(store)
    kept = next((tmp_path / "data/models/ctr").glob("1.*/dense-loaded.onnx"))
    kept.write_bytes(b"damaged")
    assert "dense-loaded.onnx does not match its checksum" in store.verify().problems[0]
    before = content(store)
    with pytest.raises(TierstoreError, match="does not match its checksum"):
        store.rollback("ctr", to_seq=0)
    assert_equal(content(store), before)


def test_a_rollback_can_be_undone_and_moved(tmp_path, open_store):
    """To a seq whose delta was undone: as it was right after that delta was applied."""
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    states = [content(store)]
    for seq in range(1, 6):
        store.apply_delta(delta(seq, bad=seq == 5))
        states.append(content(store))
    for seq in (2, 4, 0, 5, 3, 3):
        store.rollback("ctr", to_seq=seq)
        assert_equal(content(store), states[seq])
        assert undone(store) == ([[seq + 1, 5]] if seq < 5 else [])
    store.apply_delta(delta(6))
    as_of_6 = content(store)
    store.apply_delta(delta(7, bad=True))
    store.rollback("ctr", to_seq=6)
    assert_equal(content(store), as_of_6)
    assert undone(store) == [[4, 5], [7, 7]]


def test_what_was_undone_before_a_delta_stays_undone_in_its_state(tmp_path, open_store, reference):
    """Delta 2 is bad and undone; a rollback too far, which is taken back, must not bring it back."""
    store = open_store()
    where = scenes.write_snapshot(tmp_path)
    store.load_snapshot(where)
    reference.load_snapshot(where)
    for seq in (1, 2):
        store.apply_delta(delta(seq, bad=seq == 2))
    store.rollback("ctr", to_seq=1)
    for seq in (3, 4):
        store.apply_delta(delta(seq))
    store.rollback("ctr", to_seq=1)
    assert undone(store) == [[2, 4]]
    store.close()
    store = open_store()
    store.rollback("ctr", to_seq=4)
    assert undone(store) == [[2, 2]]
    for seq in range(1, 5):
        reference.apply_delta(empty(seq) if seq == 2 else delta(seq))
    assert_equal(content(store), content(reference))


def test_what_makes_no_sense_is_not_read():
    undone = Undone().as_of(1, 3).as_of(5, 9).with_line(1, 2)
    assert Undone.parse(undone.document()) == undone
    for rollbacks in ([[2, 3]], [[5, 9], [1, 3]], [[9, 5]]):
        with pytest.raises(ValueError):
            Undone.parse(undone.document() | {"rollbacks": rollbacks})


def test_producers_go_on_after_the_newest_seq(tmp_path, store):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    sent = {seq: delta(seq) for seq in (1, 2, 3)}
    for data in sent.values():
        store.apply_delta(data)
    store.rollback("ctr", to_seq=1)
    before = content(store)
    answers = [store.apply_delta(data) for data in sent.values()]
    assert [(answer.applied, answer.send_as) for answer in answers] == [(False, None), (False, 4), (False, 4)]
    assert_equal(content(store), before)
    with pytest.raises(Conflict, match="held with other content"):
        store.apply_delta(delta(2, bad=True))
    assert store.status()["models"]["ctr"]["watermark"] == 3
    assert store.apply_delta(delta(4)).applied


def test_kept_versions_and_a_canary_lose_them_too(tmp_path, open_store, reference):
    store = open_store(keep_versions=9)
    for version in (1, 2, 3):
        where = scenes.write_snapshot(tmp_path, version, stamp=version)
        store.load_snapshot(where, activate=version == 1)
        reference.load_snapshot(where, activate=version == 2)
    store.canary("ctr", 2, 0.5)
    store.label("ctr", "trial", 2)
    store.label("ctr", "main", 1)
    for seq in range(1, 5):
        store.apply_delta(delta(seq, bad=seq > 2))
        reference.apply_delta(delta(seq) if seq <= 2 else empty(seq))
    store.rollback("ctr", to_seq=2)
    assert store.model("ctr").served.canary is None
    assert store.model("ctr").served.all_labels() == {"stable": 1, "main": 1}
    # 2 has the bad deltas, 3 never had any
    assert [state_of(store, version) for version in (1, 2, 3)] == ["active", "outdated", "kept"]
    store.apply_delta(delta(5))
    reference.apply_delta(delta(5))
    scenes.housekeep(store)
    store.close()
    store = open_store(keep_versions=9)
    assert state_of(store, 2) == "outdated"
    store.canary("ctr", 2, 0.5)
    assert_equal(content(store, 2), content(reference))
    assert state_of(store, 2) == "canary"
    store.activate("ctr", 3)
    reference.activate("ctr", 3)
    assert_equal(content(store), content(reference))
    assert store.verify().ok
    for number in (1, 2):
        store.drop("ctr", number)
    assert sorted(path.name for path in (tmp_path / "data/models/ctr").iterdir() if path.is_dir()) == ["3", "log"]


def test_a_version_that_was_dropped_can_be_loaded_under_its_number_again(tmp_path, open_store):
    store = open_store(keep_versions=9)
    first, second = (scenes.write_snapshot(tmp_path, version, stamp=version) for version in (1, 2))
    store.load_snapshot(first)
    store.apply_delta(delta(1))
    store.rollback("ctr", to_seq=0)
    store.load_snapshot(second)
    store.apply_delta(delta(2))
    store.activate("ctr", 1)
    store.rollback("ctr", to_seq=1)
    assert state_of(store, 2) == "outdated"
    store.drop("ctr", 2)
    store.load_snapshot(second)
    store.drop("ctr", 1)
    store.close()
    store = open_store(keep_versions=9)
    store.load_snapshot(first)
    store.close()
    store = open_store(keep_versions=9)
    assert [entry["state"] for entry in store.status()["models"]["ctr"]["versions"]] == ["active", "kept"]
    assert undone(store) == [[1, 1], [2, 2]] or undone(store) == [[2, 2]]
    assert store.verify().ok


def test_a_snapshot_from_after_them_is_as_its_trainer_wrote_it(tmp_path, open_store):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    for seq in (1, 2, 3, 4):
        store.apply_delta(delta(seq))
    store.rollback("ctr", to_seq=1)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, stamp=9, delta_seq=3))
    # 4 is undone, whatever the snapshot holds
    np.testing.assert_array_equal(store.model("ctr").lookup("item_id", [4, 10]), scenes.vectors("item", 9, [4, 10]))
    with pytest.raises(Conflict, match="expected a seq from 3 to 4, got 2"):
        store.rollback("ctr", to_seq=2)


def test_what_cannot_be_says_why(tmp_path, open_store):
    store = open_store(base="rocksdb", log_retention_s=0.0)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    for seq in (1, 2):
        store.apply_delta(delta(seq))
    for seq, why in ((3, "expected a seq from 0 to 2, got 3"), (1, "loaded with base=rocksdb")):
        with pytest.raises(Conflict, match=why):
            store.rollback("ctr", to_seq=seq)
    with pytest.raises(InvalidInput, match="to_seq: expected an integer from 0"):
        store.rollback("ctr", to_seq="one")
    with pytest.raises(InvalidInput, match="force"):
        store.rollback("ctr", to_seq=1, force=True)
    with pytest.raises(Conflict, match="expected version 7 to be active, got 1"):
        store.rollback("ctr", to_seq=1, expected_active=7)
    store.close()
    store = open_store(log_retention_s=0.0)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=2))
    store.drop("ctr", 1)
    store.apply_delta(delta(3))
    store.apply_delta(delta(4))
    folded(store)
    scenes.housekeep(store)
    before = content(store)
    with pytest.raises(Conflict, match=r"the log begins after 4, so deltas 3 to 4 are gone.*log_retention_s, now 0"):
        store.rollback("ctr", to_seq=3)
    assert_equal(content(store), before)
    assert undone(store) == []


def test_look_ups_and_deltas_go_on_meanwhile(tmp_path, open_store):
    """Every answer is of before or of after, and deltas that arrive before the switch are undone as well."""
    store = open_store(fold_grace_s=0.0)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    states = [content(store)]
    for seq in (1, 2):
        store.apply_delta(delta(seq))
        states.append(content(store))
    meanwhile: list[int] = []
    wrong: list[str] = []
    ended = threading.Event()

    def look_up() -> None:
        while not ended.is_set():
            with store.model("ctr").view() as view:
                rows, seq = view.lookup("item_id", [1, 2]), view.seq
            if not (rows == states[1]["item_id"][[1, 2]]).all() and not (rows == states[2]["item_id"][[1, 2]]).all():
                wrong.append(f"at {seq}")

    def progress(step: object) -> None:
        if len(meanwhile) < 2:
            meanwhile.append(2 + len(meanwhile) + 1)
            store.apply_delta(scenes.delta(meanwhile[-1], {"item": ([500], scenes.vectors("item", 5, [500]))}))

    reader = threading.Thread(target=look_up)
    reader.start()
    try:
        store.rollback("ctr", to_seq=1, progress=progress)
    finally:
        ended.set()
        reader.join()
    assert not wrong
    assert meanwhile
    assert_equal(content(store), states[1])
    assert undone(store) == [[2, meanwhile[-1]]]


def test_it_is_in_the_audit(tmp_path, store):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.apply_delta(delta(1))
    store.rollback("ctr", to_seq=0)
    lines = [json.loads(line) for line in (tmp_path / "data/audit/audit.jsonl").read_text().splitlines()]
    entry = next(line for line in lines if line["what"] == "rollback")
    assert (entry["to_seq"], entry["undone"], entry["after"]["active"]) == (0, [[1, 1]], 1)


# --- disks that fail


class Scene:
    """Version 1 active and 2 the canary, both with deltas 1 to 4; 3 is kept."""

    def __init__(self, root: Path, open_store: OpenStore) -> None:
        self._open = lambda: open_store(fold_grace_s=60, keep_versions=99)
        self.store = self._open()
        rows = {"user": 30, "item": 50}
        for version in (1, 2, 3):
            where = scenes.write_snapshot(root, version, stamp=version, rows=rows, dense=dense_of(version))
            self.store.load_snapshot(where, activate=version == 1)
        for seq in range(1, 5):
            self.store.apply_delta(delta(seq, bad=seq > 2, dense=dense_of(10 + seq)))
        self.states = {}
        for seq in (2, 4):
            self.store.rollback("ctr", to_seq=seq)
            self.states[seq] = content(self.store)
        self.store.canary("ctr", 2, 0.25)

    def reopen(self) -> None:
        self.store.close()
        self.store = self._open()

    def begin(self, seq: int) -> None:
        if undone(self.store) != ([[seq + 1, 4]] if seq < 4 else []):
            self.store.rollback("ctr", to_seq=seq)


@pytest.mark.thorough
def test_whichever_file_operation_fails_nothing_changes(tmp_path, open_store):
    scene = Scene(tmp_path, open_store)
    for fail_at in range(90):
        scene.begin(4)
        disk = FailingDisk(fail_at)
        try:
            with files.use(disk):
                scene.store.rollback("ctr", to_seq=2)
        except TierstoreError:
            if fail_at % 2:
                scene.reopen()
            assert (fail_at, undone(scene.store)) == (fail_at, [])
            assert_equal(content(scene.store), scene.states[4])
            scene.store.rollback("ctr", to_seq=2)
        assert_equal(content(scene.store), scene.states[2])
        if disk.operations <= fail_at:
            break
    else:
        pytest.fail("never came to an end")
    assert fail_at > 10
    scene.reopen()
    assert_equal(content(scene.store), scene.states[2])
    assert scene.store.verify().ok


@pytest.mark.thorough
def test_whenever_power_goes_it_is_done_or_was_never_begun(tmp_path, open_store):
    scene = Scene(tmp_path, open_store)
    for cut_at in range(90):
        disk = PowerCut(cut_at, tmp_path / f"kept-{cut_at}")
        with files.use(disk):
            disk.cut_at = 1 << 30  # the preparation has power
            scene.begin(4)
            disk.operations, disk.cut_at = 0, cut_at
            done = True
            try:
                scene.store.rollback("ctr", to_seq=2)
            except TierstoreError:
                done = False
            last = disk.operations <= cut_at
            disk.cut_at = 0
            scene.store.close()
        disk.apply(tmp_path / "data")
        scene.store = open_store(fold_grace_s=60, keep_versions=99)
        assert scene.store.model("ctr").problem is None
        now = undone(scene.store)
        assert now == [[3, 4]] if done else now in ([], [[3, 4]])
        assert_equal(content(scene.store), scene.states[2 if now else 4])
        if last:
            break
    else:
        pytest.fail("never came to an end")
    assert scene.store.verify().ok


def test_a_record_that_is_damaged_or_missing_loses_nothing(tmp_path, open_store):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.apply_delta(delta(1))
    store.rollback("ctr", to_seq=0)
    wanted = content(store)
    again = scenes.write_snapshot(tmp_path, 2)
    scenes.housekeep(store)
    store.close()
    record = tmp_path / "data/models/ctr/state.json"
    good = record.read_bytes()
    for damage in (lambda: record.write_bytes(good.replace(b"[1,", b"[0,").replace(b"1,", b"0,")), record.unlink):
        damage()
        store = open_store()
        assert "state.json" in store.model("ctr").problem
        with pytest.raises(TierstoreError, match=r"state\.json"):
            store.activate("ctr", 1, force=True)
        with pytest.raises(TierstoreError, match=r"state\.json"):
            store.load_snapshot(again)
        assert not store.model("ctr").ready
        store.close()
        record.write_bytes(good)
    store = open_store()
    assert_equal(content(store), wanted)


def test_ranges():
    undone = Undone().as_of(3, 9)
    assert undone.ranges == ((4, 9),)
    assert undone.as_of(12, 20).ranges == ((4, 9), (13, 20))
    assert undone.as_of(9, 20).ranges == ((10, 20),)
    assert undone.as_of(5, 9).ranges == ((6, 9),)
    assert undone.as_of(9, 9).ranges == ()
    assert [undone.range_of(seq) for seq in (3, 4, 9, 10)] == [None, (4, 9), (4, 9), None]
    assert Undone(((3, 9),)).differs_from(Undone(((6, 9),)), 0, 6)
    assert not Undone(((3, 9),)).differs_from(Undone(((6, 9),)), 6, 9)
    assert undone.differs_from(Undone(), 0, 4)
    assert not undone.differs_from(Undone(), 9, 20)
    assert not undone.differs_from(Undone(), 0, 3)


@pytest.mark.thorough
def test_ranges_by_history():
    """Against what was undone when each delta was applied, over all short histories."""
    steps = [None, 0, 1, 2, 3, 4]  # a delta, or a rollback to that one
    for history in itertools.product(steps, repeat=7):
        last, now = 0, frozenset[int]()
        at_the_time = {0: now}
        undone = Undone()
        for step in history:
            if step is None:
                last += 1
                at_the_time[last] = now
            elif step <= last:
                now = at_the_time[step] | {*range(step + 1, last + 1)}
                undone = undone.as_of(step, last)
            assert {seq for first, end in undone.ranges for seq in range(first, end + 1)} == now, history
