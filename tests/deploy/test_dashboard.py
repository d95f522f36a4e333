"""The dashboard of Grafana: its queries are run by a real Prometheus that scrapes a service at work, and no panel stays empty."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

import tierstore
from tests.predict import onnx_models as om
from tests.service.conftest import load, settings_for
from tests.service.reactor.prediction_scenes import thread_held, waiting
from tests.service.reactor.test_traffic import Served
from tests.service.scenes import delta, write_snapshot
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread
from tools import make_dashboard

from .test_alerts import prometheus, scraped_again

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads(make_dashboard.FILE.read_text(encoding="utf-8"))
TOP = DASHBOARD["panels"]
PANELS = [panel for one in TOP for panel in [one, *one.get("panels", [])] if panel["type"] != "row"]
COLLAPSED = {panel["title"] for row in TOP if row.get("collapsed") for panel in row["panels"]}

# What the service of the test lacks, as most do. Such a panel is in a row that is folded away.
LACKS = {
    **{
        f"Kafka: {what}": "no broker"
        for what in (
            "messages behind",
            "time behind",
            "state",
            "applied a second",
            "parked, held up, failed tries",
        )
    },
    "Freshness of rows from Kafka": "no broker",
    "Used and budget": "no rows on other machines, which alone are cached on SSD",
    "Answered by the SSD": "the same",
    "On": "the same",
    "Offers that wait": "no GPU",
    "Workspaces": "no GPU",
    "Until credentials end": "neither a certificate nor a token that ends",
}
# Queries of panels with others, which have an answer at times alone.
SOMETIMES = {"p99 of look-ups, and in quiet A": "it is measured while background work is done for some seconds"}


def queries(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def test_the_file_is_what_the_program_makes() -> None:
    assert make_dashboard.dashboard() == DASHBOARD, "python -m tools.make_dashboard"


def test_it_asks_for_metrics_that_the_reference_has() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    there = set(re.findall(r"^\| `(tierstore_\w+)`", page, flags=re.MULTILINE))
    asked = [query for panel in PANELS for query in queries(panel)]
    asked += [one["query"]["query"] for one in DASHBOARD["templating"]["list"]]
    asked += [one["expr"] for one in DASHBOARD["annotations"]["list"]]
    wanted = {name for query in asked for name in re.findall(r"tierstore_\w+", query)}
    assert {
        name for name in wanted if name not in there and re.sub(r"_(bucket|count|sum)$", "", name) not in there
    } == set()
    assert len(wanted) > 50


def test_panels_lie_beside_each_other_and_ask_the_source_that_is_provisioned() -> None:
    assert len({one["id"] for one in [*TOP, *PANELS]}) == len(TOP) + len(PANELS) - len(
        [one for one in TOP if one in PANELS]
    )
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    for a, b in itertools.combinations([one["gridPos"] for one in TOP], 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)
        assert a["x"] + a["w"] <= 24
    sources = yaml.safe_load((ROOT / "deploy/grafana/datasources.yml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in PANELS} == {one["uid"] for one in sources}


def test_what_a_demo_lacks_is_folded_away() -> None:
    assert LACKS.keys() <= COLLAPSED


# --- with a real Prometheus


def at_work(root: Path, served: Served, prometheus_url: str) -> None:
    """As in the demo, and more: a canary, a dense part, deltas, a switch, a load, requests of every kind, and of one that fails.

    A tenth of it is between two scrapes at most, so a machine that is quick has rates too.
    """
    store, url = served.store, served.server.url
    keys = np.concatenate([np.arange(1, 200), np.full(200, 7)])
    body = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [3], "data": [1, 2, 3]}]}
    with tierstore.Client(url) as client, httpx.Client(base_url=url) as http, ThreadPoolExecutor(4) as at_once:
        for turn in range(300):
            for version in (None, "canary"):
                client.lookup("ctr", "item_id", keys, version=version)
            for _ in range(5):
                client.lookup("ctr", "item_id", keys[turn % 200 :])
            list(at_once.map(lambda n: client.predict("ctr", {"item_id": np.arange(n)}), (1, 2, 3, 4)))
            if turn % 10 == 0:  # some that wait together; beside a canary, an id as the client's leaves them to Python
                with thread_held(served):
                    together = [at_once.submit(http.post, "/v2/models/ctr/infer", json=body) for _ in range(4)]
                    waiting(served, len(together))
                assert [one.result().status_code for one in together] == [200] * 4
            http.post("/v2/models/ctr/infer", json=body, headers={"X-Unheard-Of": "1", "X-Request-Timeout-Ms": "10000"})
            if turn % 30 == 0:
                scraped_again(prometheus_url)
                store.apply_delta(delta(turn // 30 + 1, {1: float(turn)}))
            if turn == 50:
                load(http, write_snapshot(root, 3), activate=False)
            store.shared.sampler.step(time.time() + turn)


def series(url: str, query: str) -> list[float]:
    """The finite values that Prometheus has for a query of the dashboard at this moment; fails for one that it refuses."""
    for name, value in (("$instance", ".*"), ("$model", ".*"), ("$__rate_interval", "1m")):
        query = query.replace(name, value)
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    values = [float(one["value"][1]) for one in answer["data"]["result"]]
    return [value for value in values if math.isfinite(value)]


@pytest.mark.thorough
def test_no_panel_is_empty_where_a_service_is_at_work(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed: no predictions")
    for folder in ("deltas", "watched"):
        (tmp_path / folder).mkdir()
    settings = settings_for(
        tmp_path,
        watch=tmp_path / "deltas",
        watch_snapshots=[tmp_path / "watched"],
        lookup_threads=1,
        batch_max_items=64,
        keep_versions=3,
    )
    graph = om.linear({"item_id": [1.0, 0.0, 0.0, 0.0]})
    with Store(settings) as store, ServerThread(store) as server:
        store.shared.sampler.close()
        for version in (1, 2):
            store.load_snapshot(write_snapshot(tmp_path, version, dense=graph))
        store.canary("ctr", 1, 0.2)
        with prometheus(tmp_path, {"node-a": server.url.removeprefix("http://")}) as url:
            at_work(tmp_path, Served(store, server), url)
            scraped_again(url)
            found = {panel["title"]: [series(url, query) for query in queries(panel)] for panel in PANELS}
            switched = series(url, DASHBOARD["annotations"]["list"][0]["expr"].replace("> 0", ">= 0"))
    empty = {title for title, answers in found.items() if not any(answers)}
    assert empty == LACKS.keys(), {
        title: queries(panel) for panel in PANELS if (title := panel["title"]) in empty ^ LACKS.keys()
    }
    silent = {
        f"{title} {chr(ord('A') + i)}"
        for title, answers in found.items()
        if title not in LACKS
        for i, one in enumerate(answers)
        if not one
    }
    assert silent <= SOMETIMES.keys()
    assert switched
    assert found["Answered from memory"][0][0] > 0.9, "though half of the keys are absent"
