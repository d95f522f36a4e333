"""A canary beside the active version: both exact, the share kept, one step to promote it, and all of it given back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.counts import few_or_many
from tests.engine import scenes
from tests.engine.lifecycle.test_switch import BASE, STREAMED, Crew, Stream, open_versions, snapshot, stamps, until
from tierstore.engine.serving.document import SavedRoutes, read_document
from tierstore.errors import Conflict, DeltaError, InvalidInput, NotFound, NotReady, Overloaded, TooLarge

pytestmark = pytest.mark.usefixtures("quick_loads")

KEYS = np.arange(40)


def both(store: tierstore.Store, root: Path, *, share: float = 0.5, **options: object) -> tierstore.Model:
    """Versions 1, active, and 2, the canary."""
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(root, version, stamp=version, **options), activate=version == 1)
    store.canary("ctr", 2, share)
    return store.model("ctr")


def rows(model: tierstore.Model, version: int | str | None, keys: np.ndarray = KEYS) -> np.ndarray:
    return model.lookup("item_id", keys, version=version)


def folded(store: tierstore.Store) -> None:
    publisher = store.model("ctr").publisher
    with publisher.changed:
        assert publisher.changed.wait_for(lambda: not any(v.overlays for v in publisher.served.views), timeout=20)


def state(store: tierstore.Store, version: int) -> str:
    return next(v["state"] for v in store.status()["models"]["ctr"]["versions"] if v["version"] == version)


# --- who gets which


def test_both_versions_answer_by_number_and_by_label(store, tmp_path):
    ctr = both(store, tmp_path)
    for version, names in ((1, (1, "stable")), (2, (2, "canary"))):
        for name in names:
            np.testing.assert_array_equal(rows(ctr, name), scenes.vectors("item", version, KEYS))
    assert ctr.active_version == 1
    assert [state(store, version) for version in (1, 2)] == ["active", "canary"]


def test_a_canary_gets_memory_by_its_share_of_the_requests_and_no_less_than_for_a_quarter(open_store, tmp_path):
    keys = np.arange(60_000)
    store = open_store(host_budget="1MiB")
    for version in (1, 2):
        where = tmp_path / str(version)
        with tierstore.SnapshotWriter(where, model="ctr", version=version) as writer:
            writer.table("item", dim=8).write(keys, np.full((len(keys), 8), version, np.float32))
            writer.feature("item_id", table="item")
        store.load_snapshot(where, activate=version == 1)

    def parts() -> list[float]:
        budgets = [one["host_bytes"] for one in store.status()["models"]["ctr"]["versions"]]
        return [round(each["budget"] / 2**20, 2) for each in budgets if each is not None]

    assert parts() == [1.0]
    store.canary("ctr", 2, 0.1)
    assert parts()[1] <= 0.22, "at once"
    scenes.eventually(lambda: parts() == [0.78, 0.22], "[0.78, 0.22] of the memory")
    store.canary("ctr", 2, 0.5)
    scenes.eventually(lambda: parts() == [0.5, 0.5], "[0.5, 0.5] of the memory")
    store.promote("ctr")
    scenes.eventually(lambda: parts() == [1.0], "[1.0] of the memory")
    np.testing.assert_array_equal(rows(store.model("ctr"), None), np.full((len(KEYS), 8), 2.0))


def test_requests_of_one_id_get_one_version_and_the_share_holds_over_many(store, tmp_path):
    ctr = both(store, tmp_path, share=0.05)
    ids = [f"request-{number}" for number in range(10_000)]

    def canaries() -> set[str]:
        served = ctr.served
        return {each for each in ids if served.choose("ctr", None, each).version == 2}

    few = canaries()
    assert 400 < len(few) < 600
    assert few == canaries()
    with ctr.view(route=min(few)) as text, ctr.view(route=min(few).encode()) as data:
        assert text.version == data.version == 2
    store.canary("ctr", 2, 0.2)
    many = canaries()
    assert 1800 < len(many) < 2200
    assert few < many, "who had the canary keeps it as its share grows"


def test_another_canary_is_tried_on_other_requests(store, tmp_path):
    ctr = both(store, tmp_path)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 3, stamp=3), activate=False)
    before = ctr.served
    store.withdraw("ctr")
    store.canary("ctr", 3, 0.5)
    after, ids = ctr.served, [f"{number}" for number in range(1000)]
    same = [before.choose("ctr", None, of).version == 1 for of in ids if after.choose("ctr", None, of).version == 1]
    assert 0.4 < sum(same) / len(same) < 0.6


def test_without_an_id_the_share_holds_on_average_and_its_ends_are_exact(store, tmp_path):
    ctr = both(store, tmp_path, share=0.3)

    def counted() -> Counter[int]:
        served = ctr.served
        return Counter(served.choose("ctr", None, None).version for _ in range(4000))

    assert 1000 < counted()[2] < 1400
    store.canary("ctr", 2, 0)
    assert counted() == {1: 4000}
    store.canary("ctr", 2, 1)
    assert counted() == {2: 4000}


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), True, "5%", None])
def test_a_share_that_makes_no_sense_is_refused(store, tmp_path, share):
    both(store, tmp_path, share=0.25)
    with pytest.raises(InvalidInput, match="from 0 to 1"):
        store.canary("ctr", 2, share)
    assert store.status()["models"]["ctr"]["canary"]["share"] == 0.25


def test_what_may_not_be_a_canary(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1), activate=False)
    with pytest.raises(Conflict, match="no active version"):
        store.canary("ctr", 1)
    store.activate("ctr", 1)
    with pytest.raises(Conflict, match="is active"):
        store.canary("ctr", 1)
    with pytest.raises(NotFound, match="no version 9"):
        store.canary("ctr", 9)
    for version in (2, 3):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version), activate=False)
    store.canary("ctr", 2)
    with pytest.raises(Conflict, match="version 2 of 'ctr' is the canary"):
        store.canary("ctr", 3)
    store.withdraw("ctr")
    for verb in (store.withdraw, store.promote):
        with pytest.raises(Conflict, match="no canary"):
            verb("ctr")
    with pytest.raises(NotReady, match="serves version 1, not 2"), store.model("ctr").view(2):
        pass


# --- labels


def test_a_label_points_to_what_is_served_for_as_long_as_it_is(store, tmp_path):
    ctr = both(store, tmp_path)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 3), activate=False)
    store.label("ctr", "holdout", 1)
    store.label("ctr", "trial", 2)
    np.testing.assert_array_equal(rows(ctr, "trial"), scenes.vectors("item", 2, KEYS))
    with pytest.raises(Conflict, match="may only point to what is served"):
        store.label("ctr", "trial", 3)
    with pytest.raises(NotFound, match="no version 9"):
        store.label("ctr", "trial", 9)
    with pytest.raises(NotFound, match="it has stable, canary, holdout, trial"):
        rows(ctr, "nobody")
    store.label("ctr", "trial", 1)
    assert ctr.served.all_labels() == {"stable": 1, "canary": 2, "holdout": 1, "trial": 1}
    store.unlabel("ctr", "trial")
    store.label("ctr", "trial", 2)
    store.promote("ctr")
    assert ctr.served.all_labels() == {"stable": 2, "trial": 2}
    with pytest.raises(NotFound, match="it has stable, trial"):
        store.unlabel("ctr", "holdout")
    with pytest.raises(NotFound, match="no label 'canary'"):
        rows(ctr, "canary")


def test_the_canarys_labels_go_with_it(store, tmp_path):
    ctr = both(store, tmp_path)
    store.label("ctr", "trial", 2)
    store.label("ctr", "holdout", 1)
    assert store.withdraw("ctr") == 2
    assert ctr.served.all_labels() == {"stable": 1, "holdout": 1}


@pytest.mark.parametrize("name", ["", "17", "a b", "../x", "stable", "canary", "x" * 65, None])
def test_a_label_that_would_be_taken_for_something_else_is_refused(store, tmp_path, name):
    both(store, tmp_path)
    with pytest.raises(InvalidInput):
        store.label("ctr", name, 1)
    assert store.model("ctr").served.labels == {}


@pytest.mark.parametrize("name", ["stable", "canary"])
def test_the_labels_that_are_always_there_cannot_be_removed(store, tmp_path, name):
    both(store, tmp_path)
    with pytest.raises(Conflict, match="cannot be removed"):
        store.unlabel("ctr", name)


# --- deltas


def test_a_delta_is_seen_in_both_versions_before_and_after_it_is_folded(store, tmp_path):
    ctr = both(store, tmp_path)
    with ctr.view(1), ctr.view(2):
        store.apply_delta(scenes.stamped(1, {"item": KEYS}))
        store.apply_delta(scenes.delta(2, deletes={"item": [3]}))
        expected = scenes.vectors("item", 1, KEYS)
        expected[3] = 0
        for version in (1, 2):
            np.testing.assert_array_equal(rows(ctr, version), expected)
    folded(store)
    for version in (1, 2):
        with ctr.view(version) as view:
            assert (view.seq, view.open_version.watermark, view.overlays) == (2, 2, ())
        np.testing.assert_array_equal(rows(ctr, version), expected)
        others = np.arange(300, 400)
        np.testing.assert_array_equal(rows(ctr, version, others), scenes.vectors("item", version, others))
    document = store.status()["models"]["ctr"]
    assert document["canary"]["watermark"] == document["watermark"] == 2
    assert store.status()["overlay_budget"]["used"] == 0


@pytest.mark.parametrize("base", [1, 2])
def test_a_delta_for_one_version_changes_the_other_by_its_watermark_alone(store, tmp_path, base):
    ctr = both(store, tmp_path)
    store.apply_delta(scenes.stamped(1, {"item": KEYS}, base_version=base))
    folded(store)
    for version in (1, 2):
        stamp = 1 if version == base else version
        np.testing.assert_array_equal(rows(ctr, version), scenes.vectors("item", stamp, KEYS))
        with ctr.view(version) as view:
            assert view.open_version.watermark == 1


def test_a_delta_that_does_not_fit_the_canary_is_refused_whole_and_says_why(open_store, tmp_path):
    store = open_store(fold_grace_s=60)
    ctr = both(store, tmp_path)
    ctr.served.canary.open_version.specs.pop("user")
    with pytest.raises(DeltaError, match="version 2 is the canary: withdraw it"):
        store.apply_delta(scenes.stamped(1, {"user": [1]}))
    assert ctr.state.log.status()["last"] == 0
    assert store.status()["overlay_budget"]["used"] == 0
    store.apply_delta(scenes.stamped(1, {"user": [1]}, base_version=1))


def test_a_canary_ahead_of_the_log_waits_for_it_and_is_promoted_as_in_a_switch(open_store, tmp_path):
    store = open_store(keep_versions=2)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, stamp=1))
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, stamp=2, delta_seq=3), activate=False)
    store.canary("ctr", 2)
    ctr = store.model("ctr")
    store.apply_delta(scenes.stamped(1, {"item": KEYS}))
    np.testing.assert_array_equal(rows(ctr, 1), scenes.vectors("item", 1, KEYS))
    np.testing.assert_array_equal(rows(ctr, 2), scenes.vectors("item", 2, KEYS))  # in its snapshot already
    for seq in (2, 3, 4):
        store.apply_delta(scenes.stamped(seq, {"item": KEYS[:seq]}))
    for version in (1, 2):
        np.testing.assert_array_equal(rows(ctr, version, KEYS[:4]), scenes.vectors("item", 4, KEYS[:4]))
    folded(store)
    store.withdraw("ctr")
    store.load_snapshot(scenes.write_snapshot(tmp_path, 3, stamp=3, delta_seq=9), activate=False)
    store.canary("ctr", 3)
    store.promote("ctr")
    store.apply_delta(scenes.stamped(10, {"item": [7]}))
    assert state(store, 1) == "stale"
    assert store.verify().ok


def test_overlay_bytes_of_both_versions_are_counted_and_given_back(open_store, tmp_path):
    store = open_store(fold_grace_s=60)
    ctr = both(store, tmp_path)
    for seq in range(1, 6):
        store.apply_delta(scenes.stamped(seq, {"item": KEYS[:seq], "user": [seq]}))
        held = [sum(o.nbytes for o in view.overlays) for view in ctr.served.views]
        assert store.status()["overlay_budget"]["used"] == sum(held)
        assert held[0] == held[1] > 0
    store.withdraw("ctr")
    assert store.status()["overlay_budget"]["used"] == held[0]
    store.deactivate("ctr")
    assert store.status()["overlay_budget"]["used"] == 0


def test_the_overlay_budget_bounds_both_versions_together(open_store, tmp_path):
    store = open_store(fold_grace_s=60, overlay_budget="64KiB")
    ctr = both(store, tmp_path)
    one = 400  # keys: about 23 kB in each version
    with pytest.raises(TooLarge, match="version 2 is the canary: withdraw it"):
        store.apply_delta(scenes.stamped(1, {"item": range(2 * one)}))
    with pytest.raises(TooLarge, match=r"raise the setting$"):
        store.apply_delta(scenes.stamped(1, {"item": range(5 * one)}))
    store.apply_delta(scenes.stamped(1, {"item": range(one)}))
    budget = store.status()["overlay_budget"]
    assert budget["total"] * 0.6 < budget["used"] <= budget["total"]
    with pytest.raises(Overloaded):
        store.apply_delta(scenes.stamped(2, {"item": range(one, 2 * one)}))
    assert store.status()["overlay_budget"] == budget
    assert {view.seq for view in ctr.served.views} == {1}
    assert ctr.state.log.status()["last"] == 1
    store.withdraw("ctr")
    store.apply_delta(scenes.stamped(2, {"item": range(one, 2 * one)}))
    assert store.status()["overlay_budget"]["used"] <= budget["total"]


def test_a_slow_reader_of_one_version_does_not_keep_the_other_from_folding(store, tmp_path):
    ctr = both(store, tmp_path)
    for slow in (1, 2):
        seq = store.status()["models"]["ctr"]["watermark"]
        with ctr.view(slow):
            store.apply_delta(scenes.stamped(seq + 1, {"item": KEYS}))
            store.apply_delta(scenes.stamped(seq + 2, {"item": KEYS}))
            other = ctr.served.numbered(3 - slow).open_version
            until(store, lambda other=other, seq=seq: other.watermark == seq + 2)
            assert ctr.served.numbered(slow).open_version.watermark == seq
        folded(store)


# --- promote, withdraw, and what else happens with a canary there


def test_promote_opens_nothing_and_the_former_active_version_is_kept(store, tmp_path, monkeypatch):
    ctr = both(store, tmp_path)
    view = ctr.served.canary
    monkeypatch.setattr(ctr.opener, "open", None)
    assert store.promote("ctr") == 2
    monkeypatch.undo()
    assert ctr.served.active is view
    assert (ctr.active_version, ctr.served.canary, state(store, 1)) == (2, None, "kept")
    until(store, lambda: open_versions(store) == [2])
    assert store.rollback("ctr") == 1
    np.testing.assert_array_equal(rows(ctr, None), scenes.vectors("item", 1, KEYS))


def test_to_activate_the_canary_is_to_promote_it(store, tmp_path):
    ctr = both(store, tmp_path)
    view = ctr.served.canary
    store.activate("ctr", 2)
    assert (ctr.served.active, ctr.served.canary) == (view, None)


@pytest.mark.parametrize("verb", ["activate", "load", "rollback", "deactivate"])
def test_whatever_else_changes_the_active_version_withdraws_the_canary(store, tmp_path, verb):
    ctr = both(store, tmp_path)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 3, stamp=3), activate=False)
    if verb == "rollback":
        store.promote("ctr")  # 2 is active
        store.canary("ctr", 3)
        assert store.rollback("ctr") == 1
    elif verb == "load":
        store.load_snapshot(scenes.write_snapshot(tmp_path, 4, stamp=4))
    elif verb == "activate":
        store.activate("ctr", 3)
    else:
        store.deactivate("ctr")
    expected = {"rollback": [1], "load": [4], "activate": [3], "deactivate": []}[verb]
    assert [*ctr.served.versions] == expected
    until(store, lambda: open_versions(store) == expected)
    assert read_document(ctr.where, "ctr").routes == SavedRoutes(*expected)


def test_a_served_canary_is_not_dropped_nor_taken_for_surplus(open_store, tmp_path):
    store = open_store(keep_versions=0)
    for version in (3, 1):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version), activate=version == 3)
    store.canary("ctr", 1, 0.5)  # older than the active one
    ctr = store.model("ctr")
    with pytest.raises(Conflict, match="is the canary; withdraw it first"):
        store.drop("ctr", 1)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2), activate=False)
    with ctr.state.switch:
        ctr.drops.drop_surplus()
    assert ctr.versions == [1, 3]
    store.withdraw("ctr")
    until(store, lambda: open_versions(store) == [3])
    with ctr.state.switch:
        ctr.drops.drop_surplus()
    assert ctr.versions == [3]


def test_withdraw_gives_memory_back_and_the_version_can_be_dropped(open_store, tmp_path):
    store = open_store(host_budget="2MiB")
    ctr = both(store, tmp_path, rows={"user": 20_000, "item": 40_000})
    budget = store.shared.host_budget
    active, canary = (view.open_version for view in ctr.served.views)
    assert active.host_reserved_bytes + canary.host_reserved_bytes == budget.used <= budget.total
    assert active.host_reserved_bytes == pytest.approx(budget.total / 2, rel=0.01)
    store.withdraw("ctr")
    until(store, lambda: open_versions(store) == [1])
    scenes.eventually(lambda: active.host_reserved_bytes > 0.99 * budget.total, "it has all again")
    assert budget.used == active.host_reserved_bytes
    store.drop("ctr", 2)
    assert ctr.versions == [1]


def test_a_promoted_canary_grows_to_what_the_active_version_had(open_store, tmp_path):
    store = open_store(host_budget="2MiB")
    ctr = both(store, tmp_path, rows={"user": 20_000, "item": 40_000})
    budget = store.shared.host_budget
    store.promote("ctr")
    until(store, lambda: open_versions(store) == [2])
    scenes.eventually(lambda: ctr.served.active.open_version.host_reserved_bytes > 0.99 * budget.total, "it has all")
    assert budget.used <= budget.total


def test_the_budget_holds_while_a_third_version_is_switched_to(open_store, tmp_path):
    store = open_store(host_budget="2MiB")
    ctr = both(store, tmp_path, rows={"user": 20_000, "item": 40_000})
    budget, most = store.shared.host_budget, []
    store.load_snapshot(
        scenes.write_snapshot(tmp_path, 3, stamp=3, rows={"user": 20_000, "item": 40_000}), activate=False
    )
    store.activate("ctr", 3, progress=lambda _: most.append(budget.used))
    assert max(most) <= budget.total
    until(store, lambda: open_versions(store) == [3])
    scenes.eventually(lambda: ctr.served.active.open_version.host_reserved_bytes > 0.99 * budget.total, "it has all")
    assert budget.used <= budget.total


def test_a_view_of_a_withdrawn_canary_is_whole_until_it_is_left(store, tmp_path):
    ctr = both(store, tmp_path)
    with ctr.view("canary") as view:
        store.withdraw("ctr")
        store.apply_delta(scenes.stamped(1, {"item": KEYS}))
        np.testing.assert_array_equal(view.lookup("item_id", KEYS), scenes.vectors("item", 2, KEYS))
        assert open_versions(store) == [1, 2]
    store.canary("ctr", 2)  # waits until it is closed
    np.testing.assert_array_equal(rows(ctr, "canary"), scenes.vectors("item", 1, KEYS))


def test_a_canary_that_cannot_be_opened_changes_nothing(store, tmp_path):
    both(store, tmp_path)
    ctr = store.model("ctr")
    store.withdraw("ctr")
    until(store, lambda: open_versions(store) == [1])
    current = ctr.where.version(2).db / "CURRENT"
    content = current.read_bytes()
    current.write_bytes(b"no such manifest\n")
    with pytest.raises(tierstore.TierstoreError):
        store.canary("ctr", 2)
    assert (ctr.served.versions, open_versions(store)) == ((1,), [1])
    current.write_bytes(content)
    store.canary("ctr", 2)


@pytest.mark.thorough
def test_promotion_under_load_fails_no_request_and_mixes_none(open_store, tmp_path):
    store = open_store(keep_versions=9)
    store.load_snapshot(snapshot(tmp_path, 1))
    ctr, stream, seen, newest = store.model("ctr"), Stream(store), Counter(), few_or_many(3, 4)

    def read() -> None:
        floor = stream.acknowledged
        with ctr.view() as view:
            answers = [view.lookup(name, [*BASE, *STREAMED]) for name in ("user_id", "item_id")]
            versions = {*np.concatenate([of[: len(BASE)] for of in answers]).ravel().tolist()}
            seqs = {*np.concatenate([of[len(BASE) :] for of in answers]).ravel().tolist()}
            assert versions == {view.version}
            assert len(seqs) == 1, seqs
            assert min(seqs) >= floor, "stale after an acknowledgement"
        seen[view.version] += 1

    with Crew() as crew:
        for _ in range(3):
            crew.run(read)
        crew.run(stream.send)
        for version in range(2, newest + 1):
            store.load_snapshot(snapshot(tmp_path, version, max(0, stream.acknowledged - 5)), activate=False)
            store.canary("ctr", version, 0.5)
            at = seen[version]
            while seen[version] == at and not crew.stop.is_set():
                store.canary("ctr", version, 0.6)
            if version % 2:
                store.withdraw("ctr")
                store.canary("ctr", version, 0.5)
            assert store.promote("ctr") == version
        assert not crew.stop.is_set(), crew.wrong
    assert stream.acknowledged > 10
    assert stamps(store) == ({float(newest)}, {float(stream.acknowledged)})
