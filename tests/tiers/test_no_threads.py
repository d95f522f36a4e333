"""A machine that has no memory for another thread: what has its threads goes on, and what needs one says so."""

from __future__ import annotations

import threading

import pytest

from tierstore.tiers.background import in_background
from tierstore.tiers.disk.reader_pool import ReaderPool

WAIT_S = 30.0


@pytest.fixture
def no_threads(monkeypatch):
    """From when it is called."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    return lambda: monkeypatch.setattr(threading.Thread, "start", start)


def test_a_pool_of_readers_has_all_its_threads_from_the_beginning(no_threads):
    pool = ReaderPool(3, chunk_keys=1)
    no_threads()
    together = threading.Barrier(4)
    pool.run(4, lambda start, stop: together.wait(WAIT_S) and None)
    done: list[int] = []
    pool.run(100, lambda start, stop: done.append(start))
    assert sorted(done) == list(range(100))
    pool.close()
    pool.run(100, lambda start, stop: done.append(start))
    assert len(done) == 200


def test_background_work_is_done_by_its_caller(no_threads):
    no_threads()
    assert in_background(threading.get_ident) == threading.get_ident()
