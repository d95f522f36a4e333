"""For all tests: kernels are compiled before processes share them, helper processes are kept, long files come first.

`make test` runs the files of tests in several processes (pytest-xdist); plain `pytest` runs in one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import warm_helpers
from tierstore.kernels import ahead

settings.register_profile("patient", settings(), deadline=None)  # another machine may be slower, or busy
settings.load_profile("patient")

# Files that take longest, the longest first. With several processes the run is as long as the one that ends last.
LONG = (
    "test_benchmarks", "test_unfinished", "test_faults", "test_resume", "test_bulkload", "test_partitions", "test_crash",
    "test_full_disk", "test_disk", "test_corrupt", "test_rollout", "test_switch", "test_story", "test_model_based",
    "test_reactor_differential", "test_first_start", "test_look_ups",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Compile all kernels before the tests, in several processes: else each test process would compile those that it calls."""
    if not hasattr(config, "workerinput"):  # of pytest-xdist: one of its processes
        ahead.compile_all(len(os.sched_getaffinity(0)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {stem: place for place, stem in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))  # stable: all else stays in its order


@pytest.fixture(scope="session", autouse=True)
def _kept_helpers() -> Iterator[None]:
    with warm_helpers.kept():
        yield


@pytest.fixture
def own_helpers() -> Iterator[None]:
    """For tests that are about helper processes: each load starts its own, and ends them."""
    with warm_helpers.not_kept():
        yield
