"""The order in which versions served: what served last is kept and is what a rollback serves; what was rejected goes first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tierstore
from tests.engine import scenes
from tierstore.engine.lifecycle.rules import surplus_of
from tierstore.engine.serving.document import read_document
from tierstore.engine.serving.order import ServingOrder
from tierstore.errors import Conflict

pytestmark = pytest.mark.usefixtures("quick_loads")
SMALL = {"user": 8, "item": 12}


def load(store: tierstore.Store, root: Path, version: int, *, activate: bool = True) -> None:
    store.load_snapshot(scenes.write_snapshot(root, version, stamp=version % 16, rows=SMALL), activate=activate)


def kept(store: tierstore.Store) -> list[int]:
    """What is there after the next housekeeping."""
    scenes.housekeep(store)
    return store.model("ctr").versions


def serves(store: tierstore.Store, version: int) -> None:
    ctr = store.model("ctr")
    assert ctr.active_version == version
    assert ctr.lookup("item_id", [5])[0].tolist() == scenes.vector("item", version % 16, 5).tolist()


def by_rollback(store: tierstore.Store, root: Path) -> None:
    load(store, root, 21)
    assert store.rollback("ctr") == 20


def by_withdrawal(store: tierstore.Store, root: Path) -> None:
    load(store, root, 21, activate=False)
    store.canary("ctr", 21, 0.5)
    store.withdraw("ctr")


def by_a_load_beside_a_canary(store: tierstore.Store, root: Path) -> None:
    load(store, root, 21, activate=False)
    store.canary("ctr", 21, 0.5)


def held(store: tierstore.Store, root: Path) -> None:
    load(store, root, 21, activate=False)


@pytest.mark.parametrize("again", [False, True], ids=["goes on", "starts again"])
@pytest.mark.parametrize("last", ["load", "promote"])
@pytest.mark.parametrize("rejected", [by_rollback, by_withdrawal, by_a_load_beside_a_canary, held])
def test_what_served_last_is_kept_and_served_by_a_rollback_and_what_was_rejected_goes(
    open_store, tmp_path: Path, rejected: Callable[..., None], last: str, again: bool
) -> None:
    store = open_store(keep_versions=1)
    load(store, tmp_path, 20)
    rejected(store, tmp_path)
    assert kept(store) == [20, 21], "somebody may look into it"
    if last == "load" or rejected is by_a_load_beside_a_canary:
        load(store, tmp_path, 22)
    else:
        load(store, tmp_path, 22, activate=False)
        store.canary("ctr", 22, 0.5)
        store.promote("ctr")
    if again:
        store.close()
        store = open_store(keep_versions=1)
    assert kept(store) == [20, 22]
    assert store.rollback("ctr") == 20
    serves(store, 20)


def test_a_version_that_was_left_by_a_rollback_is_served_again_by_its_number_alone(open_store, tmp_path: Path) -> None:
    store = open_store(keep_versions=3)
    for version in (19, 20, 21):
        load(store, tmp_path, version)
    assert (store.rollback("ctr"), store.rollback("ctr")) == (20, 19)
    with pytest.raises(Conflict, match=r"no version that served before 19 .*20 \(rollback\), 21 \(rollback\)"):
        store.rollback("ctr")
    store.activate("ctr", 21)
    store.activate("ctr", 20)
    assert store.rollback("ctr") == 21, "it was named since"
    assert store.rollback("ctr") == 19


def test_a_rollback_goes_by_the_order_of_serving_and_not_by_number(open_store, tmp_path: Path) -> None:
    store = open_store(keep_versions=9)
    for version in (10, 30, 20):
        load(store, tmp_path, version)
    load(store, tmp_path, 15, activate=False)
    assert store.rollback("ctr") == 30
    assert store.rollback("ctr") == 10


def test_a_version_that_never_served_is_no_target_of_a_rollback(open_store, tmp_path: Path) -> None:
    store = open_store()
    load(store, tmp_path, 1, activate=False)
    load(store, tmp_path, 2)
    with pytest.raises(Conflict, match=r"1 \(never active\), which can be activated by number"):
        store.rollback("ctr")


def test_a_canary_that_was_active_before_keeps_its_place_when_it_is_withdrawn(open_store, tmp_path: Path) -> None:
    store = open_store()
    load(store, tmp_path, 1)
    load(store, tmp_path, 2)
    store.canary("ctr", 1, 0.5)
    store.withdraw("ctr")
    assert store.rollback("ctr") == 1


def test_rejected_versions_do_not_count_as_waiting(open_store, tmp_path: Path) -> None:
    store = open_store(keep_versions=0)
    load(store, tmp_path, 20)
    for version in (21, 22, 23):
        load(store, tmp_path, version, activate=False)  # a Conflict where the ones before still waited
        store.canary("ctr", version, 0.5)
        store.withdraw("ctr")
        assert kept(store) == [20, version], "the last one, for whoever wants to look into it"
    load(store, tmp_path, 24, activate=False)
    with pytest.raises(Conflict, match=r"never activated: \[24\]"):
        load(store, tmp_path, 25, activate=False)


def test_a_number_that_is_loaded_anew_is_another_version(open_store, tmp_path: Path) -> None:
    store = open_store(keep_versions=2)
    load(store, tmp_path, 20)
    load(store, tmp_path, 21)
    store.rollback("ctr")
    store.drop("ctr", 21)
    load(store, tmp_path / "again", 21, activate=False)
    order = read_document(store.model("ctr").where, "ctr").order
    assert 21 not in order
    store.activate("ctr", 21)
    load(store, tmp_path, 22)
    assert store.rollback("ctr") == 21


def test_the_quota_names_what_may_be_dropped_in_the_order_in_which_it_would_go(open_store, tmp_path: Path) -> None:
    """What a rollback would go to is the last one, whatever its number, and what serves is not among them."""
    store = open_store(keep_versions=9, quotas={"ctr": {"versions": 5}})
    for version in (10, 30, 20, 40):
        load(store, tmp_path, version)
    load(store, tmp_path, 5, activate=False)
    assert store.rollback("ctr") == 20
    with pytest.raises(Conflict, match=r"drop one first: \[40, 5, 10, 30\]"):
        load(store, tmp_path, 50)


# --- the rule


REPLACED, ROLLBACK = "replaced", "rollback"


@pytest.mark.parametrize(
    ("there", "active", "keep", "left", "surplus"),
    [
        ([20, 21, 22], 22, 1, [(21, ROLLBACK), (20, REPLACED)], [21]),
        ([20, 21, 22], 22, 0, [(21, ROLLBACK), (20, REPLACED)], [21, 20]),
        ([19, 20, 21], 20, 1, [(19, REPLACED), (21, ROLLBACK)], []),  # the last one stays, until another serves
        ([18, 19, 20, 21], 20, 1, [(18, REPLACED), (19, REPLACED), (21, ROLLBACK)], [18]),
        ([20, 21, 22], 22, 1, [(20, REPLACED)], [21]),  # it never served
        ([20, 21, 22], 20, 0, [], []),  # they wait
        ([10, 20, 30], 10, 1, [(30, REPLACED), (20, REPLACED)], [30]),
        ([20, 21], None, 0, [(20, REPLACED)], []),
    ],
)
def test_surplus(there, active, keep, left, surplus) -> None:
    assert surplus_of(there, active, set(), keep, ServingOrder(tuple(left))) == surplus


def test_without_an_order_on_record_it_is_by_number() -> None:
    assert ServingOrder.by_number([3, 1, 2, 5], 4) == ServingOrder(((1, REPLACED), (2, REPLACED), (3, REPLACED)))
    assert ServingOrder.by_number([3, 1], None) == ServingOrder()


@pytest.mark.parametrize(
    "document", [[[1, "replaced"], [1, "rollback"]], [[1, "eaten"]], [[1]], [["x", "replaced"]], 3]
)
def test_an_order_that_makes_no_sense_is_not_read(document) -> None:
    with pytest.raises((ValueError, TypeError)):
        ServingOrder.parse(document)
