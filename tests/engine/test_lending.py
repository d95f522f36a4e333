"""Views lent to other processes: the engine's rules hold over all of them. The other process is played here."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore.engine.lending import Borrower, Lender
from tierstore.engine.mirror import MirrorStore
from tierstore.engine.sharing import Changes
from tierstore.engine.store import Store, open_store
from tierstore.errors import NotFound, NotReady
from tierstore.types import Keys, Rows, States

from .quick_build import in_process
from .scenes import delta, stamped, vector, vectors, write_snapshot

KEYS = np.arange(50, dtype=np.int64)


class Played:
    """A borrower and what stands between: documents go through JSON, descriptors are duplicated."""

    def __init__(self, lender: Lender) -> None:
        self.lender = lender
        self.borrower: Borrower = lender.begin()
        self.fetched = 0
        self.syncs = 0
        self.store = MirrorStore(self, Changes(os.dup(lender.changes.fd)))

    def sync(self, known: dict[str, list[int]]) -> tuple[dict[str, Any], list[int]]:
        self.syncs += 1
        document, fds = self.lender.sync(self.borrower, json.loads(json.dumps(known)))
        return json.loads(json.dumps(document)), [os.dup(fd) for fd in fds]

    def fetch(self, serial: int, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        self.fetched += len(keys)
        rows[:], state[:] = self.lender.fetch(self.borrower, serial, table_id, keys)

    def give_back(self, view_id: int) -> None:
        self.lender.give_back(self.borrower, view_id)

    def give_up(self, error: BaseException) -> None:
        raise AssertionError from error

    def die(self) -> None:
        self.lender.end(self.borrower)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    settings = {"host_budget": "4MiB", "disk_threads": 1, "fold_grace_s": 0, "keep_versions": 3, "workers": 2}
    with in_process(), open_store(tmp_path / "data", **settings) as store:
        store.load_snapshot(write_snapshot(tmp_path))
        yield store


@pytest.fixture
def lender(store: Store) -> Iterator[Lender]:
    lender = Lender(store)
    store.told.append(lender.changes.bump)
    yield lender
    store.told.remove(lender.changes.bump)
    lender.close()


@pytest.fixture
def other(lender: Lender) -> Iterator[Played]:
    played = Played(lender)
    yield played
    played.die()


def folded(store: Store) -> bool:
    return store.status("ctr")["models"]["ctr"]["overlays"] == 0


def eventually(store: Store, what: str) -> None:
    """Wait until every delta is folded."""
    changed = store.model("ctr").publisher.changed
    with changed:
        assert changed.wait_for(lambda: not store.model("ctr").publisher.current.overlays, timeout=60), what  # type: ignore[union-attr]


def test_what_the_owner_has_in_memory_is_answered_without_asking_it(other: Played) -> None:
    with other.store.model("ctr").view() as view:
        for _ in range(2):
            np.testing.assert_array_equal(view.lookup("item_id", KEYS), vectors("item", 0, KEYS))
    assert other.fetched == 18  # 32 are warm from the start, and the others since the first look-up


def test_a_key_that_does_not_exist_is_asked_for_once(other: Played) -> None:
    with other.store.model("ctr").view() as view:
        for _ in range(2):
            _, found = view.lookup("item_id", [5000, 1], return_found=True)
            assert found.tolist() == [False, True]
    assert other.fetched == 1


def test_an_acknowledged_delta_is_seen_before_and_after_it_is_folded(store: Store, other: Played) -> None:
    with store.model("ctr").view():  # holds folding back
        store.apply_delta(stamped(1, {"item": KEYS}))
        store.apply_delta(delta(2, deletes={"item": [3]}))
        with other.store.model("ctr").view() as view:
            assert view.seq == 2
            assert len(view.overlays) > 0
            expected = vectors("item", 1, KEYS)
            expected[3] = 0
            np.testing.assert_array_equal(view.lookup("item_id", KEYS), expected)
    eventually(store, "folded")
    with other.store.model("ctr").view() as view:
        assert view.overlays == ()
        np.testing.assert_array_equal(view.lookup("item_id", KEYS), expected)


def test_nothing_is_folded_beneath_a_view_that_is_lent(store: Store, other: Played) -> None:
    with other.store.model("ctr").view() as view:
        store.apply_delta(stamped(1, {"item": KEYS}))
        other.store.refresh()
        store.apply_delta(stamped(2, {"item": KEYS}))
        assert not folded(store)
        np.testing.assert_array_equal(view.lookup("item_id", KEYS), vectors("item", 0, KEYS))
        assert not folded(store)
    other.store.refresh()
    eventually(store, "folded once the view was given back")


def test_an_idle_borrower_gives_back_as_soon_as_it_takes_what_is_new(store: Store, other: Played) -> None:
    other.store.refresh()
    store.apply_delta(stamped(1, {"item": KEYS}))
    assert len(other.lender.lagging(other.borrower)) == 1
    other.store.refresh()
    assert other.lender.lagging(other.borrower) == set()
    eventually(store, "folded")


def test_a_borrower_that_dies_holds_nothing(store: Store, lender: Lender) -> None:
    other = Played(lender)
    other.store.model("ctr").view().__enter__()
    store.apply_delta(stamped(1, {"item": KEYS}))
    other.die()
    eventually(store, "folded")


def test_a_replaced_version_stays_open_until_it_is_given_back(tmp_path: Path, store: Store, other: Played) -> None:
    with other.store.model("ctr").view() as old:
        store.load_snapshot(write_snapshot(tmp_path, 2, stamp=1))
        with other.store.model("ctr").view() as new:
            assert (old.version, new.version) == (1, 2)
            for view, stamp in ((old, 0), (new, 1)):
                np.testing.assert_array_equal(view.lookup("user_id", KEYS), vectors("user", stamp, KEYS))
        keys = np.arange(300, 400)  # not in memory
        np.testing.assert_array_equal(old.lookup("item_id", keys), vectors("item", 0, keys))
        host = old.holder.tables["item"].host
        assert host is not None
    store.drop("ctr", 1)  # waits until it is closed
    state = np.zeros(len(KEYS), np.uint8)
    host.lookup(KEYS, np.empty((len(KEYS), 8), np.float32), state)
    assert not state.any()  # its memory was given back, whoever still maps it


def test_a_miss_under_an_old_view_never_puts_an_old_row_over_a_new_one(store: Store, other: Played) -> None:
    keys = np.arange(300, 400)
    with other.store.model("ctr").view() as view:
        store.apply_delta(stamped(1, {"item": keys}))
        other.store.refresh()  # holds the view from before the delta, and the one with it
        np.testing.assert_array_equal(view.lookup("item_id", keys), vectors("item", 0, keys))
    eventually(store, "folded")
    for _ in range(2):
        with other.store.model("ctr").view() as view:
            np.testing.assert_array_equal(view.lookup("item_id", keys), vectors("item", 1, keys))


def test_only_what_is_new_is_taken(store: Store, other: Played) -> None:
    with other.store.model("ctr").view() as first, store.model("ctr").view():
        store.apply_delta(stamped(1, {"item": KEYS}))
        store.apply_delta(stamped(2, {"user": KEYS[:1]}))
        with other.store.model("ctr").view() as second:
            assert second.holder is first.holder
            store.apply_delta(stamped(3, {"user": KEYS[:1]}))
            with other.store.model("ctr").view() as third:
                assert third.overlays[-1] is second.overlays[-1]
                assert third.lookup("user_id", [0])[0].tolist() == vector("user", 3, 0).tolist()
    syncs = other.syncs
    for _ in range(3):
        with other.store.model("ctr").view():
            pass
    assert other.syncs <= syncs + 1


def shared_memory() -> int:
    """Descriptors and mappings of this process that are of shared memory; none of garbage, of which tests leave some."""
    gc.collect()
    fds = Path("/proc/self/fd")
    named = [os.readlink(fds / fd) for fd in os.listdir(fds) if os.path.lexists(fds / fd)]
    named += Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:tierstore" in name for name in named)


def test_descriptors_and_copies_are_given_back(store: Store, other: Played) -> None:
    other.store.refresh()
    before = shared_memory()
    for seq in range(1, 30):
        store.apply_delta(stamped(seq, {"item": KEYS}))
        other.store.refresh()
    eventually(store, "folded")
    other.store.refresh()
    assert shared_memory() == before


def test_models_that_come_and_go(tmp_path: Path, store: Store, other: Played) -> None:
    assert other.store.models() == ["ctr"]
    store.load_snapshot(write_snapshot(tmp_path, model="second"))
    with other.store.model("second").view(1) as view:
        assert view.lookup("item_id", [7])[0].tolist() == vector("item", 0, 7).tolist()
    with pytest.raises(NotReady, match="serves version 1"), other.store.model("second").view(2):
        pass
    store.deactivate("second")
    with pytest.raises(NotReady), other.store.model("second").view():
        pass
    with pytest.raises(NotFound):
        other.store.model("third")


def test_a_canary_is_lent_beside_the_active_version(tmp_path: Path, store: Store, other: Played) -> None:
    store.load_snapshot(write_snapshot(tmp_path, 2, stamp=2), activate=False)
    store.canary("ctr", 2, 0.5)
    store.label("ctr", "trial", 2)
    store.apply_delta(stamped(1, {"item": KEYS[:10]}))
    ours, theirs = store.model("ctr"), other.store.model("ctr")
    for asked, stamp in ((1, 0), (2, 2), ("stable", 0), ("canary", 2), ("trial", 2)):
        with theirs.view(asked) as view:
            np.testing.assert_array_equal(view.lookup("item_id", KEYS[:10]), vectors("item", 1, KEYS[:10]))
            np.testing.assert_array_equal(view.lookup("item_id", KEYS[10:]), vectors("item", stamp, KEYS[10:]))
    for number in range(50):
        with ours.view(route=f"r{number}") as here, theirs.view(route=f"r{number}") as there:
            assert here.version == there.version
    with pytest.raises(NotFound, match="it has stable, canary, trial"), theirs.view("nobody"):
        pass


def test_what_becomes_of_a_canary_is_seen_at_once(tmp_path: Path, store: Store, other: Played) -> None:
    store.load_snapshot(write_snapshot(tmp_path, 2, stamp=2), activate=False)
    theirs = other.store.model("ctr")
    store.canary("ctr", 2, 1.0)
    with theirs.view() as view:
        assert view.version == 2
        store.canary("ctr", 2, 0.0)
        with theirs.view() as stable:
            assert stable.version == 1
        store.promote("ctr")
        with theirs.view() as promoted:
            assert promoted is view, "the view that was lent already"
    store.canary("ctr", 1, 1.0)
    with theirs.view() as canary:
        assert canary.version == 1
        store.withdraw("ctr")
        with theirs.view() as active:
            assert active.version == 2
        np.testing.assert_array_equal(canary.lookup("item_id", KEYS), vectors("item", 0, KEYS))
    store.drop("ctr", 1)  # waits until it is given back
    store.apply_delta(stamped(1, {"item": KEYS}))
    other.store.refresh()
    eventually(store, "folded, as nobody holds an older view")
