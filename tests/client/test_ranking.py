"""`predict` through both clients against a real service with a dense part: the scores that the store itself gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.client.conftest import Make
from tests.predict.onnx_models import FLOAT, build, linear, node  # skips where the extra `dense` is not installed
from tierstore.engine.store import Store
from tierstore.errors import InvalidInput, NotFound
from tierstore.service.server import ServerThread

ITEMS, DIM = 300, 4
SMALL: dict[str, Any] = {"host_budget": "4MiB", "load_workers": 1, "disk_threads": 2}


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, ServerThread]]:
    root = tmp_path_factory.mktemp("ranked")
    source, draw = root / "snapshot", np.random.default_rng(0)
    with tierstore.SnapshotWriter(source, model="ctr", version=1) as snapshot:
        table = snapshot.table("item", dim=DIM)
        table.write(np.arange(ITEMS), draw.normal(size=(ITEMS, DIM)).astype(np.float32))
        snapshot.feature("item_id", table="item")
        snapshot.feature("clicked", table="item", combiner="mean")
        weights = {name: draw.normal(size=DIM) for name in ("item_id", "clicked")} | {"hour": [0.5]}
        snapshot.dense(linear(weights))
    with tierstore.open(root / "data", port=0, source_root=[root], **SMALL) as store:
        store.load_snapshot(source)
        with ServerThread(store) as server:
            yield store, server


def request(n: int) -> dict[str, Any]:
    draw = np.random.default_rng(n)
    offsets = np.sort(np.append(0, draw.integers(0, 4 * n, n - 1)))
    clicked = (draw.integers(0, ITEMS, 4 * n), offsets, draw.random(4 * n).astype(np.float32))
    return {"item_id": draw.integers(0, ITEMS + 5, n), "clicked": clicked, "hour": draw.random((n, 1))}


@pytest.mark.parametrize("split_items", [None, 350, 64])
def test_scores_are_those_of_the_store(make: Make, ranked: tuple[Store, ServerThread], split_items: int | None) -> None:
    store, server = ranked
    client = make(server.url, split_items=split_items)
    inputs = request(700)
    expected = store.model("ctr").predict(inputs)
    scores = client.predict("ctr", inputs)
    assert scores.shape == expected.shape
    assert scores.dtype == expected.dtype
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)
    named = client.predict("ctr", inputs, outputs=["score"])
    np.testing.assert_array_equal(named["score"], scores)


def test_lists_and_other_datatypes_become_what_the_model_declares(
    make: Make, ranked: tuple[Store, ServerThread]
) -> None:
    store, server = ranked
    inputs = {"item_id": [1, 2], "clicked": ([3, 4], [0, 1]), "hour": [[1], [2]]}
    np.testing.assert_allclose(make(server.url).predict("ctr", inputs), store.model("ctr").predict(inputs), rtol=1e-5)


def test_what_does_not_fit_the_dense_part_is_refused(make: Make, ranked: tuple[Store, ServerThread]) -> None:
    client = make(ranked[1].url, split_items=10)
    with pytest.raises(InvalidInput):
        client.predict("ctr", {"item_id": np.arange(30), "nonsense": np.zeros(30, np.float32)})
    with pytest.raises(InvalidInput):
        client.predict("ctr", request(30), outputs=["nonsense"])
    with pytest.raises(NotFound):
        client.predict("nobody", request(30))


def test_one_users_history_goes_with_all_items(make: Make, tmp_path: Path) -> None:
    graph = build(
        [node("MatMul", "item_id w", "a"), node("MatMul", "clicked w", "b"), node("Add", "a b", "score")],
        {"item_id": (FLOAT, ["batch", DIM]), "clicked": (FLOAT, [1, DIM])},
        {"score": (FLOAT, ["batch", 1])},
        {"w": np.arange(DIM, dtype=np.float32).reshape(DIM, 1)},
    )
    source = tmp_path / "snapshot"
    with tierstore.SnapshotWriter(source, model="ctr", version=1) as snapshot:
        snapshot.table("item", dim=DIM).write(np.arange(ITEMS), np.ones((ITEMS, DIM), np.float32))
        snapshot.feature("item_id", table="item")
        snapshot.feature("clicked", table="item", combiner="sum")
        snapshot.dense(graph)
    with tierstore.open(tmp_path / "data", port=0, source_root=[tmp_path], **SMALL) as store:
        store.load_snapshot(source)
        inputs = {"item_id": np.arange(200) * 2, "clicked": ([1, 2, 3], [0])}
        expected = store.model("ctr").predict(inputs)
        with ServerThread(store) as server:
            for split_items in (None, 60):
                scores = make(server.url, split_items=split_items).predict("ctr", inputs)
                np.testing.assert_allclose(scores, expected, rtol=1e-5)
