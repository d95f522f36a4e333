"""Exports over HTTP: jobs of their own, below `export_root` alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.service.conftest import eventually, settings_for
from tierstore.engine.store import Store
from tierstore.errors import Conflict, InvalidInput
from tierstore.service.admin.allowed_places import resolve_target
from tierstore.service.limits.jobs import Jobs
from tierstore.service.server import ServerThread
from tierstore.types import ExportReport


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[Store, ServerThread]]:
    with (
        Store(settings_for(tmp_path, grpc_port="off", export_root=tmp_path / "exports")) as store,
        ServerThread(store) as server,
    ):
        store.load_snapshot(scenes.write_snapshot(tmp_path))
        yield store, server


def test_an_export_runs_as_a_job_and_loads_again(own: tuple[Store, ServerThread], tmp_path: Path) -> None:
    store, server = own
    store.apply_delta(scenes.stamped(1, {"item": [5]}))
    with httpx.Client(base_url=server.url, timeout=60) as http:
        started = http.post("/admin/models/ctr/exports", json={"directory": "ctr/1"})
        assert started.status_code == 202, started.text
        job = started.json()["job"]

        def ended() -> Any:
            document = http.get(f"/admin/jobs/{job}").json()
            return document if document["state"] != "running" else None

        document = eventually(ended, "the export")
    assert document["state"] == "done", document
    assert (document["kind"], document["source"], document["seq"], document["done"]) == ("export", None, 1, 1500)
    assert document["directory"] == str(tmp_path / "exports/ctr/1")
    with tierstore.open(tmp_path / "other", host_budget="4MiB", load_workers=1) as other:
        other.load_snapshot(tmp_path / "exports/ctr/1")
        np.testing.assert_array_equal(other.model("ctr").lookup("item_id", [5])[0], scenes.vector("item", 1, 5))


def test_the_clients_verb(own: tuple[Store, ServerThread], tmp_path: Path) -> None:
    _, server = own
    with tierstore.Client(server.url) as client:
        assert client.export("ctr", "a", version="stable", as_version=9) == ExportReport("ctr", 9, 0, 1500)
        with pytest.raises(Conflict, match="exists already"):
            client.export("ctr", "a")
        with pytest.raises(tierstore.TierstoreError, match="no version 2"):
            client.export("ctr", "b", version=2)
    assert not (tmp_path / "exports" / "b").exists()


def test_places_that_are_refused(own: tuple[Store, ServerThread], tmp_path: Path) -> None:
    _, server = own
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for body, status in (
            ({"directory": "../out"}, 400),
            ({"directory": "a", "x": 1}, 400),
            ({"directory": "a", "as_version": 0}, 400),
            ({}, 400),
        ):
            assert http.post("/admin/models/ctr/exports", json=body).status_code == status, body
        assert http.post("/admin/models/nobody/exports", json={"directory": "a"}).status_code == 404
        assert http.get("/admin/jobs").json() == {"jobs": []}
    assert not (tmp_path / "out").exists()


def test_an_export_is_written_below_the_root_alone(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for made in (root / "there", outside):
        made.mkdir(parents=True)
    (root / "link").symlink_to(outside)
    assert resolve_target("a/b", root) == root / "a/b"
    assert resolve_target(str(root / "a"), root) == root / "a"
    for directory in (
        "",
        ".",
        "..",
        "../outside/x",
        str(outside / "x"),
        "link",
        "link/x",
        "a\0b",
        "x" * 5000,
        "s3://b/x",
    ):
        with pytest.raises(InvalidInput):
            resolve_target(directory, root)
    with pytest.raises(Conflict, match="exists already"):
        resolve_target("there", root)
    assert resolve_target("a/b", "s3://bucket/out/") == "s3://bucket/out/a/b"
    assert resolve_target("s3://bucket/out/a/", "s3://bucket/out") == "s3://bucket/out/a"
    for directory in (
        "",
        "s3://bucket/other",
        "s3://bucket/out",
        "s3://bucket/outer/a",
        "a/../../b",
        "a//b",
        "/a",
        "gs://b::s3://bucket/out/a",
    ):
        with pytest.raises(InvalidInput):
            resolve_target(directory, "s3://bucket/out")


def test_an_export_and_a_load_do_not_wait_for_each_other(tmp_path: Path) -> None:
    class Slow:
        def __init__(self) -> None:
            self.running: list[str] = []
            self.end = threading.Event()

        def load_snapshot(self, source: Path, **_: Any) -> int:
            self.running.append(source.name)
            self.end.wait(30)
            return 1

        def export(self, model: str, directory: Path, **_: Any) -> ExportReport:
            self.running.append(directory.name)
            self.end.wait(30)
            return ExportReport(model, 1, 5, 10)

    store = Slow()
    jobs = Jobs(store)
    try:
        exports = [jobs.submit_export("a", tmp_path / name, {}) for name in ("export-1", "export-2")]
        load = jobs.submit("a", tmp_path / "load", activate=True)
        eventually(lambda: sorted(store.running) == ["export-1", "load"], "both run")
        assert exports[1].phase == "queued"
        store.end.set()
        for job in (*exports, load):
            eventually(lambda job=job: job.state == "done", "its end")
        assert (exports[1].version, exports[1].seq, exports[1].done) == (1, 5, 10)
    finally:
        store.end.set()
        jobs.close()
