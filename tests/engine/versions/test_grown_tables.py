"""A table that grows by deltas gets the memory that its rows need by now, while it serves and after a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.lifecycle.test_switch import Crew
from tests.engine.test_store import folded
from tierstore.engine.data.budget import HostBudget
from tierstore.engine.lifecycle.opening import SWITCH_LAG
from tierstore.service.server import ServerThread

pytestmark = pytest.mark.usefixtures("quick_loads")

SMALL = {"user": 10, "item": 10}
MANY, STEP = 30_000, 10_000


def grow(store: tierstore.Store, first_seq: int = 1, *, first_key: int = 0) -> None:
    """Items `first_key` to MANY come by deltas, each in a view of its own before it is folded."""
    for seq, first in enumerate(range(first_key, MANY, STEP), first_seq):
        store.apply_delta(scenes.stamped(seq, {"item": range(first, min(MANY, first + STEP))}))
        folded(store)


def tend(store: tierstore.Store) -> None:
    """Housekeeping, until it has nothing to deal again."""
    for _ in range(3):
        scenes.housekeep(store)


def share_from_memory(store: tierstore.Store) -> float:
    """Of all items, each looked up a few times before, memory answers so many."""
    model = store.model("ctr")
    for _ in range(3):
        for first in range(0, MANY, STEP):
            model.lookup("item_id", np.arange(first, first + STEP))
    before = model.looked_up()["item"]
    rows, found = model.lookup("item_id", np.arange(MANY), return_found=True)
    assert found.all()
    after = model.looked_up()["item"]
    seqs = np.arange(MANY) // STEP + 1
    assert np.array_equal(rows[:, 0], (seqs % 16) * 64 + np.arange(MANY) % 64)
    return (after["host"] - before["host"]) / MANY


def host_of(store: tierstore.Store, table: str = "item"):
    return store.model("ctr").served.active.open_version.tables[table].host


def test_a_table_that_grows_by_deltas_gets_memory_for_its_rows(open_store, tmp_path):
    store = open_store(host_budget="64MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows=SMALL))
    grow(store)
    assert share_from_memory(store) < 0.2
    tend(store)
    assert share_from_memory(store) > 0.95
    budget = store.shared.host_budget
    assert sum(t.host.bytes_in_use for t in budget.users[0].tables.values()) <= budget.used <= budget.total
    store.close()
    store = open_store(host_budget="64MiB")
    assert share_from_memory(scenes.warmed(store)) > 0.95, "after a restart at once"


def test_what_was_in_memory_stays_there_while_a_table_gets_more(open_store, tmp_path):
    store = open_store(host_budget="64MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows={"user": 10, "item": STEP}))
    model, keys = store.model("ctr"), np.arange(STEP)
    for _ in range(3):
        model.lookup("item_id", keys)
    before, held = host_of(store), host_of(store).rows_resident
    grow(store, first_key=STEP)
    tend(store)
    assert host_of(store) is not before
    assert before.rows_resident == 0, "its memory is given back"
    counts = model.looked_up()["item"]["disk"]
    model.lookup("item_id", keys)
    assert model.looked_up()["item"]["disk"] - counts <= len(keys) - held


def test_tables_are_dealt_by_what_they_need_by_now_where_not_all_fits(open_store, tmp_path):
    store = open_store(host_budget="1MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows={"user": 25_000, "item": 10}))
    before = host_of(store, "user").allowed_bytes
    grow(store)
    tend(store)
    assert before > 5 * (128 << 10)
    item, user = host_of(store), host_of(store, "user")
    assert item.bytes_in_use > 0.4 * (1 << 20) > 0.2 * (1 << 20) < user.bytes_in_use < before
    assert item.bytes_in_use + user.bytes_in_use <= store.shared.host_budget.used <= 1 << 20


def test_a_table_that_was_caught_up_before_it_serves_has_memory_for_what_came(open_store, tmp_path):
    store = open_store(host_budget="64MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows=SMALL))
    for seq in range(1, 25):
        store.apply_delta(scenes.stamped(seq, {"item": range(seq * 1000, seq * 1000 + 1000)}))
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, rows=SMALL))
    assert host_of(store).capacity_rows > (24 - SWITCH_LAG) * 1000


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["in process", "over HTTP"])
def test_answers_are_exact_while_tables_are_replaced_under_readers_and_deltas(open_store, tmp_path, way):
    store = open_store(host_budget="64MiB", fold_grace_s=0.0, port=0)
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows=SMALL))
    model = store.model("ctr")
    acknowledged, done, tables = 0, threading.Event(), set()

    def read(number: int, lookup: Callable[[np.ndarray], np.ndarray]) -> None:
        draw = np.random.default_rng(number)
        while not done.is_set():
            least = acknowledged
            keys = draw.integers(0, 500, 64)
            stamps = set((lookup(keys)[:, 0] - keys % 64).tolist())
            if least:
                assert len(stamps) == 1, "every row is of one delta"
                assert least <= stamps.pop() / 64 <= acknowledged + 1

    def deltas() -> None:
        nonlocal acknowledged
        for seq in range(1, 16):
            # the first keys are rewritten by each, the others are new
            keys = [*range(500), *range(500 + seq * 4000, 4500 + seq * 4000)]
            store.apply_delta(scenes.stamped(seq, {"item": keys}))
            acknowledged = seq
            if seq % 5 == 0:
                scenes.eventually(lambda: len(tables) > seq // 5, "a table is replaced")  # noqa: B023
        done.set()

    def tend_() -> None:
        while not done.is_set():
            store.shared.memory.run()
            model.housekeeping.tasks.run()
            tables.add(host_of(store))

    with ExitStack() as stack, Crew() as crew:
        if way == "over HTTP":
            url = stack.enter_context(ServerThread(store)).url
            clients = [stack.enter_context(tierstore.Client(url)) for _ in range(2)]
            lookups = [partial(client.lookup, "ctr", "item_id") for client in clients]
        else:
            lookups = [partial(model.lookup, "item_id")] * 2
        for number, lookup in enumerate(lookups):
            crew.run(partial(read, number, lookup), 1)
        crew.run(tend_, 1)
        crew.run(deltas, 1)
        crew.join()
    folded(store)
    tend(store)
    rows = model.lookup("item_id", np.arange(500))
    assert np.array_equal(rows[:, 0], 15 * 64 + np.arange(500) % 64)
    assert host_of(store).capacity_rows > 15 * 4000


def test_a_budget_deals_again_among_tables_whose_needs_have_changed():
    class Uneven:
        host_need_bytes = host_reserved_bytes = 0

        def __init__(self, need: int) -> None:
            self.host_need_bytes, self.host_is_uneven, self.sizes = need, False, []
            self.request_share, self.looked_up_bytes = 1.0, 0

        def attach_host(self, budget_bytes, limit_bytes, like):
            self.host_reserved_bytes = budget_bytes

        def resize_host(self, budget_bytes):
            self.host_reserved_bytes, self.host_is_uneven = budget_bytes, False
            self.sizes.append(budget_bytes)

    budget, user = HostBudget(1000), Uneven(5000)
    budget.admit(user)
    budget.rebalance()
    assert user.sizes == []
    user.host_is_uneven = True
    budget.rebalance()
    assert user.sizes == [1000]


def test_a_table_that_gets_its_first_memory_while_it_serves_is_looked_up_there(open_store, tmp_path):
    store = open_store(host_budget="64MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    model, keys = store.model("ctr"), np.arange(100)
    version = model.served.active.open_version
    version.hosts.close()
    version.hosts.attach(0, 1 << 20, {}, 0)
    model.state.live.renew(version)
    model.lookup("item_id", keys)
    assert host_of(store) is None
    version.hosts.resize(1 << 20)
    tend(store)
    for _ in range(3):
        before = model.looked_up()["item"]["host"]
        model.lookup("item_id", keys)
    assert model.looked_up()["item"]["host"] - before == len(keys)
