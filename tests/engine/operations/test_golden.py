"""Golden examples: a version that does not answer as its trainer does never comes to be."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import hashed_keys
from tests.engine import scenes, ttl_scenes
from tests.predict import onnx_models
from tests.tiers.cuda_shim.backend import ShimDevice
from tierstore.engine.operations.restore import restore
from tierstore.engine.store import Store
from tierstore.errors import LoadCancelled, NotFound, SnapshotError
from tierstore.formats.snapshot.golden import GoldenIndex, write_example
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.status import golden_text
from tierstore.tiers.device import gpu

pytestmark = pytest.mark.usefixtures("quick_loads")

WEIGHTS = np.arange(1.0, 9.0)
USERS, ITEMS = np.array([3, 9_999, 41]), np.array([7, 12, 9_999])  # each with one that no table holds


def row(table: str, key: int, stamp: int) -> np.ndarray:
    known = key < scenes.ROWS[table]
    return np.full(scenes.DIM[table], ((stamp % 16) * 64 + key % 64) if known else 0.0)


def scores(stamp: int) -> np.ndarray:
    """What a ranker that adds the rows' numbers up, by weights, says of each pair."""
    of_items = [row("item", key, stamp) @ WEIGHTS for key in ITEMS]
    of_users = [row("user", key, stamp).sum() for key in USERS]
    return np.array([of_items, of_users]).sum(0).reshape(-1, 1)


def graph(bias: float = 0.0) -> bytes:
    return onnx_models.linear({"item_id": WEIGHTS, "user_id": np.ones(4)}, bias)


def write(
    root: Path,
    version: int = 1,
    *,
    expected: dict[str, Any] | None = None,
    inputs: dict[str, Any] | None = None,
    bias: float = 0.0,
    dense: bool = True,
    heads: Mapping[str, bytes] = {},
    head: str | None = None,
    stamp: int | None = None,
    **tolerance: Any,
) -> Path:
    """A snapshot of `scenes`, with a ranker and one golden example."""
    where = root / f"ctr-{version}"
    with tierstore.SnapshotWriter(where, model="ctr", version=version) as writer:
        for table in ("user", "item"):
            keys = np.arange(scenes.ROWS[table], dtype=np.int64)
            writer.table(table, dim=scenes.DIM[table]).write(
                keys, scenes.vectors(table, version if stamp is None else stamp, keys)
            )
        writer.feature("user_id", table="user")
        writer.feature("item_id", table="item")
        writer.feature("clicked", table="item", combiner="mean", padding_key=0)
        if dense:
            writer.dense(graph(bias))
        for name, other in heads.items():
            writer.dense(other, head=name)
        inputs = {"user_id": USERS, "item_id": ITEMS} if inputs is None else inputs
        writer.golden(inputs, {"score": scores(version)} if expected is None else expected, head=head, **tolerance)
    return where


def golden(store: Store, version: int = 1) -> dict[str, Any] | None:
    entries = store.status()["models"]["ctr"]["versions"]
    found: dict[str, Any] | None = next(entry["golden"] for entry in entries if entry["version"] == version)
    return found


