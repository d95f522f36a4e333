"""What the service says of its caches: the admin route, the metrics, and who may ask."""

from __future__ import annotations

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tests.service.conftest import load
from tests.service.scenes import write_snapshot
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread


def test_hit_rates_and_hottest_keys_over_http(own: tuple[Store, ServerThread, httpx.Client]) -> None:
    store, _, http = own
    store.shared.sampler.close()
    load(http, write_snapshot(store.root.root.parent))
    keys = np.concatenate([np.arange(1, 200), np.full(200, 7)])
    body = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [len(keys)], "data": keys.tolist()}]}
    for turn in range(200):
        store.shared.sampler.step(turn)
        assert http.post("/v2/models/ctr/infer", json=body).status_code == 200
    store.shared.sampler.step(200.0)
    report = http.get("/admin/models/ctr/tables/item/cache", params={"limit": 2}).json()
    assert report["hottest"][0]["key"] == 7
    assert len(report["hottest"]) == 2
    assert [point["scale"] for point in report["curve"]] == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert sum(minute["keys"] for minute in report["history"]) > 0
    assert http.get("/admin/models/ctr").json()["tables"]["item"]["cache"]["curve"] == report["curve"]

    families = {family.name: family.samples for family in text_string_to_metric_families(http.get("/metrics").text)}
    at = {
        sample.labels["memory"]: sample.value
        for sample in families["tierstore_cache_hit_rate_at"]
        if sample.labels["table"] == "item"
    }
    known = {f"{point['scale']:g}": point["hit_rate"] for point in report["curve"] if point["hit_rate"] is not None}
    assert at == known
    assert list(known) == ["0.25", "0.5", "1", "2", "4"]
    parts = {sample.labels["part"]: sample.value for sample in families["tierstore_memory_bytes"]}
    assert parts["cache_samples"] >= report["bytes"] > 0


def test_what_the_route_refuses(http: httpx.Client) -> None:
    for path, status in (
        ("/admin/models/ctr/tables/nothing/cache", 404),
        ("/admin/models/nobody/tables/item/cache", 404),
        ("/admin/models/ctr/tables/item/cache?limit=0", 400),
        ("/admin/models/ctr/tables/item/cache?limit=1001", 400),
    ):
        assert http.get(path).status_code == status, path
