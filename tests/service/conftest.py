"""Servers for the tests: one over a real store with models loaded, one over a fake that can be made to wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.fake_store import FakeStore
from tests.service.scenes import write_small, write_snapshot
from tierstore.config import Settings, load_settings
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

DEADLINE_S = 60.0
GRPC = 0  # the second port: a free one


def settings_for(tmp_path: Path, **overrides: object) -> Settings:
    """Small bounds, a free port, and the test's directory as source root."""
    options: dict[str, object] = {
        "data": tmp_path / "data",
        "port": 0,
        "drain_s": 0.0,
        "source_root": [tmp_path],
        "host_budget": "4MiB",
    }
    small = {
        "lookup_threads": 2,
        "disk_threads": 2,
        "load_workers": 1,
        "max_request": "1MiB",
        "max_response": "8MiB",
        "max_delta": "1MiB",
        "max_queue_s": 3600,  # a slow machine is no overload
    }
    return load_settings(None, **options | small | overrides)


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """The first true answer of `condition`; fails after a deadline."""
    until = time.monotonic() + DEADLINE_S
    while not (answer := condition()):
        assert time.monotonic() < until, f"waited {DEADLINE_S:.0f} s for: {what}"
        time.sleep(0.005)
    return answer


def load(http: httpx.Client, source: Path, model: str = "ctr", **options: object) -> dict[str, Any]:
    """Load a snapshot through the admin interface and wait for the job's end."""
    started = http.post(f"/admin/models/{model}/snapshots", json={"source": str(source), **options})
    assert started.status_code == 202, started.text
    job = started.json()["job"]

    def ended() -> dict[str, Any] | None:
        document: dict[str, Any] = http.get(f"/admin/jobs/{job}").json()
        return document if document["state"] != "running" else None

    return eventually(ended, f"job {job}")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """A real store behind a real server, with the models `ctr`, `one` and `names`. Tests leave it as it is."""
    root = tmp_path_factory.mktemp("service")
    with Store(settings_for(root, grpc_port=GRPC)) as store:
        store.load_snapshot(write_snapshot(root))
        store.load_snapshot(write_small(root, "one", "item"))
        store.load_snapshot(write_small(root, "names", "user"))
        with ServerThread(store) as server:
            yield server


@pytest.fixture
def http(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[tuple[FakeStore, ServerThread]]:
    """A fake store behind a real server with room for two look-ups: one at work, one that waits."""
    store = FakeStore(settings_for(tmp_path, lookup_threads=1, lookup_queue=1, grpc_port=GRPC))
    with ServerThread(store) as server:  # type: ignore[arg-type]
        try:
            yield store, server
        finally:
            for name in store.models():
                store.model(name).gate.set()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[Store, ServerThread, httpx.Client]]:
    """An empty real store behind a server of its own."""
    with (
        Store(settings_for(tmp_path, grpc_port=GRPC)) as store,
        ServerThread(store) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield store, server, client


def ask_while_versions_change(store: Store, ask: Callable[[int, threading.Event], None]) -> None:
    """Activate versions 2 and 1 of `ctr` in turn, while four threads `ask(seed, over)` until the event is set."""
    over = threading.Event()
    askers = [threading.Thread(target=ask, args=(seed, over)) for seed in range(4)]
    for asker in askers:
        asker.start()
    for version in (2, 1) * 5:
        store.activate("ctr", version)
    over.set()
    for asker in askers:
        asker.join()
