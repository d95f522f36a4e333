"""What the status page says of traffic: versions beside each other, one time for all figures, and plots that can be read."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.admin.browser import Page
from tests.service.admin.test_page import fits, hour, open_with, serving, tab, with_browser
from tierstore.service.history import STEP_S
from tierstore.service.server import ServerThread

__all__ = ["tab"]  # a fixture


def trial() -> dict[str, Any]:
    """An hour of version 3, with version 4 as a canary for half of it."""
    document, count = hour(), 240
    began_s = document["steps"]["at_s"][count // 2] + 1.0
    half = [None] * (count // 2)

    def of(version: int, state: str, share: float, requests: int, failed: int, p99_s: float) -> dict[str, Any]:
        each = {"requests": requests, "failed": failed, "p50_s": p99_s / 4, "p99_s": p99_s}
        columns = {name: half + [each[name]] * (count - len(half)) for name in ("requests", "failed", "p99_s")}
        whole = each | {"seconds": 1800, "requests": 120 * requests, "failed": 120 * failed}
        minute = each | {"seconds": 60, "requests": 4 * requests, "failed": 4 * failed}
        since_s = began_s if state == "canary" else time.time() - 7200
        return {"version": version, "state": state, "share": share, "since_s": since_s, "steps": columns, "minute": minute, **whole}  # fmt: skip

    versions = [of(4, "canary", 0.05, 75, 3, 0.02), of(3, "active", 0.95, 1425, 0, 0.002)]
    return document | {"versions": versions, "versions_since_s": began_s}


@with_browser
@pytest.mark.thorough
@pytest.mark.parametrize(("width", "dark"), [(390, True), (500, False), (1280, False)])
def test_a_canary_stands_beside_the_version_that_serves(
    server: ServerThread, http: httpx.Client, tab: Callable[[], Page], width: int, dark: bool
) -> None:
    page = tab()
    page.size(width, dark=dark)
    open_with(page, server, http.get("/admin/models").json(), history=trial())
    page.wait_text("when the canary began")
    fits(page, width)
    rows = page.evaluate(
        "[...document.querySelector('#models section').querySelectorAll('table')][0].innerText.split(/\\s+/).join(' ')"
    )
    for words in (
        "4 canary",
        "5 %",
        "9,000",
        "360 (4.0 %)",
        "20 ms",
        "3 active",
        "95 %",
        "171,000",
        "2.0 ms",
        "2 h ago",
    ):
        assert words in rows, rows
    charts = page.text(".charts")
    for words in ("canary 4 5.0", "canary 4 0.20", "p99 of canary 4 20 ms"):
        assert words in charts, charts
    assert page.errors == []


@with_browser
@pytest.mark.thorough
def test_a_peak_is_cut_and_said_and_each_plot_has_axes(
    server: ServerThread, http: httpx.Client, tab: Callable[[], Page]
) -> None:
    document = hour()
    document["steps"]["p99_s"][200] = 2.4
    page = tab()
    page.size(1280)
    open_with(page, server, http.get("/admin/models").json(), history=document)
    page.wait("document.querySelector('.hour')")
    at = time.strftime("%H:%M", time.localtime(document["steps"]["at_s"][200]))
    latency = page.text("[data-key=latency]")
    assert "cut at 8.3 ms: up to 2.4 s at" in latency, latency
    assert at[-2:] in latency
    assert page.evaluate("document.querySelector('[data-key=latency]').querySelectorAll('path.cut').length") == 1
    scales = page.evaluate("[...document.querySelectorAll('.plot .scale')].slice(0, 5).map(one => one.innerText)")
    assert scales == ["100\n0", "8.3 ms\n0", "3.0\n0", "100.0 %\n80.0 %", "1\n0"]
    times = page.evaluate("[...document.querySelectorAll('.plot .axis')].map(one => one.children.length)")
    assert set(times) == {3}
    assert "deltas" in page.text("[data-key=timeline] .legend")
    assert page.errors == []


@with_browser
@pytest.mark.thorough
def test_cards_charts_and_sums_are_of_one_time_and_leave_the_page_itself_out(
    tmp_path: Path, tab: Callable[[], Page]
) -> None:
    with serving(tmp_path) as (_, server):
        history = server.service.history
        body = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [1], "data": [1]}]}
        at_s = (time.time() // STEP_S + 2) * STEP_S
        history.time_passed(at_s)
        with httpx.Client(base_url=server.url) as http:
            for step in range(1, 5):
                for _ in range(30):
                    assert http.post("/v2/models/ctr/infer", json=body).status_code == 200
                    http.get("/admin/models")
                history.time_passed(at_s + STEP_S * step)
            page = tab()
            page.size(1280)
            page.open(server.url + "/")
            page.wait_text("the last minute: 120 requests")
            assert "requests a second\n2.0\nno errors" in page.text("#headline")
            assert page.text("[data-key='requests a second'] .legend").split()[-1] == "2.0"
            polls = "performance.getEntriesByType('resource').filter(one => one.name.endsWith('/admin/models')).length"
            page.wait(f"{polls} >= 2")
            for step in range(5, 9):
                history.time_passed(at_s + STEP_S * step)
            page.wait_text("the last minute: 0 requests")
            assert "requests a second\n0\nno errors" in page.text("#headline")
            assert page.text("[data-key='requests a second'] .legend").split()[-1] == "0"
        assert page.errors == []


@with_browser
@pytest.mark.thorough
def test_process_memory_and_rows_in_memory_are_told_apart(
    server: ServerThread, http: httpx.Client, tab: Callable[[], Page]
) -> None:
    document = http.get("/admin/models").json()
    document["models"] = [model for model in document["models"] if model["model"] == "ctr"]
    item, user = document["models"][0]["tables"]["item"], document["models"][0]["tables"]["user"]
    item["host"] |= {"rows": 40, "capacity_rows": item["rows"]}
    user["host"] |= {"rows": 1, "capacity_rows": 1}
    process = {"processors": 8, "resident_bytes": 3 << 30, "memory_bytes": 16 << 30}
    minute = document["service"]["last_minute"] | {"seconds": 60, "cpu_s": 90.0}
    document["service"] |= {"process": process, "last_minute": minute}
    page = tab()
    page.size(1280)
    page.answer_with(lambda url: document if url.endswith("/admin/models") else None)
    page.open(server.url + "/")
    page.wait_text("room for every row")
    assert "room for 1 row" in page.text("#models")
    for words in ("processor\n1.50 cores\nof 8", "process memory\n3.0 GiB\nof 16.0 GiB", "background work\nnone"):
        assert words in page.text("#tiles")
    assert page.errors == []


@with_browser
@pytest.mark.thorough
def test_what_a_phone_shows_first(tmp_path: Path, tab: Callable[[], Page]) -> None:
    """Its head is one line; what is not known yet is not 0, and an axis without height has one number."""
    with serving(tmp_path) as (_, server):
        page = tab()
        page.size(390)
        page.open(server.url + "/")
        page.wait("document.querySelector('.hour')")
        bottom_of = "['h1', 'a[href=\"/docs\"]', 'a[href=\"/metrics\"]'].map(it => document.querySelector(it).getBoundingClientRect().bottom)"
        bottoms = page.evaluate(
            f"(() => {{document.querySelector('#version').textContent = '0.2.0 · up 59 min'; return {bottom_of}}})()"
        )
        assert max(bottoms) - min(bottoms) < 10, bottoms
        scale = "[...document.querySelectorAll(\"[data-key='errors a second'] .scale span\")].map(it => it.innerText)"
        assert page.evaluate(scale) == ["", "0"]
        unknown = "({lookup_keys: {host: 5}, rows: 1, rows_exact: true, dim: 1, dtype: 'float32', host: {}, tier_bytes: {host: 1, disk: 1}})"
        assert "– keys/s" in page.evaluate(f"tablesOf({{model: 'm', tables: {{t: {unknown}}}}}, {{}}).innerText")
