"""The client and a real service: the same answers and the same errors as the store itself gives."""

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
from tierstore.errors import Conflict, InvalidInput, NotFound, NotReady, SequenceGap, SnapshotError
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


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("feature", "keys"),
    [
        ("item_id", [0, 5, ITEMS, 5, -1]),
        ("item_id", []),
        ("item_id", np.array([])),
        ("item_id", np.array([], str)),
        ("query", []),
        ("query", np.array([])),
        ("query", np.array([], np.int64)),
        ("big_id", []),
        ("item_id", np.arange(ITEMS, dtype=np.int32)),
        ("item_id", np.array([1, 2], object)),
        ("item_id", [1, np.int64(2), np.uint8(3)]),
        ("query", np.array(["a", "ä", "absent"], object)),
        ("item_id", np.array([1, 2], np.uint64)),
        ("query", [*WORDS, "absent"]),
        ("query", np.array(WORDS)),
        ("big_id", BIG),
        ("big_id", BIG.tolist()),
        ("big_id", [0, 7]),
    ],
)
def test_rows_and_found_are_those_of_the_store(
    loaded: Client, loaded_store: Store, feature: str, keys: Any, dtype: str
) -> None:
    ours, theirs = loaded.model("ctr"), loaded_store.model("ctr")
    same(ours.lookup(feature, keys, dtype=dtype), theirs.lookup(feature, keys, dtype=dtype))
    for left, right in zip(
        ours.lookup(feature, keys, dtype=dtype, return_found=True),
        theirs.lookup(feature, keys, dtype=dtype, return_found=True),
        strict=True,
    ):
        same(left, right)


def test_bags_are_those_of_the_store(loaded: Client, loaded_store: Store) -> None:
    """Padding, absent keys and weights below 0 among them."""
    ours, theirs = loaded.model("ctr"), loaded_store.model("ctr")
    keys, offsets = [1, 0, 3, 99999], [0, 2, 2, 3]
    for feature, combiner in (("clicked", None), ("clicked", "sum"), ("item_id", "sqrtn")):
        for weights in (None, [0.5, 1.0, -1.0, 2.0]):
            for dtype in ("float32", "float16"):
                how: Any = {"weights": weights, "dtype": dtype, "combiner": combiner, "return_found": True}
                left, right = (one.lookup_bags(feature, keys, offsets, **how) for one in (ours, theirs))
                same(left[0], right[0])
                same(left[1], right[1])


def test_an_unknown_combiner(loaded: Client) -> None:
    with pytest.raises(InvalidInput, match="sum, mean or sqrtn"):
        loaded.lookup_bags("ctr", "clicked", [1], [0], combiner="max")
    with pytest.raises(InvalidInput, match="no combiner"):
        loaded.lookup_bags("ctr", "item_id", [1], [0])


def test_rows_of_a_pooled_feature_are_not_pooled_by_lookup(loaded: Client, loaded_store: Store) -> None:
    keys = [3, 0, 1]
    same(loaded.lookup("ctr", "clicked", keys), loaded_store.model("ctr").lookup("clicked", keys))


def test_bags_without_any_key_are_those_of_the_store(loaded: Client, loaded_store: Store) -> None:
    ours, theirs = loaded.model("ctr"), loaded_store.model("ctr")
    for feature in ("query", "item_id"):
        arguments: Any = (feature, [], [0, 0, 0])
        same(ours.lookup_bags(*arguments, combiner="sum"), theirs.lookup_bags(*arguments, combiner="sum"))
    batch = {"item_id": [1], "query": [], "big_id": np.array([])}
    left, right = loaded.lookup_many("ctr", batch), theirs.lookup_many(batch)
    for feature in batch:
        same(left[feature], right[feature])
    same(loaded.predict("ctr", {"query": []}), right["query"])


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


def test_refusals_are_those_of_the_store(loaded: Client, loaded_store: Store) -> None:
    ctr = loaded.model("ctr")
    with pytest.raises(NotFound, match="nobody"):
        loaded.lookup("nobody", "item_id", [1])
    with pytest.raises(NotFound, match="no feature 'nothing'; version 1 has big_id, clicked, item_id, query"):
        ctr.lookup("nothing", [1])
    with pytest.raises(InvalidInput, match="BYTES"):
        ctr.lookup("query", [1])
    with pytest.raises(InvalidInput, match="float64"):
        ctr.lookup("item_id", [1], dtype="float64")
    with pytest.raises(InvalidInput, match="combiner"):
        ctr.lookup_bags("item_id", [1], [0])
    with pytest.raises(InvalidInput):
        ctr.lookup("big_id", [-1])
    with pytest.raises(NotFound, match="version 9"):
        loaded.activate("ctr", 9)
    with pytest.raises(Conflict, match="active"):
        loaded.drop("ctr", 1)
    with pytest.raises(Conflict):
        loaded.rollback("ctr")
    with pytest.raises(NotFound):
        loaded.status("nobody")
    with pytest.raises(InvalidInput, match="source"):
        loaded.load_snapshot("/nowhere", model="ctr")
    with pytest.raises(SnapshotError):
        loaded.load_snapshot(write_snapshot(loaded_store.root.root.parent, 3), model="other")
    with pytest.raises(InvalidInput, match="model="):
        loaded.load_snapshot("nothing")


def test_a_version_is_named_by_number_or_by_label(client: Client, store: Store, tmp_path: Path) -> None:
    for version in (1, 2):
        store.load_snapshot(write_snapshot(tmp_path, version), activate=version == 1)
    with store.model("ctr").view(1) as view:
        expected = view.lookup("item_id", np.arange(9))
    for version in (None, 1, "1", "stable"):
        same(client.lookup("ctr", "item_id", np.arange(9), version=version), expected)
    for version in (7, "nowhere"):
        with pytest.raises(NotFound):
            client.lookup("ctr", "item_id", [1], version=version)
