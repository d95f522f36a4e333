"""The pool of threads that answers look-ups."""

from __future__ import annotations

import asyncio
import threading

from tierstore.service.limits.worker_pool import WorkerPool


def test_nothing_is_under_way_in_a_pool_that_was_closed_after_its_loop():
    started, go_on = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        assert go_on.wait(10)

    async def ask() -> WorkerPool:
        pool = WorkerPool("lookup", threads=1, queue_limit=9)
        pool.run(work)
        await asyncio.to_thread(started.wait, 10)
        return pool

    pool = asyncio.run(ask())
    assert pool.under_way()
    go_on.set()
    pool.close()
    assert not pool.under_way()
