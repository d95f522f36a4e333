"""What `explain` says of a key is what is there, and looking changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.collisions import digest, pair
from tests.engine import scenes, ttl_scenes
from tests.engine.test_store import folded
from tierstore.engine.operations import explain as explaining
from tierstore.engine.operations import key_history
from tierstore.errors import InvalidInput, NotFound, NotReady

pytestmark = pytest.mark.usefixtures("quick_loads")

OpenStore = Callable[..., tierstore.Store]


@pytest.fixture
def ctr(open_store: OpenStore, tmp_path: Path) -> tierstore.Store:
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    return store


def ask(store: tierstore.Store, key: Any, feature: str = "item_id", **options: Any) -> dict[str, Any]:
    """What is said of a key, after a comparison of its answer with a look-up's."""
    (entry,) = store.explain("ctr", feature, [key], **options)["keys"]
    rows, found = store.model("ctr").lookup(feature, [key], return_found=True, version=options.get("version"))
    assert entry["found"] == bool(found[0])
    assert entry["default"] == (not found[0])
    assert entry["row"] == [float(str(number)) for number in rows[0]]
    return entry


def holds(entry: dict[str, Any]) -> dict[str, str]:
    return {tier["tier"]: tier["holds"] for tier in entry["tiers"] if "holds" in tier}


# --- what is there


@pytest.mark.parametrize("base", ["sealed", "rocksdb"])
def test_a_cold_key_is_answered_by_the_base_and_a_hot_one_by_memory(
    open_store: OpenStore, tmp_path: Path, base: str
) -> None:
    store = open_store(base=base)
    store.load_snapshot(scenes.write_snapshot(tmp_path, delta_seq=7))
    lowest = "base" if base == "sealed" else "disk"
    (cold,) = store.explain("ctr", "item_id", [500])["keys"]
    assert (cold["tier"], cold["state"], cold["agree"]) == (lowest, "present", None)
    assert "snapshot of version 1" in cold["why"]
    assert cold["written"] is None
    ask(store, 500)
    hot = ask(store, 500)
    assert (hot["tier"], hot["agree"], hot["differ"]) == ("host", True, [])
    assert holds(hot)["host"] == holds(hot)[lowest] == "row"
    document = store.explain("ctr", "item_id", [500, 501])
    assert (document["table"], document["version"], document["seq"], document["folded"]) == ("item", 1, 7, 7)
    assert [entry["key"] for entry in document["keys"]] == [500, 501]


def test_heat_is_what_the_cache_has_counted(ctr: tierstore.Store) -> None:
    for _ in range(6):
        ctr.model("ctr").lookup("item_id", [500])
    (entry,) = ctr.explain("ctr", "item_id", [500])["keys"]
    (host,) = [tier for tier in entry["tiers"] if tier["tier"] == "host"]
    assert host["hits"] == 3
    assert host["queue"] in ("main", "probation")


def test_looking_counts_nothing_and_promotes_nothing(ctr: tierstore.Store) -> None:
    def figures() -> dict[str, Any]:
        table = ctr.status("ctr")["models"]["ctr"]["tables"]["item"]
        return {name: figure for name, figure in table.items() if name != "cache"}  # which a thread works on meanwhile

    ctr.model("ctr").lookup("item_id", [500, 99_999])
    before = figures()
    assert before["lookup_keys"]["disk"] == before["lookup_keys"]["absent"] == 1
    for _ in range(5):
        for key in (500, 501, 99_999, 99_998):
            ctr.explain("ctr", "item_id", [key])
    assert figures() == before
    (entry,) = ctr.explain("ctr", "item_id", [500])["keys"]
    assert next(tier for tier in entry["tiers"] if tier["tier"] == "host")["hits"] <= 1


def test_every_resident_key_is_found_where_it_lies_while_the_cache_changes_its_size(
    open_store: OpenStore, tmp_path: Path
) -> None:
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows={"user": 10, "item": 20_000}))
    store.model("ctr").lookup("item_id", np.arange(20_000))
    with store.model("ctr").view() as view:
        host = view.open_version.tables["item"].host
        assert host is not None
        for fraction in (1.0, 0.7, 0.3, 0.9):
            host.resize(fraction)
            resident = set(host.hot_keys(20_000).tolist())
            peeked = {key for key in range(0, 20_000, 7) if host.peek(key).row is not None}
            assert peeked == {key for key in resident if key % 7 == 0 and key < 20_000}
            assert len(peeked) > 100
        for key in sorted(peeked)[:50]:
            row = np.frombuffer(host.peek(key).row or b"", np.float32)
            np.testing.assert_array_equal(row, scenes.vector("item", 0, key))


