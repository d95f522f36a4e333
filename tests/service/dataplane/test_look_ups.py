"""Look-ups that Python answers: what they count and hold, and that a request means what its version says."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import tierstore
from tests.service.conftest import eventually, load
from tests.service.fake_store import FakeStore
from tests.service.scenes import rows, write_snapshot
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

Own = tuple[Store, ServerThread, httpx.Client]
HEADER_LENGTH = "Inference-Header-Content-Length"


def infer(
    http: httpx.Client, keys: dict[str, np.ndarray], *, model: str = "ctr", tail: bytes | None = None, **more: Any
) -> httpx.Response:
    """A binary request for `keys` by feature, and a binary answer."""
    inputs = [
        {
            "name": name,
            "datatype": "INT64",
            "shape": list(array.shape),
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in keys.items()
    ]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}} | more).encode()
    data = b"".join(array.tobytes() for array in keys.values()) if tail is None else tail
    return http.post(f"/v2/models/{model}/infer", content=header + data, headers={HEADER_LENGTH: str(len(header))})


def vectors(response: httpx.Response) -> list[np.ndarray]:
    """Every FP32 output of a binary answer."""
    assert response.status_code == 200, response.text
    length = int(response.headers[HEADER_LENGTH])
    outputs, at, arrays = json.loads(response.content[:length])["outputs"], length, []
    for output in outputs:
        size = output["parameters"]["binary_data_size"]
        arrays.append(np.frombuffer(response.content[at : at + size], np.float32).reshape(output["shape"]))
        at += size
    assert at == len(response.content)
    return arrays


def answered(http: httpx.Client, table: str = "item") -> dict[str, int]:
    return dict(http.get("/admin/models/ctr").json()["tables"][table]["lookup_keys"])


def readers(store: Store) -> int:
    view = store.model("ctr").publisher.current
    assert view is not None
    return view.readers


ONE_ITEM = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [1], "data": [1]}]}


def test_keys_are_counted_once_in_the_tier_that_has_answered(own: Own, tmp_path: Path) -> None:
    store, server, http = own
    server.service.plans = None  # reactors learn nothing, and so leave all look-ups to Python
    load(http, write_snapshot(tmp_path, 1))
    resident, cold = np.array([1, 2, 3], np.int64), np.array([50, 51], np.int64)
    for _ in range(10):
        vectors(infer(http, {"item_id": resident}))
    before = answered(http)
    got = vectors(infer(http, {"item_id": resident, "clicked": cold}))
    np.testing.assert_array_equal(got[0], rows("item", [1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(got[1], rows("item", [50.0, 51.0]))
    after = answered(http)
    assert {tier: after[tier] - before[tier] for tier in after if after[tier] != before[tier]} == {"host": 3, "disk": 2}
    assert readers(store) == 0


def test_no_request_keeps_its_view(own: Own, tmp_path: Path) -> None:
    store, _, http = own
    load(http, write_snapshot(tmp_path, 1))
    keys = np.array([1, 2], np.int64)
    offsets = np.array([0, 9], np.int64)
    for tensors in ({"item_id": keys}, {"nothing": keys}, {"clicked": keys, "clicked.offsets": offsets}):
        for _ in range(3):
            infer(http, tensors)
    infer(http, {"item_id": np.ones(200_000, np.int64)})
    infer(http, {"item_id": keys}, tail=b"")
    assert readers(store) == 0


def test_the_loop_goes_on_while_a_look_up_waits(fake: tuple[FakeStore, ServerThread]) -> None:
    store, server = fake
    gate = store.model("ctr").gate
    gate.clear()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        waiting = threading.Thread(
            target=lambda: httpx.post(f"{server.url}/v2/models/ctr/infer", json=ONE_ITEM, timeout=60)
        )
        waiting.start()
        eventually(lambda: server.service.lookup_pool.busy, "a look-up at work")
        assert http.get("/v2/health/live").status_code == 200
        gate.set()
        waiting.join()


def test_the_same_request_means_what_the_version_says(own: Own, tmp_path: Path) -> None:
    store, _, http = own
    for version, dim in ((1, 4), (2, 8)):
        where = tmp_path / f"s{version}"
        with tierstore.SnapshotWriter(where, model="ctr", version=version) as writer:
            writer.table("item", dim=dim).write(np.arange(10), np.full((10, dim), version, np.float32))
            writer.feature("item_id", table="item")
        store.load_snapshot(where)
    for version, dim in ((2, 8), (1, 4), (2, 8)):
        store.activate("ctr", version)
        for key in (3, 4):
            (got,) = vectors(infer(http, {"item_id": np.array([key])}))
            np.testing.assert_array_equal(got, np.full((1, dim), version, np.float32))
    where = tmp_path / "s3"
    with tierstore.SnapshotWriter(where, model="ctr", version=3) as writer:
        writer.table("item", dim=4).write(np.arange(10), np.zeros((10, 4), np.float32))
        writer.feature("other", table="item")
    store.load_snapshot(where)
    assert "unknown input" in infer(http, {"item_id": np.array([3])}).json()["error"]