def test_a_version_that_answers_as_it_was_trained_is_loaded_and_says_so(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(write(tmp_path))
    assert store.model("ctr").active_version == 1
    report = golden(store)
    assert report is not None
    assert (report["examples"], report["held"], report["left_out"], report["not_run"]) == (1, 1, 0, 0)
    assert report["largest_difference"] <= 1e-3


def golden_index(where: Path) -> GoldenIndex | None:
    return open_snapshot(where).golden_index()


def renumbered(where: Path, version: int) -> Path:
    document = json.loads((where / "snapshot.json").read_text())
    (where / "snapshot.json").write_text(json.dumps({**document, "version": version}))
    return where


@pytest.mark.parametrize("activate", [True, False])
def test_a_graph_that_scores_otherwise_is_refused_and_nothing_changes(
    store: Store, tmp_path: Path, activate: bool
) -> None:
    store.load_snapshot(write(tmp_path))
    before = store.model("ctr").predict({"user_id": USERS, "item_id": ITEMS})
    with pytest.raises(SnapshotError) as refused:
        store.load_snapshot(write(tmp_path, 2, bias=50.0), activate=activate)
    text = str(refused.value)
    wanted = scores(2).reshape(-1)
    for part in ("example 0", "'score'", "3 of 3", f"{wanted[0]:.6g}", f"{wanted[0] + 50:.6g}", "difference is 50",
                 "CPUExecutionProvider", "1 thread"):  # fmt: skip
        assert part in text, text
    np.testing.assert_array_equal(store.model("ctr").predict({"user_id": USERS, "item_id": ITEMS}), before)
    assert [entry["version"] for entry in store.status()["models"]["ctr"]["versions"]] == [1]
    assert not (store.shared.root / "models" / "ctr" / "2").exists()


def test_a_first_version_that_is_refused_leaves_no_model(store: Store, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="golden example 0"):
        store.load_snapshot(write(tmp_path, bias=1.0))
    with pytest.raises(NotFound):
        store.model("ctr")
    assert not (store.shared.root / "models" / "ctr").exists()


def test_a_refused_version_can_be_loaded_once_it_is_right(store: Store, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError):
        store.load_snapshot(write(tmp_path / "wrong", bias=1.0))
    store.load_snapshot(write(tmp_path / "right"))
    assert store.model("ctr").active_version == 1


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"user_id": USERS}, {"user_id": np.stack([row("user", key, 1) for key in USERS])}),
        (
            {"clicked": (np.array([1, 0, 3, 5]), np.array([0, 3, 3]))},  # 0 never counts; the second bag is empty
            {"clicked": np.stack([(row("item", 1, 1) + row("item", 3, 1)) / 2, np.zeros(8), row("item", 5, 1)])},
        ),
        (
            {"clicked": np.array([[1, 3], [5, 7]])},
            {"clicked": np.stack([(row("item", a, 1) + row("item", b, 1)) / 2 for a, b in ((1, 3), (5, 7))])},
        ),
        ({"item_id": np.array([[1, 3], [5, 7]])}, {"item_id": np.array([[row("item", a, 1) for a in b] for b in ((1, 3), (5, 7))])}),
    ],
    ids=["rows", "ragged bags", "matrix of bags", "matrix of keys"],
)  # fmt: skip
def test_rows_and_pooled_rows_are_compared(
    store: Store, tmp_path: Path, inputs: dict[str, Any], expected: dict[str, Any]
) -> None:
    store.load_snapshot(write(tmp_path, inputs=inputs, expected=expected))
    name = next(iter(expected))
    wrong = {name: expected[name].copy()}
    wrong[name].reshape(-1)[-1] += 1
    with pytest.raises(SnapshotError, match=f"rows of feature '{name}': 1 of"):
        store.load_snapshot(write(tmp_path / "wrong", 2, inputs=inputs, expected=wrong, stamp=1))


def test_examples_are_compared_with_the_snapshot_alone_whatever_deltas_wait(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(write(tmp_path))
    store.apply_delta(scenes.delta(1, {"item": (ITEMS[:1], np.full((1, 8), 5.0))}))
    store.load_snapshot(write(tmp_path, 2))  # its example names a row that the delta changes on the way to serve
    assert store.model("ctr").active_version == 2
    np.testing.assert_array_equal(store.model("ctr").lookup("item_id", ITEMS[:1]), np.full((1, 8), 5.0))


def test_each_head_has_its_own_examples(store: Store, tmp_path: Path) -> None:
    heads = {"cvr": graph(2.0)}
    store.load_snapshot(write(tmp_path, heads=heads, head="cvr", expected={"score": scores(1) + 2}))
    assert golden(store)["held"] == 1  # type: ignore[index]
    with pytest.raises(SnapshotError, match="of head 'cvr': output 'score'"):
        store.load_snapshot(write(tmp_path, 2, heads=heads, head="cvr", stamp=1))


def test_tolerance_is_of_the_example(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(write(tmp_path, bias=1.0, rtol=0.0, atol=1.5))
    with pytest.raises(SnapshotError, match="golden example"):
        store.load_snapshot(write(tmp_path, 2, bias=1.0, rtol=0.0, atol=0.5))


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ({"scores": np.zeros((3, 1))}, "'scores' is neither a feature nor an output"),
        ({"score": np.zeros((4, 1))}, "expected shape"),
        ({"score": np.array(["a", "b", "c"])}, "expected strings, got numbers"),
        ({"clicked": np.zeros((3, 8))}, "no keys of it"),
    ],
)
def test_an_example_that_cannot_be_compared_is_refused(
    store: Store, tmp_path: Path, expected: dict[str, Any], text: str
) -> None:
    with pytest.raises(SnapshotError, match=text):
        store.load_snapshot(write(tmp_path, expected=expected))