def test_a_key_that_a_delta_wrote_names_it_before_and_after_the_fold(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(fold_grace_s=60.0)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ask(store, 3)
    store.apply_delta(scenes.stamped(1, {"item": [3, 4]}))
    store.apply_delta(scenes.stamped(2, {"item": [4, 7000]}))
    entry = ask(store, 3)
    assert (entry["tier"], entry["written"]["seq"], entry["written"]["deleted"]) == ("overlay", 1, False)
    assert entry["written"]["event_time"] is not None
    assert entry["written"]["received_at"] is not None
    assert next(tier for tier in entry["tiers"] if tier["tier"] == "overlay")["seqs"] == [1, 2]
    assert ask(store, 7000)["written"]["seq"] == 2
    store.close()
    store = open_store(fold_grace_s=0.0)
    folded(store)
    for key, seq in ((3, 1), (4, 2), (7000, 2)):
        entry = ask(store, key)
        assert entry["written"]["seq"] == seq
        assert entry["why"] == f"delta {seq} wrote it"
        assert "overlay" not in holds(entry)
        assert holds(entry)["changes"] == "row"
    assert holds(ask(store, 7000))["base"] == "nothing"


def test_a_deleted_key_names_the_delta_that_deleted_it(ctr: tierstore.Store) -> None:
    ask(ctr, 3)
    ctr.apply_delta(scenes.stamped(1, {"item": [3]}))
    ctr.apply_delta(scenes.delta(2, {}, {"item": [3]}))
    folded(ctr)
    entry = ask(ctr, 3)
    assert (entry["state"], entry["why"]) == ("deleted", "delta 2 deleted it")
    assert entry["written"]["deleted"]
    assert holds(entry)["changes"] == "absent"
    assert holds(entry)["base"] == "row"


def test_what_the_log_holds_no_more_is_said_to_be_unknown(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.apply_delta(scenes.stamped(1, {"item": [3]}))
    store.apply_delta(scenes.delta(2, {}, {"item": [4]}))
    store.apply_delta(scenes.stamped(3, {"item": [5]}))
    folded(store)
    store.model("ctr").state.log.prune(2)
    written, deleted, old, never = (ask(store, key) for key in (3, 4, 6, 99_999))
    assert (written["state"], written["written"]) == ("present", None)
    assert (
        "a delta from 1 to 2 wrote it; which one is not known: the log holds no delta up to 2 any more"
        in written["why"]
    )
    assert deleted["state"] == "deleted"
    assert "by delta 2 or one before" in deleted["why"]
    assert "came with the snapshot" in old["why"]
    assert never["state"] == "never_there"
    assert ask(store, 5)["written"]["seq"] == 3


def test_what_cannot_be_told_apart_is_not_guessed(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(base="rocksdb")
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    assert ask(store, 99_999)["state"] == "never_there"
    store.apply_delta(scenes.stamped(1, {"item": [3]}))
    store.apply_delta(scenes.stamped(2, {"item": [5]}))
    folded(store)
    store.model("ctr").state.log.prune(1)
    assert ask(store, 99_999)["state"] == "not_known"
    assert "the snapshot of version 1 or a delta up to 1 wrote it; which is not known" in ask(store, 3)["why"]


def test_the_search_of_the_log_is_bounded_and_says_where_it_ended(
    ctr: tierstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seq in range(1, 6):
        ctr.apply_delta(scenes.stamped(seq, {"item": [seq]}))
    folded(ctr)
    monkeypatch.setattr(key_history, "SEARCH_BYTES", 1)
    document = ctr.explain("ctr", "item_id", [1, 5])
    assert document["log"] == {"first": 5, "last": 5, "ended": "deltas up to 4 were not searched: there are too many"}
    first, last = document["keys"]
    assert first["written"] is None
    assert "a delta from 1 to 4 wrote it" in first["why"]
    assert last["written"]["seq"] == 5


def test_a_key_that_was_never_there(ctr: tierstore.Store) -> None:
    assert ask(ctr, 99_999)["tier"] == "absent"
    entry = ask(ctr, 99_999)
    assert (entry["state"], entry["tier"], entry["written"]) == ("never_there", "host", None)  # where it is remembered
    assert entry["agree"]
    assert "not in the snapshot of version 1" in entry["why"]


def test_an_undone_delta_is_named_with_its_rollback(ctr: tierstore.Store) -> None:
    ctr.apply_delta(scenes.stamped(1, {"item": [3]}))
    ctr.apply_delta(scenes.delta(2, {"item": ([7000], scenes.vectors("item", 2, [7000]))}, {"item": [3, 4]}))
    ctr.rollback("ctr", to_seq=1)
    new, old, other = ask(ctr, 7000), ask(ctr, 3), ask(ctr, 4)
    assert (new["state"], new["why"]) == ("undone", "delta 2 wrote it, and a rollback has undone that")
    assert [(one["seq"], one["rolled_back_to"], one["deleted"]) for one in new["undone"]] == [(2, 1, False)]
    assert (old["state"], old["written"]["seq"]) == ("present", 1)
    assert [(one["seq"], one["deleted"]) for one in old["undone"]] == [(2, True)]
    assert "came with the snapshot" in other["why"]


def test_an_undone_delta_that_wrote_nothing_here_explains_no_absence(ctr: tierstore.Store, tmp_path: Path) -> None:
    ctr.load_snapshot(scenes.write_snapshot(tmp_path, 2), activate=False)
    ctr.apply_delta(scenes.delta(1, deletes={"item": [7000]}))
    ctr.apply_delta(scenes.stamped(2, {"item": [8000]}, base_version=2))
    ctr.rollback("ctr", to_seq=0)
    never, other = ask(ctr, 7000), ask(ctr, 8000)
    assert (never["state"], [(one["seq"], one["deleted"]) for one in never["undone"]]) == ("never_there", [(1, True)])
    assert (other["state"], other["undone"], [one["seq"] for one in other["passed_over"]]) == ("never_there", [], [2])


def test_a_delta_for_another_version_alone_is_named_as_passed_over(
    open_store: OpenStore, ctr: tierstore.Store, tmp_path: Path
) -> None:
    ctr.load_snapshot(scenes.write_snapshot(tmp_path, 2), activate=False)
    ctr.apply_delta(scenes.stamped(1, {"item": [7000]}, base_version=2))
    entry = ask(ctr, 7000)
    assert (entry["state"], entry["written"]) == ("never_there", None)
    assert [(one["seq"], one["base_version"]) for one in entry["passed_over"]] == [(1, 2)]
    ctr.canary("ctr", 2, 0.5)
    canary = ask(ctr, 7000, version="canary")
    assert (canary["found"], canary["written"]["seq"]) == (True, 1)
    assert ctr.explain("ctr", "item_id", [1], version="canary")["version"] == 2


def test_an_expired_row_says_so_and_when(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days_later: Any
) -> None:
    store = open_store()
    store.load_snapshot(ttl_scenes.write(tmp_path))
    store.apply_delta(ttl_scenes.delta(1, [300], days=1))
    folded(store)
    alive = ask(store, 100, "user")
    moments = [datetime.fromisoformat(alive[name]) for name in ("row_time", "expires_at")]
    assert alive["state"] == "present"
    assert moments[0].timestamp() == ttl_scenes.NOW - 5 * ttl_scenes.DAY
    assert moments[1] - moments[0] == timedelta(days=30)
    days_later(40)
    later = SimpleNamespace(time=lambda: ttl_scenes.NOW + 40 * ttl_scenes.DAY, monotonic=time.monotonic)
    monkeypatch.setattr(explaining, "time", later)
    ttl_scenes.check(store)
    by_delta, from_snapshot = ask(store, 300, "user"), ask(store, 399, "user")
    assert by_delta["state"] == from_snapshot["state"] == "expired"
    assert "delta 1 wrote it, and it expired at" in by_delta["why"]
    assert "it came with the snapshot, and it expired at" in from_snapshot["why"]


# --- which key is meant


def test_string_keys_show_their_code_and_colliding_ones_are_told_apart(open_store: OpenStore, tmp_path: Path) -> None:
    one, other = pair()
    store = open_store()
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as writer:
        writer.table("word", dim=2, key="string").write([one, "plain"], [[1, 1], [2, 2]])
        writer.feature("word", table="word")
    store.load_snapshot(tmp_path / "s")
    plain = ask(store, "plain", "word")
    assert plain["code"] == digest("plain")
    with tierstore.DeltaWriter(tmp_path / "1.arrow", model="ctr", seq=1, event_time=1.0) as writer:
        writer.upsert("word", [one, other], [[3, 3], [4, 4]])
    store.apply_delta(tmp_path / "1.arrow")
    with tierstore.DeltaWriter(tmp_path / "2.arrow", model="ctr", seq=2, event_time=2.0) as writer:
        writer.upsert("word", [other], [[5, 5]])
    store.apply_delta(tmp_path / "2.arrow")
    folded(store)
    first, second = ask(store, one, "word"), ask(store, other, "word")
    assert first["code"] != second["code"]
    assert (first["written"]["seq"], second["written"]["seq"]) == (1, 2)
    assert (first["row"], second["row"]) == ([3, 3], [5, 5])


def test_the_padding_key_of_a_feature_says_that_it_is_one(ctr: tierstore.Store) -> None:
    (entry,) = ctr.explain("ctr", "clicked", [0])["keys"]
    assert (entry["state"], entry["found"], entry["default"]) == ("padding", False, False)
    assert ask(ctr, 0)["state"] == "present"


def test_bad_requests_are_refused(ctr: tierstore.Store) -> None:
    with pytest.raises(InvalidInput, match="1 to 100 keys"):
        ctr.explain("ctr", "item_id", list(range(101)))
    with pytest.raises(InvalidInput, match="1 to 100 keys"):
        ctr.explain("ctr", "item_id", [])
    with pytest.raises(NotFound, match="no feature"):
        ctr.explain("ctr", "nobody", [1])
    with pytest.raises((NotFound, NotReady)):
        ctr.explain("ctr", "item_id", [1], version=9)


# --- what is wrong


def test_a_tier_that_holds_another_row_is_named(ctr: tierstore.Store) -> None:
    ask(ctr, 3)
    ask(ctr, 4)
    with ctr.model("ctr").view() as view:
        host = view.open_version.tables["item"].host
        assert host is not None
        rows = np.full((1, host.spec.row_bytes), 63, np.uint8)
        host.update(np.array([3]), rows, np.zeros(1, np.bool_))  # what no fold would do
    (wrong,) = ctr.explain("ctr", "item_id", [3])["keys"]
    assert (wrong["tier"], wrong["agree"], wrong["differ"]) == ("host", False, ["host"])
    assert ask(ctr, 4)["agree"]


def test_an_absent_mark_over_a_row_is_named(ctr: tierstore.Store) -> None:
    with ctr.model("ctr").view() as view:
        host = view.open_version.tables["item"].host
        assert host is not None
        host.insert_absent(np.array([500]), view.seq)
    (wrong,) = ctr.explain("ctr", "item_id", [500])["keys"]
    assert (wrong["tier"], wrong["found"], wrong["differ"]) == ("host", False, ["host"])


def test_a_row_that_cannot_be_read_is_not_called_absent(ctr: tierstore.Store) -> None:
    for path in ctr.root.models.rglob("db/base/*"):
        data = path.read_bytes()
        with path.open("r+b") as file:  # in place, as a bad drive would
            file.write(bytes(len(data) // 2))
    entries = ctr.explain("ctr", "item_id", [1, 500, 999])["keys"]
    assert "unreadable" in {entry["state"] for entry in entries}
    for entry in entries:
        if entry["state"] == "unreadable":
            assert (entry["found"], entry["default"], entry["row"]) == (False, False, None)
            assert any("error" in tier for tier in entry["tiers"])


def test_a_delta_whose_row_is_nowhere_is_called_inconsistent(ctr: tierstore.Store) -> None:
    ctr.apply_delta(scenes.stamped(1, {"item": [7000]}))
    folded(ctr)
    version = ctr.model("ctr").served.active.open_version  # type: ignore[union-attr]
    disk_peek = version.disk.peek
    version.disk.peek = lambda *given: {name: type(peek)() for name, peek in disk_peek(*given).items()}  # type: ignore[method-assign, union-attr]
    (entry,) = ctr.explain("ctr", "item_id", [7000])["keys"]
    assert entry["state"] == "inconsistent"
    assert "tierstore verify" in entry["why"]
