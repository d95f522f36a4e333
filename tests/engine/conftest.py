"""Stores that close themselves, on this machine and over a real cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import tierstore
from tests.engine.quick_build import in_process
from tests.engine.ttl_scenes import DAY, NOW
from tests.redis_cluster import RedisCluster, redis_cluster
from tierstore.engine.lifecycle import expiry
from tierstore.engine.store import Store


@pytest.fixture(scope="module")
def quick_loads() -> Iterator[None]:
    """Loads build in this process."""
    with in_process():
        yield


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Opens the store in tmp_path/data; call it again after closing to reopen. Closes what is left open."""
    opened: list[Store] = []

    def open_(**settings: object) -> Store:
        options = {"host_budget": "4MiB", "load_workers": 1, "disk_threads": 2, "fold_grace_s": 0.0} | settings
        options = {"ttl_most_share": 1} | options  # tests move clocks
        opened.append(tierstore.open(tmp_path / "data", **options))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., Store]) -> Store:
    return open_store()


@pytest.fixture
def days_later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock of expiry so many days after NOW of `ttl_scenes`, in all its versions that are open."""

    def set_(days: float) -> None:
        clock = SimpleNamespace(time=lambda: NOW + days * DAY, monotonic=time.monotonic)
        monkeypatch.setattr(expiry, "time", clock)

    set_(0)
    return set_


# --- nodes over a real cluster


@pytest.fixture(scope="module")
def servers() -> Iterator[RedisCluster]:
    with redis_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(servers: RedisCluster) -> RedisCluster:
    servers.flush()
    return servers


@pytest.fixture
def open_node(cluster: RedisCluster, tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Opens a node by its name, with a data directory of its own. Closes what is left open."""
    opened: list[Store] = []

    def open_(name: str = "a", **settings: object) -> Store:
        options = {
            "host_budget": "4MiB",
            "load_workers": 1,
            "disk_threads": 2,
            "fold_grace_s": 0.0,
            "remote_timeout_s": 20.0,
            "remote_lease_s": 2.0,
        }
        opened.append(tierstore.open(tmp_path / name, remote=cluster.url, **(options | settings)))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()