def test_a_load_is_cancelled_between_examples(store: Store, tmp_path: Path) -> None:
    seen: list[str] = []

    def progress(step: Any) -> None:
        seen.append(step.phase)
        if step.phase == "golden examples":
            raise LoadCancelled("by the test")

    with pytest.raises(LoadCancelled):
        store.load_snapshot(write(tmp_path), progress=progress)
    assert "golden examples" in seen


def test_without_the_extra_rows_are_compared_and_scores_are_not_run(
    open_store: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.predict.runtime.missing_extra", lambda: "install tierstore[dense]")
    store = open_store()
    rows = {"user_id": np.stack([row("user", key, 1) for key in USERS])}
    store.load_snapshot(write(tmp_path, expected={"score": scores(1) + 9, **rows}))
    report = golden(store)
    assert report is not None
    assert (report["held"], report["not_run"]) == (0, 1)
    assert "tierstore[dense]" in report["why"]
    with pytest.raises(SnapshotError, match="rows of feature 'user_id'"):
        store.load_snapshot(write(tmp_path, 2, expected={"user_id": rows["user_id"] + 1}))


def test_the_writer_refuses_what_is_no_example(tmp_path: Path) -> None:
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as writer:
        writer.table("user", dim=2).write([1], [[1.0, 2.0]])
        for wrong in ({"expected": {}}, {"expected": {"user": [[1.0]]}, "rtol": -1.0}, {"expected": {"user": [[1.0]]}, "atol": float("nan")}):  # fmt: skip
            with pytest.raises(SnapshotError, match="golden example"):
                writer.golden({"user": [1]}, **wrong)
        with pytest.raises(SnapshotError, match="expected/user"):
            writer.golden({"expected/user": [1]}, {"user": [[1.0, 2.0]]})
    assert not (tmp_path / "s" / "warmup" / "golden" / "index.json").exists()


def test_an_earlier_release_finds_nothing_of_them_in_the_manifest(tmp_path: Path) -> None:
    where = write(tmp_path)
    assert "golden" not in (where / "snapshot.json").read_text()
    index = json.loads((where / "warmup" / "golden" / "index.json").read_text())
    assert [entry["path"] for entry in index["examples"]] == ["00000.npz"]


def test_a_missing_example_is_an_error(store: Store, tmp_path: Path) -> None:
    where = write(tmp_path)
    (where / "warmup" / "golden" / "00000.npz").unlink()
    with pytest.raises(SnapshotError, match=r"00000\.npz"):
        store.load_snapshot(where)


# --- what may not be here


def ttl_snapshot(root: Path, expected: float, *, keys: list[int], age_days: float) -> Path:
    now = int(time.time())
    with tierstore.SnapshotWriter(root, model="ctr", version=1) as writer:
        table = writer.table("item", dim=2, ttl_s="10d", time_column="t")
        table.write([1, 2], [[1.0, 1.0], [2.0, 2.0]], times=[now, now - int(age_days * 86400)])
        writer.golden({"item": np.array([1])}, {"item": np.array([[1.0, 1.0]])})
        writer.golden({"item": np.array(keys)}, {"item": np.array([[expected, expected]] * len(keys))})
    return root


def test_an_example_whose_row_has_expired_is_left_out_and_counted(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(ttl_snapshot(tmp_path / "s", 2.0, keys=[2], age_days=20))
    report = golden(store)
    assert report is not None
    assert (report["examples"], report["held"], report["left_out"]) == (2, 1, 1)
    assert "'item' lacks rows" in report["why"]


@pytest.mark.parametrize("base", ["sealed", "rocksdb"])
def test_verify_leaves_out_an_example_whose_row_has_expired_since_the_load(
    open_store: Callable[..., Store], tmp_path: Path, days_later: Callable[[float], None], base: str
) -> None:
    store = open_store(base=base)
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as writer:
        table = writer.table("user", dim=1, ttl_s="30d", time_column="seen")
        table.write([1, 2], [[1.0], [2.0]], times=[ttl_scenes.NOW, ttl_scenes.NOW - 20 * ttl_scenes.DAY])
        for key in (1, 2):
            writer.golden({"user": [key]}, {"user": [[float(key)]]})
        writer.golden({"user": [9]}, {"user": [[0.0]]})  # as before: a key that the table never held
    store.load_snapshot(tmp_path / "s")
    assert store.verify().golden == ("ctr version 1: 3 held, largest difference 0",)
    days_later(20)
    ttl_scenes.check(store)
    report = store.verify()
    assert report.ok, report.problems
    assert report.golden[0].startswith("ctr version 1: 2 held, 1 left out")
    assert "table 'user' lacks rows" in report.golden[0]


def test_an_example_is_not_excused_by_rows_that_expired_elsewhere(store: Store, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="golden example 1"):
        store.load_snapshot(ttl_snapshot(tmp_path / "s", 7.0, keys=[1], age_days=20))
    with pytest.raises(SnapshotError, match="golden example 1"):
        store.load_snapshot(ttl_snapshot(tmp_path / "t", 7.0, keys=[2], age_days=1))


def test_a_node_leaves_out_examples_of_other_nodes_keys_and_says_how_many_are_left(
    open_store: Callable[..., Store], tmp_path: Path
) -> None:
    store = open_store(partition="0/2")
    keys = np.arange(64)
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as writer:
        writer.table("item", dim=1).write(keys, keys[:, None].astype(np.float32))
        for key in keys:
            writer.golden({"item": key[None]}, {"item": [[float(key)]]})
    store.load_snapshot(tmp_path / "s")
    report = golden(store)
    assert report is not None
    assert report["held"] + report["left_out"] == 64
    assert 0 < report["held"] < 64
    assert "other partitions" in report["why"]


def test_that_none_was_left_is_said(store: Store, tmp_path: Path) -> None:
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as writer:
        table = writer.table("item", dim=1)
        table.write([1], [[1.0]])
        table.is_incomplete = True
        writer.golden({"item": [2]}, {"item": [[2.0]]})
    store.load_snapshot(tmp_path / "s")
    report = golden(store)
    assert report is not None
    assert golden_text(report).startswith("none held, 1 left out")


# --- after the load


def moved_on(store: Store, tmp_path: Path, **of: Any) -> None:
    store.load_snapshot(write(tmp_path, **of))
    store.apply_delta(scenes.delta(1, {"item": (ITEMS[:1], np.full((1, 8), 5.0))}))


def test_verify_runs_them_again_while_the_version_is_as_it_was_loaded(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(write(tmp_path))
    store.load_snapshot(write(tmp_path, 2))
    report = store.verify()
    assert report.ok, report.problems
    assert [line.partition(",")[0] for line in report.golden] == ["ctr version 1: 1 held", "ctr version 2: 1 held"]
    store.apply_delta(scenes.delta(1, {"item": (ITEMS[:1], np.full((1, 8), 5.0))}))
    assert store.verify().golden[1] == "ctr version 2: not run, at seq 1"
    report_after = golden(store, 2)
    assert report_after is not None
    assert report_after["held"] == 1  # at the load


@pytest.mark.parametrize("served", [True, False])
def test_verify_reports_a_difference(store: Store, tmp_path: Path, served: bool) -> None:
    store.load_snapshot(write(tmp_path), activate=served)
    path = store.shared.root / "models" / "ctr" / "1" / "warmup" / "golden" / "00000.npz"
    write_example(path, {"user_id": USERS, "item_id": ITEMS}, {"score": scores(1) + 9})
    report = store.verify()
    assert len(report.problems) == 1
    assert "'score': 3 of 3 differ" in report.problems[0]


def test_an_export_carries_them_until_there_are_deltas(
    store: Store, open_store: Callable[..., Store], tmp_path: Path
) -> None:
    store.load_snapshot(write(tmp_path))
    store.export("ctr", tmp_path / "as-loaded")
    store.export("ctr", tmp_path / "built", partitions=2)
    assert golden_index(tmp_path / "as-loaded") is not None
    store.load_snapshot(renumbered(tmp_path / "as-loaded", 2))
    assert golden(store, 2)["held"] == 1  # type: ignore[index]
    store.apply_delta(scenes.delta(1, {"item": (ITEMS[:1], np.full((1, 8), 5.0))}))
    store.export("ctr", tmp_path / "later")
    assert golden_index(tmp_path / "later") is None


def test_a_backup_carries_them_until_there_are_deltas(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(write(tmp_path))
    store.backup("ctr", tmp_path / "before")
    restore(tmp_path / "before", tmp_path / "restored")
    with tierstore.open(tmp_path / "restored") as again:
        assert again.verify().golden == ("ctr version 1: 1 held, largest difference 0",)
    store.apply_delta(scenes.delta(1, {"item": (ITEMS[:1], np.full((1, 8), 5.0))}))
    scenes.housekeep(store)
    store.backup("ctr", tmp_path / "after")
    restore(tmp_path / "after", tmp_path / "restored-later")
    with tierstore.open(tmp_path / "restored-later") as again:
        assert again.verify().golden == ()


def test_a_version_that_is_built_again_carries_none(store: Store, tmp_path: Path) -> None:
    moved_on(store, tmp_path)
    store.apply_delta(scenes.delta(2, {"item": (ITEMS[:1], np.full((1, 8), 6.0))}))
    store.rollback("ctr", to_seq=1)
    assert store.verify().golden == ()


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_built_version_brings_them(store: Store, tmp_path: Path, partitions: int) -> None:
    tierstore.build_snapshot(write(tmp_path / "a"), tmp_path / "built", partitions=partitions)
    store.load_snapshot(tmp_path / "built")
    assert golden(store)["held"] == 1  # type: ignore[index]
    tierstore.build_snapshot(write(tmp_path / "b", 2, bias=1.0), tmp_path / "wrong", partitions=partitions)
    with pytest.raises(SnapshotError, match="output 'score'"):
        store.load_snapshot(tmp_path / "wrong")


# --- every kind of key, row and place


def test_hashed_keys_are_hashed_as_requests_are(store: Store, tmp_path: Path) -> None:
    for version, off in ((1, 0.0), (2, 1.0)):
        with tierstore.SnapshotWriter(tmp_path / str(version), model="ctr", version=version) as writer:
            writer.table("item", dim=4).write(np.arange(hashed_keys.ROWS), hashed_keys.vectors(range(hashed_keys.ROWS)))
            for name, (how, keys, rows) in hashed_keys.FEATURES.items():
                writer.feature(name, table="item", hash=how)
                writer.golden({name: keys}, {name: hashed_keys.vectors(rows, off if name == "word" else 0.0)})
    store.load_snapshot(tmp_path / "1")
    assert golden(store)["held"] == len(hashed_keys.FEATURES)  # type: ignore[index]
    with pytest.raises(SnapshotError, match="the rows of feature 'word'"):
        store.load_snapshot(tmp_path / "2")


def test_string_keys_and_a_default_that_is_the_mean(store: Store, tmp_path: Path) -> None:
    for version, absent in ((1, 2.0), (2, 0.0)):
        with tierstore.SnapshotWriter(tmp_path / str(version), model="ctr", version=version) as writer:
            writer.table("word", dim=1, key="string", default="mean").write(["a", "ü"], [[1.0], [3.0]])
            writer.golden({"word": ["ü", "b", "a"]}, {"word": [[3.0], [absent], [1.0]]})
    store.load_snapshot(tmp_path / "1")
    with pytest.raises(SnapshotError, match=r"1 of 3 differ: expected 0, got 2 at \[1, 0\]"):
        store.load_snapshot(tmp_path / "2")


@pytest.mark.parametrize(("dtype", "levels"), [("int8", 255), ("int4", 15)])
def test_coarse_rows_are_held_to_rows_as_they_are_stored(store: Store, tmp_path: Path, dtype: str, levels: int) -> None:
    exact = np.arange(levels + 1, dtype=np.float32)[None].repeat(3, 0) / 8  # each number is one of the codes
    between = np.random.default_rng(0).random((3, levels + 1), np.float32)
    for version, rows in ((1, exact), (2, between)):
        with tierstore.SnapshotWriter(tmp_path / str(version), model="ctr", version=version) as writer:
            writer.table("item", dim=levels + 1, dtype=dtype).write([1, 2, 3], rows)
            writer.golden({"item": [1, 2, 3]}, {"item": rows})
    store.load_snapshot(tmp_path / "1")
    with pytest.raises(SnapshotError, match="the rows of feature 'item'"):  # full rows, which are not what is stored
        store.load_snapshot(tmp_path / "2")


def test_a_store_with_a_device_tier_is_held_to_them(
    open_store: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "find_backend", lambda: (ShimDevice(), None))
    store = open_store(device_budget="4MiB")
    store.load_snapshot(write(tmp_path))
    assert golden(store)["held"] == 1  # type: ignore[index]
    with pytest.raises(SnapshotError, match="output 'score'"):
        store.load_snapshot(write(tmp_path, 2, bias=1.0))


def test_a_version_that_is_refused_never_becomes_a_canary(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(write(tmp_path))
    with pytest.raises(SnapshotError):
        store.load_snapshot(write(tmp_path, 2, bias=1.0), activate=False)
    with pytest.raises(NotFound):
        store.canary("ctr", 2, share=0.5)
    store.load_snapshot(write(tmp_path, 3), activate=False)
    store.canary("ctr", 3, share=0.5)
    assert golden(store, 3)["held"] == 1  # type: ignore[index]
