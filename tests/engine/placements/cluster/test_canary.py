"""Canaries of models in a real cluster: every node serves them, and all of them end together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tierstore.engine.placements.cluster.model import ClusterModel
from tierstore.engine.store import Store

pytestmark = pytest.mark.usefixtures("quick_loads")

OpenNode = Callable[..., Store]


def served(store: Store) -> tuple[tuple[int, ...], float]:
    """Numbers of the versions that a node serves, the canary's last, and its share."""
    if "ctr" not in store.models():
        return (), 0.0
    routing = store.model("ctr").served
    return routing.versions, routing.share


def all_serve(stores: list[Store], versions: tuple[int, ...], share: float = 0.0) -> None:
    for store in stores:
        scenes.eventually(lambda store=store: served(store) == (versions, share), f"{versions} at {share}", 60)


def item(store: Store, version: int, key: int) -> int:
    """The stamp of a row of a version, and that all of the row has it."""
    (row,) = store.model("ctr").lookup("item_id", [key], version=version)
    return next(stamp for stamp in range(9) if (row == scenes.vectors("item", stamp, [key])[0]).all())


def test_a_canary_is_served_by_every_node_until_it_is_promoted(open_node: OpenNode, tmp_path: Path) -> None:
    a, b = open_node("a"), open_node("b")
    for version in (1, 2):
        a.load_snapshot(scenes.write_snapshot(tmp_path, version, stamp=version), activate=version == 1)
    all_serve([a, b], (1,))
    b.canary("ctr", 2, 0.25)
    assert served(b) == ((1, 2), 0.25)
    all_serve([a], (1, 2), 0.25)
    a.apply_delta(scenes.delta(1, {"item": (range(10), scenes.vectors("item", 3, range(10)))}))
    assert [item(a, version, 5) for version in (1, 2)] == [3, 3]
    c = open_node("c")  # it comes later
    all_serve([c], (1, 2), 0.25)
    for store in (a, b, c):
        scenes.eventually(lambda store=store: store.status("ctr")["models"]["ctr"]["watermark"] == 1, "the delta", 60)
        scenes.eventually(
            lambda store=store: not any(v.overlays for v in store.model("ctr").served.views), "folded", 60
        )
        assert [item(store, version, key) for version in (1, 2) for key in (5, 50)] == [3, 1, 3, 2]
    a.canary("ctr", 2, 1.0)
    all_serve([a, b, c], (1, 2), 1.0)
    with pytest.raises(tierstore.Conflict, match="is the canary; withdraw it first"):
        b.drop("ctr", 2)
    assert c.promote("ctr") == 2
    assert served(c) == ((2,), 0.0)
    all_serve([a, b, c], (2,))
    assert [item(store, 2, key) for store in (a, b, c) for key in (5, 50)] == [3, 2] * 3
    assert b.rollback("ctr") == 1
    all_serve([a, b, c], (1,))


def test_a_canary_ends_where_another_version_becomes_active_or_it_is_withdrawn(
    open_node: OpenNode, tmp_path: Path
) -> None:
    a, b = open_node("a"), open_node("b")
    for version in (1, 2, 3):
        a.load_snapshot(scenes.write_snapshot(tmp_path, version, stamp=version), activate=version == 1)
    all_serve([a, b], (1,))
    for call in (lambda: a.promote("ctr"), lambda: a.withdraw("ctr")):
        with pytest.raises(tierstore.Conflict, match="no canary"):
            call()
    with pytest.raises(tierstore.Conflict, match="is active"):
        a.canary("ctr", 1)
    a.canary("ctr", 2)
    with pytest.raises(tierstore.Conflict, match="version 2 of 'ctr' is the canary"):
        b.canary("ctr", 3)
    all_serve([a, b], (1, 2), 0.05)
    assert b.withdraw("ctr") == 2
    all_serve([a, b], (1,))
    a.canary("ctr", 3)
    b.activate("ctr", 2)
    all_serve([a, b], (2,))
    b.drop("ctr", 3)  # nothing serves it any more


def test_a_canary_that_one_node_cannot_serve_is_none(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_node("a"), open_node("b")
    for version in (1, 2):
        a.load_snapshot(scenes.write_snapshot(tmp_path, version, stamp=version), activate=version == 1)
    all_serve([a, b], (1,))

    def fail(*_: Any, **__: Any) -> Any:
        raise tierstore.errors.StorageError("no memory here")

    monkeypatch.setattr(b.model("ctr").opener, "warmed", fail)
    with pytest.raises(tierstore.Conflict, match="no memory here"):
        a.canary("ctr", 2)
    all_serve([a, b], (1,))
    monkeypatch.undo()
    a.canary("ctr", 2)
    all_serve([a, b], (1, 2), 0.05)


def test_a_delta_that_does_not_fit_the_canary_is_refused_and_passed_over_by_it_alone_where_it_came_before(
    open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_node("a"), open_node("b")
    a.load_snapshot(scenes.write_snapshot(tmp_path, 1))
    with tierstore.SnapshotWriter(tmp_path / "narrow", model="ctr", version=2) as snapshot:
        snapshot.table("item", dim=2).write(np.arange(20), np.full((20, 2), 7.0, np.float32))
        snapshot.feature("item_id", table="item")
    a.load_snapshot(tmp_path / "narrow", activate=False)
    a.canary("ctr", 2)
    all_serve([a, b], (1, 2), 0.05)
    for store in (a, b):
        with pytest.raises(tierstore.DeltaError, match="is the canary"):
            store.apply_delta(scenes.stamped(1, {"item": range(10)}))
    monkeypatch.setattr(ClusterModel, "_check", lambda *_: None)  # as if it was acknowledged before there was a canary
    a.apply_delta(scenes.stamped(1, {"item": range(10)}))
    for store in (a, b):
        for _ in range(2):  # as it came, and from the rows in the cluster
            scenes.eventually(lambda store=store: item(store, 1, 5) == 1, "the delta", 60)
            assert (store.model("ctr").lookup("item_id", [5], version=2) == 7.0).all()
            scenes.eventually(lambda store=store: store.status("ctr")["models"]["ctr"]["overlays"] == 0, "folded", 60)
