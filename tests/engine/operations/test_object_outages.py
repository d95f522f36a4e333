"""An object storage that is away for a while: loads and writes wait and go on; where it stays away they fail, and go on later."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tierstore.errors import InvalidInput, StorageError
from tierstore.formats import objects
from tierstore.types import Progress

pytest.importorskip("obstore", reason="the extra s3 is not installed")
pytest.importorskip("moto.server", reason="moto's server is not installed")

from tests.formats.object_server import BUCKET, Fault, ObjectServer, object_server, out_of_service, slow, unavailable

ROWS, DIM, SHARDS = 60_000, 32, 4
KEYS = np.random.default_rng(5).permutation(ROWS)
VECTORS = (KEYS[:, None] * 0.5 + np.arange(DIM)).astype(np.float32)
AWAY_S = 4.0
LONG_S = 60.0  # more than a helper process takes to start on a busy machine


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with object_server() as running:
        yield running


@pytest.fixture(autouse=True)
def _in_service(server: ObjectServer) -> Iterator[None]:
    yield
    for faults in (server.outages, server.faults, server.write_faults):
        faults.clear()


def write(where: Path | str) -> None:
    with tierstore.SnapshotWriter(where, model="ctr", version=1) as writer:
        writer.table("item", dim=DIM, rows_per_shard=ROWS // SHARDS).write(KEYS, VECTORS)
        writer.feature("item", table="item")
        writer.warmup("item", KEYS[:100])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, server: ObjectServer) -> str:
    root = tmp_path_factory.mktemp("written") / "s"
    write(root)
    return server.put(root, "written")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, server: ObjectServer, written: str) -> str:
    root = tmp_path_factory.mktemp("built") / "b"
    tierstore.build_snapshot(written, root, load_workers=1)
    return server.put(root, "built")


def check(store: tierstore.Store) -> None:
    got, found = store.model("ctr").lookup("item", KEYS, return_found=True)
    assert found.all()
    np.testing.assert_array_equal(got, VECTORS)


@contextlib.contextmanager
def connections_refused(server: ObjectServer, noticed: threading.Event | None = None) -> Iterator[None]:
    """Over after AWAY_S, or once it is noticed, if somebody says so."""
    server.stop()

    def start() -> None:
        (noticed or threading.Event()).wait(LONG_S if noticed else AWAY_S)
        server.start()

    thread = threading.Thread(target=start)
    thread.start()
    try:
        yield
    finally:
        if noticed:
            noticed.set()
        thread.join(30)


@contextlib.contextmanager
def everything_fails(server: ObjectServer, noticed: threading.Event | None = None) -> Iterator[None]:
    """As `connections_refused`."""
    fault = out_of_service(LONG_S if noticed else AWAY_S)
    server.outages.append(lambda *call: None if noticed and noticed.is_set() else fault(*call))
    yield


Outage = Callable[[ObjectServer, threading.Event | None], contextlib.AbstractContextManager[None]]
OUTAGES = pytest.mark.parametrize("outage", [everything_fails, connections_refused])


@pytest.mark.thorough
@OUTAGES
@pytest.mark.parametrize("phase", ["read", "write"])
def test_a_load_waits_and_goes_on(open_store, server, written, outage: Outage, phase: str) -> None:
    store = open_store(host_budget="64MiB", load_workers=1)
    waited: list[str] = []
    noticed = threading.Event() if phase == "read" else None  # later all may have been read
    with contextlib.ExitStack() as stack:

        def start(step: Progress) -> None:
            if step.phase == phase and not started:
                started.append(stack.enter_context(outage(server, noticed)))
            if step.waits_for:
                waited.append(step.waits_for)
                if noticed:
                    noticed.set()

        started: list[None] = []
        assert store.load_snapshot(written, progress=start) == 1
        assert started
    if phase == "read":
        assert any(written in words and "could not be had yet" in words for words in waited), waited
    check(store)


@pytest.mark.thorough
@OUTAGES
def test_a_built_version_waits_and_goes_on(open_store, server, built, outage: Outage) -> None:
    store = open_store(host_budget="64MiB", load_workers=1)
    with contextlib.ExitStack() as stack:
        started: list[None] = []

        def start(step: Progress) -> None:
            if step.phase == "copy" and not started:
                started.append(stack.enter_context(outage(server, None)))

        assert store.load_snapshot(built, progress=start) == 1
        assert started
    check(store)


@pytest.mark.thorough
def test_a_load_that_waited_in_vain_goes_on_when_it_is_begun_again(open_store, server, written, monkeypatch) -> None:
    monkeypatch.setattr(objects, "PATIENCE_S", 0.5)
    store = open_store(host_budget="64MiB", load_workers=1, load_memory="1MiB")
    last = f"part-{SHARDS - 1:05}"
    server.faults.append(unavailable(10**6, of=last))
    with pytest.raises(StorageError, match=rf"{last}.*could not be had within 0 s") as raised:
        store.load_snapshot(written)
    assert not isinstance(raised.value, InvalidInput)
    assert store.model("ctr").versions == []
    server.faults.clear()
    server.requested.clear()
    phases: list[tuple[str, int]] = []
    assert store.load_snapshot(written, progress=lambda step: phases.append((step.phase, step.done))) == 1
    assert max(done for phase, done in phases if phase == "check") > 0, "runs of the first load were used"
    assert any(last in path for path in server.requested)
    assert not any("part-00000" in path for path in server.requested)
    check(store)


def test_each_shard_comes_once(open_store, server, written, tmp_path) -> None:
    server.ranges.clear()
    server.requested.clear()
    store = open_store(host_budget="64MiB", load_workers=1)
    store.load_snapshot(written)
    check(store)
    shards = [(path, at) for path, at in zip(server.requested, server.ranges, strict=True) if "/part-" in path]
    assert len(shards) == len(set(shards)) == SHARDS


@pytest.mark.thorough
@pytest.mark.parametrize("faults", [[slow(0.3)], [out_of_service(AWAY_S)]], ids=["slow", "503"])
def test_a_writer_waits_and_goes_on(open_store, server, faults: list[Fault], request) -> None:
    url = f"s3://{BUCKET}/{request.node.name}"
    server.outages += faults
    write(url)
    server.outages.clear()
    store = open_store(host_budget="64MiB", load_workers=1)
    store.load_snapshot(url)
    check(store)


@pytest.mark.thorough
def test_an_export_waits_and_goes_on(open_store, server, written) -> None:
    store = open_store(host_budget="64MiB", load_workers=1)
    store.load_snapshot(written)
    with contextlib.ExitStack() as stack:
        started: list[None] = []

        def start(step: Progress) -> None:
            if step.phase == "export" and not started:
                started.append(stack.enter_context(connections_refused(server)))

        store.export("ctr", f"s3://{BUCKET}/exported", as_version=2, progress=start)
        assert started
    assert store.load_snapshot(f"s3://{BUCKET}/exported") == 2
    check(store)
