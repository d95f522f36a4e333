"""A client of three real nodes: balanced, one killed, a version pinned."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.client.conftest import Make
from tests.client.nodes import Node, nodes, process, row, write_change, write_version
from tierstore.client import AsyncClient, Client
from tierstore.errors import InvalidInput, NotFound, Unreachable


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Version 1 on all; version 2 as a canary without requests on the last."""
    root = tmp_path_factory.mktemp("three")
    with nodes(root, 3) as made:
        first, second = write_version(root, 1), write_version(root, 2)
        for node in made:
            node.store.load_snapshot(first)
        made[2].store.load_snapshot(second, activate=False)
        made[2].store.canary("ctr", 2, 0.0)
        yield made


def urls(of: list[Node]) -> list[str]:
    return [node.url for node in of]


def answered(node: Node) -> int:
    counts = node.store.status("ctr")["models"]["ctr"]["tables"]["item"]["lookup_keys"]
    return int(sum(counts.values()))


def test_look_ups_are_spread_over_the_nodes(make: Make, three: list[Node]) -> None:
    before = [answered(node) for node in three]
    client = make(urls(three))
    for key in range(60):
        np.testing.assert_array_equal(client.lookup("ctr", "item_id", [key]), [row(1, key)])
    counts = [answered(node) - old for node, old in zip(three, before, strict=True)]
    assert sum(counts) == 60
    assert min(counts) >= 15
    assert client.figures()["nodes"] == dict.fromkeys(urls(three), 0.0)
    assert client.models() == ["ctr"]


def test_a_large_look_up_is_answered_by_one_node(make: Make, three: list[Node]) -> None:
    before = [answered(node) for node in three]
    rows = make(urls(three), split_keys=50).lookup("ctr", "item_id", np.arange(400))
    np.testing.assert_array_equal(rows, [row(1, key) for key in range(400)])
    counts = [answered(node) - old for node, old in zip(three, before, strict=True)]
    assert sorted(counts) == [0, 0, 400]


def test_changes_need_a_client_of_one_node(make: Make, three: list[Node], tmp_path: Path) -> None:
    client = make(urls(three))
    change = write_change(tmp_path, 6, [1], 1.0)
    for call in (
        lambda: client.apply_delta(change),
        lambda: client.load_snapshot(tmp_path, model="ctr"),
        lambda: client.activate("ctr", 1),
        lambda: client.drop("ctr", 1),
        lambda: client.label("ctr", "x", 1),
        lambda: client.export("ctr", "x"),
        lambda: client.deactivate("ctr"),
    ):
        with pytest.raises(InvalidInput, match="client of that node alone"):
            call()


def test_a_pinned_version_is_asked_of_the_nodes_that_serve_it(three: list[Node]) -> None:
    with Client(urls(three)) as client:
        for _ in range(4):  # whichever node is asked first
            with client.pinned("ctr", 2) as ctr:
                assert ctr.version == 2
                for key in range(8):
                    np.testing.assert_array_equal(ctr.lookup("item_id", [key]), [row(2, key)])
        with client.pinned("ctr") as ctr:
            assert ctr.version == 1
            np.testing.assert_array_equal(ctr.lookup("item_id", [3]), [row(1, 3)])
            with pytest.raises(InvalidInput, match="pinned to"):
                ctr.lookup("item_id", [3], version=2)
        with client.pinned("ctr", "canary") as ctr:
            assert ctr.version == 2
        with pytest.raises(NotFound), client.pinned("ctr", 9):
            pass
        assert client.figures()["repeats"]["taken"] == 0, "a node that lacks a version is no failure"


def test_a_pinned_version_with_asyncio(three: list[Node]) -> None:
    async def rows() -> list[np.ndarray]:
        async with AsyncClient(urls(three)) as client, client.pinned("ctr", 2) as ctr:
            return await asyncio.gather(*(ctr.lookup("item_id", [key]) for key in range(16)))

    for key, got in enumerate(asyncio.run(rows())):
        np.testing.assert_array_equal(got, [row(2, key)])


def test_a_pinned_session_outlives_a_switch_on_other_nodes(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as made, Client(urls(made)) as client:
        for version in (1, 2):
            snapshot = write_version(tmp_path, version)
            for node in made:
                node.store.load_snapshot(snapshot, activate=version == 1)
        with client.pinned("ctr") as ctr:
            made[0].store.activate("ctr", 2)
            for key in range(20):
                np.testing.assert_array_equal(ctr.lookup("item_id", [key]), [row(1, key)])
            made[1].store.activate("ctr", 2)
            with pytest.raises((NotFound, tierstore.NotReady)):
                ctr.lookup("item_id", [1])
        np.testing.assert_array_equal(client.lookup("ctr", "item_id", [1]), [row(2, 1)])


AFTER = 40  # requests of each worker once the node is dead


@pytest.mark.thorough
def test_a_node_that_is_killed_under_load_costs_no_request(three: list[Node], tmp_path: Path) -> None:
    dead = threading.Event()
    with process(tmp_path, "third") as (third, service), ThreadPoolExecutor(5) as workers:
        snapshot = write_version(tmp_path, 1)
        with Client(third) as one:
            one.load_snapshot(snapshot)
        addresses = [*urls(three[:2]), third]
        with Client(addresses, timeout_s=60.0) as client:
            running = [workers.submit(look_up, client, dead, key) for key in range(3)]
            running.append(workers.submit(asyncio.run, look_up_with_asyncio(addresses, dead)))
            try:
                time.sleep(0.2)  # some of them are under way at the node
                service.kill()
                service.wait()
            finally:
                dead.set()
            for one in running:
                one.result(60)
            check_skipped(client, third)


def look_up(client: Client, dead: threading.Event, key: int) -> None:
    after = 0
    while after < AFTER:
        after += dead.is_set()
        np.testing.assert_array_equal(client.lookup("ctr", "item_id", [key]), [row(1, key)])


async def look_up_with_asyncio(addresses: list[str], dead: threading.Event) -> None:
    async with AsyncClient(addresses, timeout_s=60.0) as client:

        async def work(key: int) -> None:
            after = 0
            while after < AFTER:
                after += dead.is_set()
                np.testing.assert_array_equal(await client.lookup("ctr", "item_id", [key]), [row(1, key)])

        await asyncio.gather(*(work(key) for key in range(3)))
        check_skipped(client, addresses[-1])


def check_skipped(client: Client | AsyncClient, dead: str) -> None:
    stats = client.figures()
    assert stats["repeats"]["taken"] >= 1
    assert set(stats["nodes"]) >= {dead}


def test_where_every_node_is_away_it_is_unreachable(make: Make, tmp_path: Path) -> None:
    client = make(["http://127.0.0.1:1", "http://127.0.0.1:2"], retries=1, backoff_s=0.001)
    with pytest.raises(Unreachable):
        client.lookup("ctr", "item_id", [1])
