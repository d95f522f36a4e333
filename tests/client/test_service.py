"""The client and a real service: large look-ups, versions, deltas (`test_odd_calls.py` has that calls are answered and refused as by a store)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.client.conftest import same
from tierstore.client import Client
from tierstore.engine.store import Store
from tierstore.errors import Conflict, InvalidInput, NotReady, SequenceGap
from tierstore.service.server import ServerThread

ITEMS, DIM = 2000, 8
WORDS = ["", "a", "ä", "many words"]
BIG = np.array([0, 2**63, 2**64 - 1], np.uint64)


def write_snapshot(root: Path, version: int) -> Path:
    where = root / f"ctr-{version}"
    values = np.random.default_rng(version)
    with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=5) as snapshot:
        snapshot.table("item", dim=DIM, default="mean").write(
            np.arange(ITEMS), values.normal(size=(ITEMS, DIM)).astype(np.float32)
        )
        snapshot.table("word", dim=3, key="string").write(WORDS, values.normal(size=(len(WORDS), 3)).astype(np.float32))
        snapshot.table("big", dim=2, key="uint64").write(BIG, values.normal(size=(len(BIG), 2)).astype(np.float32))
        snapshot.feature("item_id", table="item")
        snapshot.feature("clicked", table="item", combiner="mean", padding_key=0)
        snapshot.feature("query", table="word")
        snapshot.feature("big_id", table="big")
    return where


def delta(seq: int, keys: list[int]) -> bytes:
    stream = io.BytesIO()
    with tierstore.DeltaWriter(stream, model="ctr", seq=seq, event_time=datetime.now(UTC)) as writer:
        writer.upsert("item", np.array(keys), np.full((len(keys), DIM), seq, np.float32))
    return stream.getvalue()


def opened(root: Path) -> Store:
    settings: dict[str, Any] = {"host_budget": "4MiB", "load_workers": 1, "disk_threads": 2, "fold_grace_s": 0.0}
    return tierstore.open(root / "data", port=0, source_root=[root], **settings)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store, for tests that change it."""
    with opened(tmp_path) as store:
        yield store


@pytest.fixture
def client(store: Store) -> Iterator[Client]:
    with ServerThread(store) as server, Client(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def loaded_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with version 1, for tests that only ask."""
    root = tmp_path_factory.mktemp("loaded")
    with opened(root) as store:
        store.load_snapshot(write_snapshot(root, 1))
        yield store


@pytest.fixture(scope="module")
def loaded_url(loaded_store: Store) -> Iterator[str]:
    """A service over `loaded_store`."""
    with ServerThread(loaded_store) as server:
        yield server.url


@pytest.fixture(scope="module")
def loaded(loaded_url: str) -> Iterator[Client]:
    with Client(loaded_url) as client:
        yield client


def test_a_service_without_models_is_ready(client: Client) -> None:
    assert client.ready()
    assert client.models() == []
    assert not client.model("ctr").ready


def test_a_large_lookup_is_put_together_from_parts(loaded_url: str, loaded_store: Store) -> None:
    keys = np.random.default_rng(0).integers(0, ITEMS + 50, 1234)
    offsets = np.sort(np.append(0, np.random.default_rng(1).integers(0, 1234, 60)))
    model = loaded_store.model("ctr")
    with Client(loaded_url, split_keys=100) as client:
        rows, found = client.lookup("ctr", "item_id", keys, return_found=True)
        bags = client.lookup_bags("ctr", "clicked", keys, offsets)
    same(rows, model.lookup("item_id", keys))
    same(found, model.lookup("item_id", keys, return_found=True)[1])
    same(bags, model.lookup_bags("clicked", keys, offsets))


def test_an_answer_may_be_written_to(loaded: Client) -> None:
    rows = loaded.lookup("ctr", "item_id", [1, 2])
    rows += 1
    assert rows.flags.aligned
    assert rows.flags.c_contiguous


def test_metadata_names_features_as_the_protocol_does(loaded: Client) -> None:
    datatypes = {entry["name"]: entry["datatype"] for entry in loaded.model("ctr").metadata()["inputs"]}
    assert {name: datatypes[name] for name in ("item_id", "query", "big_id")} == {
        "item_id": "INT64",
        "query": "BYTES",
        "big_id": "UINT64",
    }


def test_versions_over_the_network(client: Client, store: Store, tmp_path: Path) -> None:
    seen = []
    assert client.load_snapshot(write_snapshot(tmp_path, 1), progress=seen.append) == 1
    assert seen
    assert client.load_snapshot(write_snapshot(tmp_path, 2), activate=False) == 2
    assert client.model("ctr").ready
    assert store.model("ctr").active_version == 1
    client.activate("ctr", 2)
    assert store.model("ctr").active_version == 2
    assert client.rollback("ctr", to_seq=5, expected_active=2) == 2
    with pytest.raises(Conflict, match="expected a seq from 5 to 5, got 6"):
        client.rollback("ctr", to_seq=6)
    assert client.rollback("ctr", expected_active=2) == 1
    with pytest.raises(Conflict, match="expected version 2 to be active, got 1"):
        client.rollback("ctr", expected_active=2)
    client.drop("ctr", 2)
    ours, theirs = client.status("ctr")["models"]["ctr"], store.status()["models"]["ctr"]
    assert (ours["active_version"], ours["versions"], ours["tables"].keys()) == (
        1,
        theirs["versions"],
        theirs["tables"].keys(),
    )
    assert client.status()["models"].keys() == {"ctr"}
    assert client.status().keys() >= store.status().keys()


def test_deltas_over_the_network_and_a_model_put_to_sleep(client: Client, store: Store, tmp_path: Path) -> None:
    store.load_snapshot(write_snapshot(tmp_path, 1))
    first = client.apply_delta(delta(6, [1]))
    assert (first.model, first.seq, first.applied) == ("ctr", 6, True)
    assert client.lookup("ctr", "item_id", [1]).tolist() == [[6.0] * DIM]
    (tmp_path / "7.arrow").write_bytes(delta(7, [2]))
    assert client.apply_delta(tmp_path / "7.arrow").applied
    assert not client.apply_delta(str(tmp_path / "7.arrow"), model="ctr").applied
    with pytest.raises(SequenceGap, match="8") as gap:
        client.apply_delta(delta(9, [1]))
    assert gap.value.expected_seq == 8
    with pytest.raises(Conflict, match="other content"):
        client.apply_delta(delta(7, [3]))
    with pytest.raises(InvalidInput):
        client.apply_delta(b"nothing of the kind")
    with pytest.raises(InvalidInput):
        client.apply_delta(delta(8, [1])[:-20])
    with pytest.raises(InvalidInput):
        client.apply_delta(delta(8, [1]), model="other")

    store.deactivate("ctr")
    assert not client.model("ctr").ready
    with pytest.raises(NotReady, match="no active version"):
        client.lookup("ctr", "item_id", [1])
