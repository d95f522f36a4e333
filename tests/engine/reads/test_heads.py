"""Several dense parts over one set of tables: each answers from the view of the model, of one version and one delta."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.reads.test_dense import folded
from tests.predict import onnx_models as om
from tierstore.engine.operations.restore import restore
from tierstore.errors import DeltaError, InvalidInput, NotFound, SnapshotError
from tierstore.types import MOST_HEADS

pytestmark = pytest.mark.usefixtures("quick_loads")

OpenStore = Callable[..., tierstore.Store]
KEYS = np.arange(1, 10)
HEADS = {"": {"user_id": 4, "item_id": 8}, "cvr": {"item_id": 8}, "ltv": {"user_id": 4, "clicked": 8}}
INPUTS = {"user_id": KEYS, "item_id": KEYS, "clicked": (KEYS, np.arange(9))}


def graph(head: str, number: int) -> bytes:
    return om.witness(number, HEADS[head])


def graphs(number: int, *heads: str) -> dict[str, bytes]:
    return {head: graph(head, number) for head in heads}


def rows(stamp: int) -> dict[str, tuple[range, np.ndarray]]:
    """Rows 0 to 9 of both tables, all naming a stamp."""
    return {table: (range(10), np.full((10, dim), stamp, np.float32)) for table, dim in scenes.DIM.items()}


def snapshot(root: Path, version: int = 1, number: int = 1, delta_seq: int = 0) -> Path:
    where = root / str(version)
    with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=delta_seq) as writer:
        for table, (keys, vectors) in rows(number).items():
            writer.table(table, dim=scenes.DIM[table]).write(list(keys), vectors)
        writer.feature("user_id", table="user")
        writer.feature("item_id", table="item")
        writer.feature("clicked", table="item", combiner="mean")
        for head in HEADS:
            writer.dense(graph(head, number), head=head)
    return where


def predict(store: tierstore.Store, head: str, **options: Any) -> tuple[int, int]:
    """(the stamp of the rows, the number of the graph) of an answer, all of which must be of one state."""
    inputs = {name: INPUTS[name] for name in HEADS[head]}
    return om.witnessed(store.model("ctr").predict(inputs, head=head, **options))


def every(store: tierstore.Store, **options: Any) -> dict[str, tuple[int, int]]:
    return {head: predict(store, head, **options) for head in HEADS}


def entry(store: tierstore.Store, version: int = 1) -> dict[str, Any]:
    (found,) = (one for one in store.status()["models"]["ctr"]["versions"] if one["version"] == version)
    return dict(found)


@pytest.mark.parametrize("grace_s", [0.0, 3600.0], ids=["folded", "in the overlay"])
def test_heads_come_change_and_go_by_deltas_and_stay_so_after_a_restart(
    open_store: OpenStore, tmp_path: Path, grace_s: float
) -> None:
    store = open_store(fold_grace_s=grace_s)
    store.load_snapshot(snapshot(tmp_path))
    assert every(store) == {"": (1, 1), "cvr": (1, 1), "ltv": (1, 1)}
    assert entry(store)["heads"] == {"cvr": "served", "ltv": "served"}
    store.apply_delta(scenes.delta(1, rows(2), heads={"cvr": graph("cvr", 20)}))
    store.apply_delta(scenes.delta(2, heads={"ltv": None, "new": graph("cvr", 30)}))
    store.apply_delta(scenes.delta(3, rows(4)))
    for _ in range(3):
        assert predict(store, "") == (4, 1)
        assert predict(store, "cvr") == (4, 20)
        with pytest.raises(NotFound, match="no head 'ltv'; version 1 has cvr, new"):
            predict(store, "ltv")
        assert om.witnessed(store.model("ctr").predict({"item_id": KEYS}, head="new")) == (4, 30)
        assert entry(store)["heads"] == {"cvr": "served", "new": "served"}
        assert store.verify().ok
        store.close()
        store = open_store(fold_grace_s=grace_s)
    store.apply_delta(scenes.delta(4, dense=None, heads={"": None, "ltv": graph("ltv", 5)}))
    assert predict(store, "ltv") == (4, 5)
    with pytest.raises(
        InvalidInput, match="no dense part, so it predicts nothing; name one of its heads, cvr, ltv, new"
    ):
        predict(store, "")
    assert entry(store)["dense"] is None


def test_a_model_may_have_heads_alone(store: tierstore.Store, tmp_path: Path) -> None:
    store.load_snapshot(scenes.write_snapshot(tmp_path, heads={"cvr": om.linear({"user_id": np.ones(4)})}))
    assert store.model("ctr").predict({"user_id": KEYS}, head="cvr").shape == (9, 1)
    assert store.model("ctr").signature is None


def test_a_rollback_brings_back_the_heads_of_that_moment(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(fold_grace_s=0)
    store.load_snapshot(snapshot(tmp_path))
    store.apply_delta(scenes.delta(1, rows(2), heads=graphs(2, "cvr")))
    store.apply_delta(scenes.delta(2, rows(3), heads={"cvr": None, "ltv": graph("ltv", 3), "new": graph("cvr", 3)}))
    folded(store)
    store.rollback("ctr", to_seq=1)
    assert every(store) == {"": (2, 1), "cvr": (2, 2), "ltv": (2, 1)}
    assert entry(store)["heads"].keys() == {"cvr", "ltv"}
    store.rollback("ctr", to_seq=0)
    assert every(store) == {"": (1, 1), "cvr": (1, 1), "ltv": (1, 1)}
    store.close()
    store = open_store()
    assert every(store) == {"": (1, 1), "cvr": (1, 1), "ltv": (1, 1)}
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=2))
    with pytest.raises(NotFound, match="no head 'cvr'; version 2 has none with a name"):
        predict(store, "cvr")
    store.rollback("ctr")
    assert every(store) == {"": (1, 1), "cvr": (1, 1), "ltv": (1, 1)}


def test_a_canary_has_heads_of_its_own(store: tierstore.Store, tmp_path: Path) -> None:
    store.load_snapshot(snapshot(tmp_path))
    store.load_snapshot(snapshot(tmp_path, 2, number=7), activate=False)
    store.canary("ctr", 2, 0.5)
    assert every(store, version="canary") == {"": (7, 7), "cvr": (7, 7), "ltv": (7, 7)}
    assert every(store, version="stable") == {"": (1, 1), "cvr": (1, 1), "ltv": (1, 1)}
    store.apply_delta(scenes.delta(1, heads={"cvr": None}, base_version=2))
    assert predict(store, "cvr", version=1) == (1, 1)
    with pytest.raises(NotFound, match="version 2 has ltv"):
        predict(store, "cvr", version=2)


def test_an_export_and_a_backup_have_the_heads_that_are_served(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(fold_grace_s=3600)
    store.load_snapshot(snapshot(tmp_path))
    store.apply_delta(scenes.delta(1, rows(2), heads={"cvr": graph("cvr", 20), "ltv": None, "new": graph("cvr", 30)}))
    expected = {"": (2, 1), "cvr": (2, 20), "new": (2, 30)}
    HEADS_NOW = HEADS | {"new": HEADS["cvr"]}

    def check(other: tierstore.Store) -> None:
        with other.model("ctr").view() as view:
            assert view.heads.keys() == expected.keys()
            for head, of in expected.items():
                assert om.witnessed(view.predict({name: INPUTS[name] for name in HEADS_NOW[head]}, head=head)) == of
        assert other.verify().ok

    store.export("ctr", tmp_path / "exported")
    store.export("ctr", tmp_path / "built", partitions=1)
    store.backup("ctr", tmp_path / "backup")
    for source in ("exported", "built"):
        with tierstore.open(tmp_path / f"of {source}", host_budget="4MiB", load_workers=1) as other:
            other.load_snapshot(tmp_path / source)
            check(other)
            assert other.digests("ctr")["dense"] == store.digests("ctr")["dense"]
    restore(tmp_path / "backup", tmp_path / "restored")
    with tierstore.open(tmp_path / "restored", host_budget="4MiB") as other:
        check(other)


def test_a_request_is_recorded_for_one_head(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as writer:
        writer.table("item", dim=8).write(KEYS, np.zeros((9, 8)))
        writer.feature("item_id", table="item")
        writer.dense(om.linear({"item_id": np.ones(8)}))
        writer.dense(om.linear({"item_id": np.ones(8), "hour": np.ones(3)}), head="cvr")
        writer.request({"item_id": KEYS})
        for _ in range(2):
            writer.request({"item_id": KEYS, "hour": np.zeros((9, 3), np.float32)}, head="cvr")
    store.load_snapshot(tmp_path / "s")
    for _ in range(2):
        with store.model("ctr").view() as view:
            assert [view.under(head).session.warmed for head in ("", "cvr")] == [1, 2]
        store.close()
        store = open_store()
    with pytest.raises(DeltaError, match=r"the dense part 'cvr' cannot be served: .*the recorded request fails"):
        store.apply_delta(scenes.delta(1, heads={"cvr": om.linear({"item_id": np.ones(8), "day": np.ones(3)})}))
    writer = tierstore.SnapshotWriter(tmp_path / "t", model="ctr", version=1)
    writer.request({"item_id": KEYS}, head="x")
    with pytest.raises(SnapshotError, match="a request is recorded for head 'x', which has no graph: call `dense`"):
        writer.close()


def test_a_head_that_cannot_be_served_is_refused_by_name_and_nothing_changes(
    store: tierstore.Store, tmp_path: Path
) -> None:
    bad = om.linear({"user_id": np.ones(5)})
    with pytest.raises(SnapshotError, match=r"dense\.cvr\.onnx: input 'user_id'"):
        store.load_snapshot(scenes.write_snapshot(tmp_path, 9, heads={"cvr": bad}))
    store.load_snapshot(snapshot(tmp_path))
    with pytest.raises(DeltaError, match="the dense part 'cvr' cannot be served"):
        store.apply_delta(scenes.delta(1, rows(2), heads={"cvr": bad, "ltv": graph("ltv", 2)}))
    assert every(store) == {"": (1, 1), "cvr": (1, 1), "ltv": (1, 1)}
    many = {f"h{number}": graph("cvr", 2) for number in range(MOST_HEADS)}
    with pytest.raises(DeltaError, match=f"expected at most {MOST_HEADS} heads"):
        store.apply_delta(scenes.delta(1, heads=many))


def test_heads_of_one_delta_that_do_not_all_fit_a_kept_version_are_passed_over_together(
    open_store: OpenStore, tmp_path: Path
) -> None:
    store = open_store()
    store.load_snapshot(snapshot(tmp_path))
    wide = tmp_path / "2"
    with tierstore.SnapshotWriter(wide, model="ctr", version=2) as writer:
        for table, dim in (("user", 4), ("item", 8), ("wide", 3)):
            writer.table(table, dim=dim).write(KEYS, np.zeros((9, dim)))
            writer.feature(f"{table}_id", table=table)
    store.load_snapshot(wide)
    store.apply_delta(scenes.delta(1, heads={"cvr": graph("cvr", 2), "w": om.linear({"wide_id": np.ones(3)})}))
    store.apply_delta(scenes.delta(2, heads={"": graph("", 3)}))
    store.rollback("ctr")
    for _ in range(2):
        assert (predict(store, ""), predict(store, "cvr")) == ((1, 3), (1, 1))
        heads = entry(store)["heads"]
        assert "served; a newer one was passed over: delta 1: the dense part 'w' cannot be served" in heads["cvr"]
        assert heads["w"].startswith("none; a newer one was passed over: delta 1")
        assert entry(store)["dense"] == "served"
        store.close()
        store = open_store()


def test_three_heads_take_the_rows_of_one(open_store: OpenStore, tmp_path: Path) -> None:
    """Rows, files, caches and overlays are the model's: heads add their graphs, and nothing else."""
    table = scenes.ROWS | {"item": 20_000}
    taken: list[dict[str, Any]] = []
    for heads in ({}, {"cvr": om.linear({"item_id": np.ones(8)}), "ltv": om.linear({"user_id": np.ones(4)})}):
        with tierstore.open(tmp_path / f"{len(heads)}", host_budget="4MiB", load_workers=1) as store:
            where = scenes.write_snapshot(
                tmp_path / f"s{len(heads)}", rows=table, dense=om.linear({"item_id": np.ones(8)}), heads=heads
            )
            store.load_snapshot(where)
            store.apply_delta(scenes.stamped(1, {"item": range(5000)}))
            for head in ("", *heads):
                inputs = {"user_id": np.arange(500)} if head == "ltv" else {"item_id": np.arange(20_000)}
                store.model("ctr").predict(inputs, head=head)
            folded(store)
            document = store.status()
            model = document["models"]["ctr"]
            tables = {
                name: {tier: of["tier_bytes"][tier] for tier in ("host", "disk")}
                for name, of in model["tables"].items()
            }
            taken.append({"host": document["host_budget"]["used"], "tables": tables, "log": model["log"]["entries"]})
    assert taken[0] == taken[1]
