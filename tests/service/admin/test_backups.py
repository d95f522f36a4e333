"""Backups over HTTP: jobs for the role `admin`, below `export_root`, into a directory that may have earlier ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.service.conftest import settings_for
from tierstore.access.roles import Role
from tierstore.access.tokens import TokenFile
from tierstore.engine.store import Store
from tierstore.errors import InvalidInput
from tierstore.service.server import ServerThread


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[Store, ServerThread]]:
    with (
        Store(settings_for(tmp_path, grpc_port="off", export_root=tmp_path / "exports")) as store,
        ServerThread(store) as server,
    ):
        store.load_snapshot(scenes.write_snapshot(tmp_path))
        yield store, server


def test_a_backup_is_made_by_a_service_and_restored(own: tuple[Store, ServerThread], tmp_path: Path) -> None:
    store, server = own
    with tierstore.Client(server.url) as client:
        steps: list[str] = []
        first = client.backup("ctr", "nightly", progress=lambda step: steps.append(step.phase))
        client.apply_delta(scenes.stamped(1, {"item": [5]}))
        second = client.backup("ctr", "nightly", keep=2)
    assert (first.version, first.seq, second.seq) == (1, 0, 1)
    assert "backup" in steps
    assert 0 < second.new_bytes < first.new_bytes
    assert len(list((tmp_path / "exports/nightly/ctr").glob("*.json"))) == 2
    tierstore.restore(tmp_path / "exports/nightly", tmp_path / "other")
    with tierstore.open(tmp_path / "other", host_budget="4MiB") as other:
        np.testing.assert_array_equal(other.model("ctr").lookup("item_id", [5])[0], scenes.vector("item", 1, 5))
    lines = [json.loads(line) for line in (store.root.root / "audit/audit.jsonl").read_text().splitlines()]
    made = [line for line in lines if line["what"] == "backup"]
    assert [line["outcome"] for line in made] == ["done", "done"]
    assert made[0]["directory"] == str(tmp_path / "exports/nightly")
    assert made[0]["who"].startswith("job ")
    restored = json.loads((tmp_path / "other/audit/audit.jsonl").read_text().splitlines()[0])
    assert (restored["what"], restored["model"], restored["seq"]) == ("restore", "ctr", 1)


def test_a_service_that_was_started_without_a_place_has_one(tmp_path: Path) -> None:
    """In its data directory, where a backup takes no room until the store drops what is in it."""
    with Store(settings_for(tmp_path, grpc_port="off")) as store, ServerThread(store) as server:
        store.load_snapshot(scenes.write_snapshot(tmp_path))
        with tierstore.Client(server.url) as client:
            assert client.backup("ctr", "nightly").seq == 0
            client.export("ctr", "ctr/1")
            with pytest.raises(InvalidInput, match="not below export_root"):
                client.backup("ctr", "../models/ctr/nightly")
        with pytest.raises(InvalidInput, match="in the data directory"):
            store.backup("ctr", tmp_path / "data/models/backup")
    assert (tmp_path / "data/exports/ctr/1/snapshot.json").exists()
    with tierstore.open(tmp_path / "data", host_budget="4MiB") as again:
        assert again.models() == ["ctr"]
        assert again.verify().ok
    tierstore.restore(tmp_path / "data/exports/nightly", tmp_path / "other")
    with tierstore.open(tmp_path / "other", host_budget="4MiB") as other:
        np.testing.assert_array_equal(other.model("ctr").lookup("item_id", [5])[0], scenes.vector("item", 0, 5))


def test_backups_that_are_refused(own: tuple[Store, ServerThread], tmp_path: Path) -> None:
    _, server = own
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for body, status in (
            ({"directory": "../out"}, 400),
            ({"directory": str(tmp_path / "out")}, 400),
            ({"directory": "a", "keep": 0}, 400),
            ({"directory": "a", "x": 1}, 400),
            ({}, 400),
        ):
            assert http.post("/admin/models/ctr/backups", json=body).status_code == status, body
        assert http.post("/admin/models/nobody/backups", json={"directory": "a"}).status_code == 404
        assert http.get("/admin/jobs").json() == {"jobs": []}
    assert not (tmp_path / "out").exists()


def test_a_backup_takes_the_role_admin(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, grpc_port="off", export_root=tmp_path / "exports")
    held = TokenFile(settings.data / "tokens.json")
    secrets = {role: held.create(role)[1] for role in (Role.READER, Role.WRITER, Role.ADMIN)}
    with Store(settings) as store:
        store.load_snapshot(scenes.write_snapshot(tmp_path))
        with ServerThread(store, settings) as server, httpx.Client(base_url=server.url, timeout=60) as http:
            for role, status in ((Role.READER, 403), (Role.WRITER, 403), (Role.ADMIN, 202)):
                headers = {"Authorization": f"Bearer {secrets[role]}"}
                answer = http.post("/admin/models/ctr/backups", json={"directory": "a"}, headers=headers)
                assert answer.status_code == status, role
            assert http.post("/admin/models/ctr/backups", json={"directory": "a"}).status_code == 401
