"""All rows of two nodes compared: every difference is found, at one seq, while deltas come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.client.nodes import Node, nodes, write_change, write_version
from tierstore.client import Client, whole
from tierstore.errors import Conflict, InvalidInput, NotFound
from tierstore.kernels.digest import row_digests

ROWS, DIM = 20_000, 3


def write_many(root: Path) -> Path:
    where = root / "many"
    with tierstore.SnapshotWriter(where, model="many", version=1) as snapshot:
        keys = np.arange(ROWS) * 7 - 1000
        snapshot.table("item", dim=DIM, dtype="float16").write(
            keys, np.outer(keys % 97, np.ones(DIM)).astype(np.float32)
        )
        snapshot.feature("item", table="item")
    return where


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    with nodes(tmp_path, 2) as (first, second):
        snapshot = write_version(tmp_path, 1)
        for node in (first, second):
            node.store.load_snapshot(snapshot)
        yield first, second


def change(path: Path, seq: int, keys: list[int], value: float) -> Path:
    with tierstore.DeltaWriter(path, model="many", seq=seq) as delta:
        delta.upsert("item", keys, np.full((len(keys), DIM), value, np.float32))
    return path


def test_every_key_that_differs_is_found_wherever_its_row_is(pair: tuple[Node, Node], tmp_path: Path) -> None:
    """In the base, folded, and in overlays."""
    snapshot, changed = write_many(tmp_path), [-1000 + 7 * at for at in range(0, ROWS, 50)]
    for node, value in zip(pair, (1.0, 2.0), strict=True):
        node.store.load_snapshot(snapshot)
        node.store.apply_delta(change(tmp_path / "1.arrow", 1, [5, *changed], value))
        node.store.apply_delta(change(tmp_path / "2.arrow", 2, [6], 3.0))
    compared = whole.compare_whole({"a": pair[0].store, "b": pair[1].store}, "many")
    table = compared.tables["item"]
    assert (compared.seq, table.rows) == (2, {"a": ROWS + 2, "b": ROWS + 2})
    assert [one.key for one in table.differing] == sorted([5, *changed])
    assert {one.on for one in table.differing} == {("a", "b")}
    assert not table.more
    assert compared.problems == ["rows of table 'item' differ at seq 2"]


def test_what_cannot_be_listed_is_said(
    pair: tuple[Node, Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "LISTED_ROWS", 100)
    snapshot = write_many(tmp_path)
    for node, value in zip(pair, (1.0, 2.0), strict=True):
        node.store.load_snapshot(snapshot)
        node.store.apply_delta(change(tmp_path / "1.arrow", 1, list(range(-1000, 6000, 7)), value))
    table = whole.compare_whole({"a": pair[0].store, "b": pair[1].store}, "many").tables["item"]
    assert table.more
    assert 0 < len(table.differing) < 200


def test_nodes_are_compared_at_one_seq_while_deltas_come(pair: tuple[Node, Node], tmp_path: Path) -> None:
    over = threading.Event()
    paths = [write_change(tmp_path, seq, [seq % 400], float(seq)) for seq in range(6, 60)]

    def send() -> None:
        for path in paths:
            for node in pair:
                node.store.apply_delta(path)
            if over.wait(0.05):
                return

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with Client(pair[0].url) as first, Client(pair[1].url) as second:
            compared = whole.compare_whole({"a": first, "b": second}, "ctr")
    finally:
        over.set()
        sender.join()
    assert compared.problems == []
    assert compared.tables.keys() == {"item", "word"}


def test_a_node_that_stays_behind_is_named(pair: tuple[Node, Node], tmp_path: Path) -> None:
    pair[0].store.apply_delta(write_change(tmp_path, 6, [1], 1.0))
    with pytest.raises(Conflict, match=r"did not meet within 0\.1 s: 6 on a, 5 on b"):
        whole.compare_whole({"a": pair[0].store, "b": pair[1].store}, "ctr", wait_s=0.1)


def test_digests_are_read_at_the_seq_that_is_asked_for_alone(pair: tuple[Node, Node]) -> None:
    with Client(pair[0].url) as client:
        assert client.digests("ctr", seq=4)["tables"] is None
        answer = client.digests("ctr", seq=5, buckets=8)
        assert (answer["version"], answer["seq"], len(answer["tables"]["item"]["digests"])) == (1, 5, 8 * 16)
        listed = client.digests("ctr", buckets=8, listed={"item": [3]})["tables"]
        assert listed.keys() == {"item"}
        assert len(listed["item"]["keys"]) == listed["item"]["rows"] > 0
        with pytest.raises(InvalidInput, match="no table 'nothing'"):
            client.digests("ctr", listed={"nothing": [0]})
        with pytest.raises(NotFound):
            client.digests("nobody")


def test_a_digest_depends_on_every_bit_of_a_row_and_on_its_key() -> None:
    random = np.random.default_rng(1)
    row = random.integers(0, 256, (1, 11), np.uint8)
    seen = {int(row_digests(np.array([5]), row)[0])}
    for bit in range(88):
        changed = row.copy()
        changed[0, bit // 8] ^= 1 << bit % 8
        seen.add(int(row_digests(np.array([5]), changed)[0]))
    seen.add(int(row_digests(np.array([6]), row)[0]))
    seen.add(int(row_digests(np.array([5]), np.pad(row, ((0, 0), (0, 1))))[0]))
    assert len(seen) == 91
