"""What counts as a request that background work gives way to."""

from __future__ import annotations

import asyncio
import threading

from tests.engine import scenes
from tierstore.service.bounds.pool import WorkerPool


def test_a_request_is_seen_beside_work_that_reads_what_was_served_before(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    publisher = store.model("ctr").publisher
    assert not publisher.under_way()
    with publisher.beside():
        assert not publisher.under_way()
        store.apply_delta(scenes.stamped(1, {"item": [1]}))
        assert not publisher.under_way()
        with store.model("ctr").view():
            assert publisher.under_way()
        assert not publisher.under_way()
    assert not publisher.under_way()


def test_nothing_is_under_way_in_a_pool_that_was_closed_after_its_loop():
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(10)

    async def ask() -> WorkerPool:
        pool = WorkerPool("lookup", threads=1, queue_limit=9)
        pool.run(work)
        await asyncio.to_thread(begun.wait, 10)
        return pool

    pool = asyncio.run(ask())
    assert pool.under_way()
    go_on.set()
    pool.close()
    assert not pool.under_way()
