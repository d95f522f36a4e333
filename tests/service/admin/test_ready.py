"""Readiness after a start: a model that is on record and does not serve keeps a rolling update from the next copy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.engine.quick_build import in_process
from tests.service.conftest import settings_for
from tests.service.scenes import write_snapshot
from tierstore import __version__
from tierstore.engine.store import Store
from tierstore.formats import files
from tierstore.service.server import ServerThread


@contextmanager
def serving(tmp_path: Path, **settings: object) -> Iterator[tuple[Store, httpx.Client]]:
    with (
        in_process(),
        Store(settings_for(tmp_path, keep_versions=9, **settings)) as store,
        ServerThread(store) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield store, http


def damaged_document(root: Path) -> None:
    path = root / "state.json"
    path.write_text(path.read_text().replace('"active": 2', '"active": 1'))


def a_newer_format(root: Path) -> None:
    record = json.loads((root / "2/version.json").read_text())
    del record["xxh3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "__version__", "9.3.0")
        files.publish_record(root / "2/version.json", record | {"format": 99})


@pytest.mark.thorough
@pytest.mark.parametrize("damage", [damaged_document, a_newer_format])
def test_a_copy_whose_model_does_not_open_is_not_ready(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with serving(tmp_path) as (store, http):
        assert http.get("/v2/health/ready").json() == {"ready": True}, "no models"
        assert http.get("/v2/health/live").json() == {"live": True}
        for version in (1, 2):
            store.load_snapshot(write_snapshot(tmp_path, version))
    damage(next(tmp_path.glob("**/models/ctr")))
    with serving(tmp_path, ready_unserved=True) as (_, http):
        assert http.get("/v2/health/ready").status_code == 200, "as the setting says"
    with serving(tmp_path) as (store, http):
        answer = http.get("/v2/health/ready")
        assert (answer.status_code, answer.json()["unserved"]) == (400, ["ctr"])
        assert http.get("/v2/health/live").status_code == 200
        assert "tierstore_ready 0.0" in http.get("/metrics").text
        if damage is a_newer_format:
            problem = str(store.status()["models"]["ctr"]["problem"])
            assert f"was written by tierstore 9.3.0, this is {__version__}" in problem
            store.activate("ctr", 1)
            assert http.get("/v2/health/ready").status_code == 200
