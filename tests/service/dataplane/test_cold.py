"""Rows that memory lacks, over every protocol: right, whether deltas changed them or not, and read without Python where compiled threads may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.service.callers import Caller, over_all
from tests.service.conftest import GRPC, eventually, settings_for
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

ROWS, DIM = 120_000, 8  # the host tier has room for a third of them
CHANGED = np.arange(500, 600)
RNG = np.random.default_rng(1)  # other keys for each caller, which are not in memory yet


def rows_of(keys: np.ndarray, shift: float = 0.0) -> np.ndarray:
    vectors = (keys[:, None] * 8 + np.arange(DIM) + shift).astype(np.float32)
    vectors[(keys < 0) | (keys >= ROWS)] = 0.25
    return vectors


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    root, keys = tmp_path_factory.mktemp("cold"), np.arange(ROWS)
    with tierstore.SnapshotWriter(root / "s", model="ctr", version=1) as writer:
        writer.table("item", dim=DIM, default=[0.25] * DIM).write(keys, rows_of(keys))
        writer.feature("item_id", table="item")
        writer.feature("bag", table="item", combiner="sum")
        writer.feature("hashed", table="item", hash={"mod": ROWS})
    with Store(settings_for(root, host_budget="4MiB", grpc_port=GRPC)) as store, ServerThread(store) as server:
        store.load_snapshot(root / "s")
        eventually(lambda: server.service.reactors_state == "running", "the reactors")
        yield server


def from_disk(server: ServerThread) -> int:
    return int(server.service.store.status()["models"]["ctr"]["tables"]["item"]["lookup_keys"]["disk"])


@over_all()
def test_rows_bags_and_hashed_keys_from_disk(caller: Caller) -> None:
    reactors, disk = caller.server.service.reactors, from_disk(caller.server)
    for size in (1, 2, 64, 700, 1500):
        if size == 2:  # all is learned
            answers = reactors.answers
        keys = RNG.integers(1000, ROWS + 100, size)
        answer = caller.ask("ctr", {"item_id": keys}, ["item_id", "item_id.found"])
        np.testing.assert_array_equal(answer["item_id"], rows_of(keys))
        assert answer["item_id.found"].tolist() == (keys < ROWS).tolist()
        far = keys + ROWS * RNG.integers(-5, 6, size)
        (rows,) = caller.ask("ctr", {"hashed": far}, ["hashed"]).values()
        known = ~np.isin(far % ROWS, CHANGED)
        np.testing.assert_array_equal(rows[known], rows_of(far % ROWS)[known])
        starts = np.array([0, size // 2])
        (sums,) = caller.ask("ctr", {"bag": keys, "bag.offsets": starts}, ["bag"]).values()
        expected = np.stack([part.sum(0) for part in np.split(rows_of(keys).astype(np.float64), starts[1:])])
        np.testing.assert_allclose(sums, expected, rtol=1e-5)
    assert from_disk(caller.server) - disk > 1000
    assert not caller.compiled or reactors.answers - answers >= 9
    eventually(lambda: caller.server.service.inflight.used_bytes == 0, "nothing is held")


@over_all()
def test_rows_that_deltas_changed_are_read_as_unchanged_ones_are(caller: Caller, tmp_path: Path) -> None:
    server = caller.server
    model = server.service.store.model("ctr")
    seq, left = model.publisher.served.active.seq + 1, server.service.reactors.handed_on["rows_on_disk"]
    with tierstore.DeltaWriter(tmp_path / "delta", model="ctr", seq=seq) as writer:
        writer.upsert("item", CHANGED, rows_of(CHANGED, seq / 8))
    server.service.store.apply_delta((tmp_path / "delta").read_bytes())
    for _ in range(2):  # laid over the table, then in RocksDB
        for _ in range(5):  # keys that are in memory afterwards do not ask the disk
            keys = RNG.integers(1000, ROWS, 60)
            keys[:3] = RNG.choice(CHANGED, 3)
            expected = np.concatenate([rows_of(keys[:3], seq / 8), rows_of(keys[3:])])
            (rows,) = caller.ask("ctr", {"item_id": keys}, ["item_id"]).values()
            np.testing.assert_array_equal(rows, expected)
        eventually(lambda: not model.publisher.served.active.overlays, "it is folded")
    assert server.service.reactors.handed_on["rows_on_disk"] == left
