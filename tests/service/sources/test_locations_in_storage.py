"""A watched location in object storage: whatever the server does, what serves is whole, and what comes at last is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore

pytest.importorskip("obstore", reason="the extra s3 is not installed")
pytest.importorskip("moto.server", reason="moto's server is not installed")

from tests.formats.object_server import BUCKET, Fault, ObjectServer, Respond, object_server, slow, unavailable
from tests.service.conftest import eventually
from tests.service.sources.test_locations import Watched
from tierstore.formats import objects

ROWS, DIM = 30_000, 16
KEYS = np.arange(ROWS, dtype=np.int64)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with object_server() as running:
        yield running


class InStorage(Watched):
    """The location is `name` in the server's bucket."""

    def __init__(self, root: Path, server: ObjectServer, name: str) -> None:
        self.server, self.name = server, name
        super().__init__(root, f"s3://{BUCKET}/{name}")

    def write(self, version: int) -> Path:
        where = self.root / f"written-{version}"
        with tierstore.SnapshotWriter(where, model="ctr", version=version) as writer:
            writer.table("item", dim=DIM).write(KEYS, vectors(version))
            writer.feature("item_id", table="item")
        return where

    def upload(self, version: int) -> None:
        self.server.put(self.write(version), f"{self.name}/ctr/{version}")

    def check(self, version: int) -> None:
        self.expect(version)
        rows, found = self.store.model("ctr").lookup("item_id", KEYS, return_found=True)
        assert found.all()
        np.testing.assert_array_equal(rows, vectors(version))


def vectors(version: int) -> np.ndarray:
    made: np.ndarray = (KEYS[:, None] * 0.25 + np.arange(DIM) + version).astype(np.float32)
    return made


@pytest.fixture
def stored(tmp_path: Path, server: ObjectServer, request: pytest.FixtureRequest) -> Iterator[InStorage]:
    scene = InStorage(tmp_path, server, request.node.name[:40])
    yield scene
    server.faults.clear()
    server.listing_faults.clear()
    scene.stop()


@pytest.mark.thorough
def test_the_newest_is_loaded_through_whatever_the_server_does(stored: InStorage) -> None:
    eventually(lambda: stored.source.status()["locations"][0]["state"] == "nothing there yet", "the empty location")
    assert stored.source.problems() == []
    stored.server.faults += [unavailable(2), slow(0.02)]
    stored.upload(1)
    stored.check(1)
    stored.upload(2)
    stored.check(2)
    assert stored.source.loaded == 2


@pytest.mark.thorough
def test_a_location_that_cannot_be_listed_is_reported_and_followed_again(stored: InStorage) -> None:
    stored.upload(1)
    stored.check(1)

    def refuse(environ: dict[str, Any], respond: Respond) -> Iterable[bytes] | None:
        respond("403 Forbidden", [("Content-Length", "0")])
        return []

    fault: Fault = refuse
    stored.server.listing_faults.append(fault)
    stored.expect_problem("")
    stored.upload(2)
    assert stored.active == 1
    stored.server.listing_faults.clear()
    stored.check(2)
    eventually(lambda: not stored.source.problems(), "no problem to be left")


@pytest.mark.thorough
def test_an_outage_is_reported_and_what_came_meanwhile_is_loaded_after_it(
    stored: InStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "QUICK_PATIENCE_S", 0.3)
    stored.upload(1)
    stored.check(1)
    stored.server.stop()
    try:
        eventually(lambda: stored.source.status()["locations"][0]["state"] == "cannot be read", "the outage to be said")
        stored.expect_problem("cannot be listed within 0 s")
        assert stored.active == 1
    finally:
        stored.server.start()
    stored.upload(2)
    stored.check(2)
    eventually(lambda: not stored.source.problems(), "no problem to be left")
    assert stored.source.status()["locations"][0]["state"] == "followed"


def test_a_load_that_waits_says_so(stored: InStorage) -> None:
    stored.server.faults.append(unavailable(10**6, of="part-"))
    stored.upload(1)
    stored.expect_last("version 1 is being loaded, waits: s3://")
    assert stored.source.problems() == []
    stored.server.faults.clear()
    stored.check(1)
    stored.expect_last("version 1 is active")


@pytest.mark.thorough
def test_an_object_that_is_cut_short_or_missing_is_reported_until_it_is_mended(stored: InStorage) -> None:
    stored.upload(1)
    stored.check(1)
    where = stored.write(2)
    shard = next(path for path in where.glob("item/*") if path.is_file())
    name = f"{stored.name}/ctr/2/{shard.relative_to(where).as_posix()}"
    stored.server.put_bytes(name, shard.read_bytes()[:-1000])
    stored.server.put_bytes(f"{stored.name}/ctr/2/snapshot.json", (where / "snapshot.json").read_bytes())
    stored.expect_problem("wrong checksum")
    stored.server.delete(name)
    stored.expect_problem("is missing")
    assert stored.active == 1
    stored.server.put_bytes(name, shard.read_bytes())
    stored.check(2)
    eventually(lambda: not stored.source.problems(), "no problem to be left")


def test_a_version_is_not_seen_before_its_manifest(stored: InStorage) -> None:
    where = stored.write(1)
    for file in where.glob("item/*"):
        stored.server.put_bytes(f"{stored.name}/ctr/1/{file.relative_to(where).as_posix()}", file.read_bytes())
    stored.looks()
    assert (stored.active, stored.source.problems()) == (None, [])
    stored.server.put_bytes(f"{stored.name}/ctr/1/snapshot.json", (where / "snapshot.json").read_bytes())
    stored.check(1)
