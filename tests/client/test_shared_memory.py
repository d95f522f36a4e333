"""With shared memory answers are the same, and they come over plain HTTP wherever it does not work."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from tierstore.client.shared_memory import AUTO_BYTES, FAILURE_LIMIT, SLOT_BYTES, SLOTS, Region
from tierstore.engine.store import Store
from tierstore.errors import DeadlineExceeded, InvalidInput, NotFound, Overloaded
from tierstore.service.server import ServerThread

from .conftest import Make
from .fake_service import FakeService, rows

ITEMS, DIM = 500, 16


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, ServerThread]]:
    """A service that lets clients use shared memory."""
    root = tmp_path_factory.mktemp("shared")
    source = root / "snapshot"
    with tierstore.SnapshotWriter(source, model="ctr", version=1) as snapshot:
        table = snapshot.table("item", dim=DIM)
        table.write(np.arange(ITEMS), np.random.default_rng(0).normal(size=(ITEMS, DIM)).astype(np.float32))
        snapshot.feature("item_id", table="item")
        snapshot.feature("clicked", table="item", combiner="mean")
    settings: dict[str, Any] = {"host_budget": "4MiB", "load_workers": 1, "disk_threads": 2, "allow_client_shm": True}
    with tierstore.open(root / "data", port=0, source_root=[root], **settings) as store:
        store.load_snapshot(source)
        with ServerThread(store) as server:
            yield store, server


def regions(server: ServerThread) -> list[Any]:
    return list(httpx.get(f"{server.url}/v2/systemsharedmemory/status").json())


def answers(client: Any) -> int:
    return int(client.figures()["shared_memory"]["answers"])


def remaining_objects() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("ts-client-*")]


def test_answers_are_those_of_the_store(make: Make, allowed: tuple[Store, ServerThread]) -> None:
    store, server = allowed
    client, model = make(server.url, shared_memory=True), store.model("ctr")
    keys = np.random.default_rng(1).integers(0, ITEMS + 9, 3000)
    offsets, weights = np.arange(0, 3000, 30), np.random.default_rng(2).random(3000).astype(np.float32)
    client.lookup("ctr", "item_id", [1])  # shows how long rows are
    client.lookup("ctr", "clicked", [1])
    for dtype in ("float32", "float16"):
        got = client.lookup("ctr", "item_id", keys, dtype=dtype, return_found=True)
        expected = model.lookup("item_id", keys, dtype=dtype, return_found=True)
        for left, right in zip(got, expected, strict=True):
            np.testing.assert_array_equal(left, right)
            assert left.dtype == right.dtype
            assert left.flags.writeable
            assert left.flags.aligned
        del got, left
        bags = client.lookup_bags("ctr", "clicked", keys, offsets, weights=weights, combiner="sum", dtype=dtype)
        np.testing.assert_array_equal(
            bags, model.lookup_bags("clicked", keys, offsets, weights=weights, combiner="sum", dtype=dtype)
        )
        del bags
    many = client.lookup_many("ctr", {"item_id": keys, "clicked": (keys, offsets)})
    np.testing.assert_array_equal(many["clicked"], model.lookup_bags("clicked", keys, offsets))
    assert answers(client) == 5
    assert remaining_objects() == []
    assert len(regions(server)) == 1


def test_what_a_caller_holds_is_never_overwritten(make: Make, allowed: tuple[Store, ServerThread]) -> None:
    store, server = allowed
    client = make(server.url, shared_memory=True)
    requests = [np.arange(number, number + 50) for number in range(3 * SLOTS)]
    client.lookup("ctr", "item_id", [1])
    held = [client.lookup("ctr", "item_id", keys)[::2, 1:] for keys in requests]
    for keys, got in zip(requests, held, strict=True):
        np.testing.assert_array_equal(got, store.model("ctr").lookup("item_id", keys)[::2, 1:])
    assert answers(client) == SLOTS, "the others went over HTTP"
    assert client.figures()["shared_memory"]["free"] == 0
    del held, got
    assert client.figures()["shared_memory"]["free"] == SLOTS
    client.lookup("ctr", "item_id", requests[0])
    assert answers(client) == SLOTS + 1


def test_by_itself_only_large_answers_go_this_way(make: Make, allowed: tuple[Store, ServerThread]) -> None:
    _, server = allowed
    client = make(server.url)
    large = np.zeros(AUTO_BYTES // (4 * DIM), np.int64)
    for keys, expected in ((large, 0), ([1], 0), (large, 1), (np.zeros(SLOT_BYTES // 64, np.int64), 1)):
        assert client.lookup("ctr", "item_id", keys).shape == (len(keys), DIM)
        assert answers(client) == expected


@pytest.mark.parametrize("options", [{"shared_memory": False}, {"shared_memory": True, "hedge_after_s": 5.0}])
def test_it_is_not_used_where_it_is_not_wanted(
    make: Make, allowed: tuple[Store, ServerThread], options: dict[str, Any]
) -> None:
    _, server = allowed
    client = make(server.url, **options)
    for _ in range(2):
        client.lookup("ctr", "item_id", [1, 2])
    assert answers(client) == 0
    assert regions(server) == []


def test_a_region_that_the_service_forgot_is_created_again(make: Make, allowed: tuple[Store, ServerThread]) -> None:
    store, server = allowed
    client = make(server.url, shared_memory=True)
    for number in range(3):
        client.lookup("ctr", "item_id", [1, 2])
        client.lookup("ctr", "item_id", [1, 2])
        before = answers(client)
        httpx.post(f"{server.url}/v2/systemsharedmemory/unregister")
        got = client.lookup("ctr", "item_id", [1, 2])
        np.testing.assert_array_equal(got, store.model("ctr").lookup("item_id", [1, 2]))
        assert answers(client) == before, number
    client.lookup("ctr", "item_id", [1, 2])
    assert answers(client) == before + 1
    assert len(regions(server)) == 1


def test_errors_are_the_same_and_end_the_attempts(make: Make, allowed: tuple[Store, ServerThread]) -> None:
    _, server = allowed
    client = make(server.url, shared_memory=True)
    client.lookup("ctr", "item_id", [1])
    for _ in range(4):
        with pytest.raises(InvalidInput, match="combiner"):
            client.lookup_bags("ctr", "item_id", [1], [0])
    with pytest.raises(NotFound):
        client.lookup("nobody", "item_id", [1])
    assert not client.figures()["shared_memory"]["usable"]
    assert regions(server) == []


def test_closing_unregisters_the_region_and_keeps_arrays_valid(make: Make, allowed: tuple[Store, ServerThread]) -> None:
    store, server = allowed
    client = make(server.url, shared_memory=True)
    client.lookup("ctr", "item_id", [1])
    got = client.lookup("ctr", "item_id", [3, 4])
    assert len(regions(server)) == 1
    if make.kind == "async":  # type: ignore[attr-defined]
        client.wait(client.client.close())
    else:
        client.close()
    assert regions(server) == []
    np.testing.assert_array_equal(got, store.model("ctr").lookup("item_id", [3, 4]))


def test_a_service_without_it_is_queried_once(make: Make, service: FakeService) -> None:
    service.documents = lambda method, path, body: (200, {"extensions": service.extensions})
    client = make(service.url, shared_memory=True)
    for _ in range(3):
        np.testing.assert_array_equal(client.lookup("m", "f", [1]), rows(np.array([1])))
    assert service.paths.count("GET /v2") == 1


def test_a_service_elsewhere_behind_a_port_of_this_host(make: Make, service: FakeService) -> None:
    service.documents = lambda method, path, body: (
        (200, {"extensions": ["system_shared_memory"]}) if path == "/v2" else (400, {"error": "cannot be opened"})
    )
    client = make(service.url, shared_memory=True)
    for _ in range(6):
        np.testing.assert_array_equal(client.lookup("m", "f", [1]), rows(np.array([1])))
    assert service.paths.count("GET /v2") == 3
    assert remaining_objects() == []


def test_no_room_for_a_region_is_no_error(make: Make, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    service.documents = lambda method, path, body: (200, {"extensions": ["system_shared_memory"]})
    client = make(service.url, shared_memory=True)
    for _ in range(2):
        np.testing.assert_array_equal(client.lookup("m", "f", [1]), rows(np.array([1])))
    assert remaining_objects() == []


@pytest.mark.thorough
def test_a_slot_that_the_service_may_still_write_to_is_not_used_again(
    make: Make, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .fake_service import Act

    service.documents = lambda method, path, body: (200, {"extensions": ["system_shared_memory"]})
    client = make(service.url, shared_memory=True)
    for _ in range(2):  # the second creates the region
        client.lookup("m", "f", [1])
    service.script = [Act(how="hang")]
    with pytest.raises(DeadlineExceeded):
        client.lookup("m", "f", [1], timeout_s=0.2)
    gc.collect()  # an error that was met on the way holds a slot until then
    assert client.figures()["shared_memory"]["free"] == SLOTS - 1


@pytest.mark.thorough
def test_a_region_that_lost_half_of_its_slots_is_replaced(make: Make, service: FakeService) -> None:
    from .fake_service import Act

    service.documents = lambda method, path, body: (200, {"extensions": ["system_shared_memory"]})
    client = make(service.url, shared_memory=True)
    for _ in range(2):  # the second creates the region
        client.lookup("m", "f", [1])
    service.script = [Act(how="hang")] * (SLOTS // 2)
    for _ in range(SLOTS // 2):
        with pytest.raises(DeadlineExceeded):
            client.lookup("m", "f", [1], timeout_s=0.2)
    np.testing.assert_array_equal(client.lookup("m", "f", [1]), rows(np.array([1])))
    gc.collect()  # an error that was met on the way holds a slot until then
    assert client.figures()["shared_memory"]["free"] == SLOTS
    regions = [path for path in service.paths if "/region/" in path]
    assert [path.rpartition("/")[2] for path in regions] == ["register", "unregister", "register"]
    assert remaining_objects() == []


def test_an_overload_does_not_end_the_attempts(make: Make, allowed: tuple[Store, ServerThread]) -> None:
    _, server = allowed
    client = make(server.url, shared_memory=True)
    client.lookup("ctr", "item_id", [1])
    client.lookup("ctr", "item_id", [1])
    before, inflight = answers(client), server.service.inflight
    bound, inflight.limit_bytes = inflight.limit_bytes, 0
    try:
        for _ in range(FAILURE_LIMIT):
            with contextlib.suppress(Overloaded):  # sent again without it, a reactor may answer
                client.lookup("ctr", "item_id", [1], timeout_s=0.5)
    finally:
        inflight.limit_bytes = bound
    assert answers(client) == before
    client.lookup("ctr", "item_id", [1])
    assert answers(client) == before + 1


def test_a_forked_process_uses_a_region_of_its_own_and_not_its_parents(
    make: Make, allowed: tuple[Store, ServerThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, server = allowed
    client = make(server.url, shared_memory=True)
    client.lookup("ctr", "item_id", [1])
    client.lookup("ctr", "item_id", [1])
    parents = regions(server)
    assert (len(parents), answers(client)) == (1, 1)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        client.lookup("ctr", "item_id", [1])
        assert (len(regions(server)), answers(client)) == (2, 2)
        client.wait(client.client.close()) if make.kind == "async" else client.close()  # type: ignore[attr-defined]
        assert regions(server) == parents
    httpx.post(f"{server.url}/v2/systemsharedmemory/unregister")


def test_slots_are_apart_and_bounded() -> None:
    region = Region()
    region.unlink()
    leases = [region.lease() for _ in range(SLOTS)]
    assert region.lease() is None
    for lease in leases:
        assert lease is not None
        (first, one), (second, two) = lease.reserve(10), lease.reserve(10)  # type: ignore[misc]
        assert second["shared_memory_offset"] - first["shared_memory_offset"] == 64
        assert not np.shares_memory(one, two)
        assert lease.reserve(SLOT_BYTES) is None
        del one, two
    del lease, leases
    assert region.free == SLOTS
