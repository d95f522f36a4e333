"""A snapshot is sent to a service that cannot read its directory: whole or not at all, and no byte twice."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from tests.formats.disks import FailingDisk
from tierstore.errors import Conflict, InvalidInput, SnapshotError, StorageError
from tierstore.formats import files
from tierstore.service import spool
from tierstore.service.server import ServerThread

SMALL = {"host_budget": "16MiB", "load_workers": 1, "disk_threads": 2, "port": 0, "grpc_port": "off"}
KEYS = np.arange(3000)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "PIECE_BYTES", 4096)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A directory that the service does not read."""
    where = tmp_path / "elsewhere"
    where.mkdir()
    return where


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    """Starts a service whose only source root is an empty directory, and restarts it."""
    running: list[tuple[ServerThread, tierstore.Store]] = []
    (tmp_path / "roots").mkdir()

    def start(**options: Any) -> str:
        stop()
        store = tierstore.open(tmp_path / "data", source_root=[tmp_path / "roots"], **SMALL | options)
        server = ServerThread(store)
        running.append((server, store))
        server.__enter__()
        return server.url

    def stop() -> None:
        while running:
            server, store = running.pop()
            server.__exit__(None, None, None)
            store.close()

    yield start
    stop()


def snapshot(where: Path, version: int = 1) -> Path:
    with tierstore.SnapshotWriter(where, model="ctr", version=version) as writer:
        writer.table("item", dim=8, dtype="float32", rows_per_shard=1000).write(KEYS, vectors(version))
        writer.feature("item_id", table="item")
    return where


def vectors(version: int) -> Any:
    return np.random.default_rng(version).random((len(KEYS), 8), np.float32)


def sent_of(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "data/uploads").glob("*"))


def test_a_snapshot_that_the_service_cannot_read_is_sent_and_loaded(
    serve: Any, tmp_path: Path, elsewhere: Path
) -> None:
    where = snapshot(elsewhere / "s")
    steps = []
    with tierstore.Client(serve()) as client:
        assert client.load_snapshot(where, progress=steps.append) == 1
        np.testing.assert_array_equal(client.lookup("ctr", "item_id", KEYS), vectors(1))
        job = client.jobs()[0]
    sent = [step for step in steps if step.phase == "send"]
    total = sum(path.stat().st_size for path in where.rglob("*") if path.is_file())
    assert {step.total for step in sent} == {total}
    assert [step.done for step in sent] == sorted({step.done for step in sent}), "each piece once"
    assert "/uploads/" in job["source"]
    assert sent_of(tmp_path) == [], "a load has taken it"


def test_one_that_was_cut_off_goes_on_where_it_was(serve: Any, tmp_path: Path, elsewhere: Path) -> None:
    where = snapshot(elsewhere / "s")

    def cut(step: tierstore.Progress) -> None:
        if step.phase == "send" and step.done > step.total / 2:
            raise KeyboardInterrupt

    with tierstore.Client(serve()) as client, pytest.raises(KeyboardInterrupt):
        client.load_snapshot(where, progress=cut)
    assert len(sent_of(tmp_path)) == 1
    url = serve()  # and over a restart of the service
    steps: list[tierstore.Progress] = []
    with tierstore.Client(url) as client:
        assert client.models() == []
        client.load_snapshot(where, progress=steps.append)
        np.testing.assert_array_equal(client.lookup("ctr", "item_id", KEYS), vectors(1))
    first = next(step for step in steps if step.phase == "send")
    assert first.done > first.total / 3


def test_what_changed_since_is_sent_anew(serve: Any, elsewhere: Path) -> None:
    where = snapshot(elsewhere / "s")
    url = serve()

    def cut(step: tierstore.Progress) -> None:
        if step.phase == "send" and step.done > step.total / 2:
            raise KeyboardInterrupt

    with tierstore.Client(url) as client:
        with pytest.raises(KeyboardInterrupt):
            client.load_snapshot(where, progress=cut)
        for path in where.rglob("*"):
            if path.is_file():
                path.unlink()
        where.rename(elsewhere / "old")
        snapshot(elsewhere / "s", version=2)
        client.load_snapshot(where)
        np.testing.assert_array_equal(client.lookup("ctr", "item_id", KEYS), vectors(2))


def declared(url: str, files: dict[str, int], name: str = "a" * 32) -> httpx.Response:
    body = {"files": [{"name": of, "bytes": size} for of, size in files.items()]}
    return httpx.put(f"{url}/admin/models/ctr/uploads/{name}", json=body)


def sent(url: str, number: int, offset: int, piece: bytes, **other: Any) -> httpx.Response:
    query = {"offset": offset, "sha256": hashlib.sha256(piece).hexdigest()} | other
    return httpx.put(f"{url}/admin/models/ctr/uploads/{'a' * 32}/files/{number}", params=query, content=piece)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/x",
        "a/../../x",
        "a//b",
        ".hidden",
        "a/.b",
        "",
        "a\\b",
        "a\0b",
        "x" * 129,
        "/".join("abcdefghi"),
        "x.part",
        "é",
    ],
)
def test_a_name_that_is_no_file_of_a_snapshot_is_refused(serve: Any, tmp_path: Path, name: str) -> None:
    answer = declared(serve(), {name: 10})
    assert answer.status_code == 400
    assert "expected" in answer.text
    assert sent_of(tmp_path) == []


def test_a_file_that_is_also_a_folder_is_refused(serve: Any) -> None:
    answer = declared(serve(), {"a": 1, "a/b": 1})
    assert answer.status_code == 400
    assert "a file and a folder" in answer.text


def test_a_piece_that_is_not_what_it_must_be_changes_nothing(serve: Any) -> None:
    url = serve()
    assert declared(url, {"x": 10_000}).json()["files"] == [0]
    first, last = bytes(4096), bytes(10_000 - 8192)
    assert sent(url, 0, 4096, first).status_code == 409, "a gap"
    assert sent(url, 0, 100, first).status_code == 400, "not at a multiple"
    assert sent(url, 0, 0, first[:-1]).status_code == 400, "too short"
    assert sent(url, 0, 0, first, sha256="0" * 64).status_code == 400, "changed on its way"
    assert sent(url, 1, 0, first).status_code == 404, "another file"
    assert sent(url, 0, 12288, b"").status_code == 400, "beyond the end"
    assert httpx.get(f"{url}/admin/models/ctr/uploads/{'a' * 32}").json()["files"] == [0]
    assert [sent(url, 0, at, piece).json() for at, piece in ((0, first), (4096, first), (0, first), (8192, last))] == [
        {"bytes": 4096}, {"bytes": 8192}, {"bytes": 8192}, {"bytes": 10_000},
    ]  # fmt: skip
    assert declared(url, {"x": 10_000}).json()["files"] == [10_000], "declared again it says what is there"
    assert declared(url, {"x": 9_000}).status_code == 409, "with other files it is another one"


def test_a_load_begins_only_when_all_is_there(serve: Any) -> None:
    url = serve()
    declared(url, {"snapshot.json": 10_000})
    answer = httpx.post(f"{url}/admin/models/ctr/snapshots", json={"source": f"upload:{'a' * 32}"})
    assert answer.status_code == 409
    assert "not whole" in answer.text
    answer = httpx.post(f"{url}/admin/models/other/snapshots", json={"source": f"upload:{'a' * 32}"})
    assert answer.status_code == 404


def test_no_more_is_taken_than_the_budget(serve: Any, tmp_path: Path) -> None:
    url = serve(spool_budget=10_000)
    assert declared(url, {"x": 6_000}).status_code == 200
    answer = declared(url, {"x": 6_000}, "b" * 32)
    assert answer.status_code == 503
    assert "spool_budget" in answer.text
    assert httpx.delete(f"{url}/admin/models/ctr/uploads/{'a' * 32}").status_code == 200
    assert declared(url, {"x": 6_000}, "b" * 32).status_code == 200
    assert sent_of(tmp_path) == ["b" * 32]


def test_what_nobody_goes_on_with_is_swept(tmp_path: Path) -> None:
    made = spool.Spool(tmp_path, None, 0, 100.0)
    old, young = made.declare("ctr", "a" * 32, {"x": 1}), made.declare("ctr", "b" * 32, {"x": 1})
    for path in (old.root, *old.root.rglob("*")):
        os.utime(path, (1, 1))
    again = spool.Spool(tmp_path, None, 0, 100.0)
    assert [of.id for of in again.all("ctr")] == [young.id]
    assert sorted(path.name for path in tmp_path.iterdir()) == [young.id]


def test_one_that_is_being_loaded_is_neither_swept_nor_removed(tmp_path: Path) -> None:
    made = spool.Spool(tmp_path, None, 0, 0.0)
    upload = made.declare("ctr", "a" * 32, {"x": 0})
    assert made.whole(upload) == upload.files
    with pytest.raises(Conflict), made.loading(upload):
        made.discard(upload)
    with pytest.raises(SnapshotError), made.loading(upload):
        raise SnapshotError("not this one")
    assert upload.files.exists(), "a load that failed leaves it"
    with made.loading(upload):
        pass
    assert not upload.root.exists()


@pytest.mark.parametrize("at", range(4))
def test_a_piece_that_could_not_be_kept_is_taken_when_it_comes_again(tmp_path: Path, at: int) -> None:
    made = spool.Spool(tmp_path, None, 0, 100.0)
    upload = made.declare("ctr", "a" * 32, {"x": 6000})
    content = os.urandom(6000)
    pieces = [(offset, content[offset : offset + 4096]) for offset in (0, 4096)]
    disk, failed = FailingDisk(at), 0
    with files.use(disk):
        for offset, piece in pieces:
            digest = hashlib.sha256(piece).hexdigest()
            try:
                made.write(upload, 0, offset, memoryview(piece), digest)
            except StorageError:
                failed += 1
                made.write(upload, 0, offset, memoryview(piece), digest)
    assert failed == 1
    assert (made.whole(upload) / "x").read_bytes() == content


def test_bytes_of_a_piece_that_stopped_short_do_not_count(tmp_path: Path) -> None:
    made = spool.Spool(tmp_path, None, 0, 100.0)
    upload = made.declare("ctr", "a" * 32, {"x": 6000})
    (upload.files / "x.part").write_bytes(bytes(40))
    assert upload.there("x") == 0
    assert upload.document()["bytes"] == 0
    (upload.files / "x.part").write_bytes(bytes(6000))
    assert upload.there("x") == 4096, "not whole before it has its name"


def test_a_load_that_went_well_is_not_a_failure_because_a_late_piece_comes(tmp_path: Path) -> None:
    made = spool.Spool(tmp_path, None, 0, 100.0)
    upload = made.declare("ctr", "a" * 32, {"x": 0})
    made.whole(upload)
    with made._held(upload):
        with made.loading(upload):
            pass
        assert upload.root.exists()


def test_a_last_piece_of_an_earlier_process_is_asked_for_again(tmp_path: Path) -> None:
    """Power may have failed before it was flushed."""
    made = spool.Spool(tmp_path, None, 0, 100.0)
    upload = made.declare("ctr", "a" * 32, {"x": 20_000})
    for at in (0, 4096, 8192):
        made.write(upload, 0, at, memoryview(bytes(4096)), hashlib.sha256(bytes(4096)).hexdigest())
    (again,) = spool.Spool(tmp_path, None, 0, 100.0).all("ctr")
    assert again.there("x") == 8192


def test_a_directory_that_holds_no_snapshot_is_refused_as_before(serve: Any, elsewhere: Path) -> None:
    with tierstore.Client(serve()) as client, pytest.raises((InvalidInput, SnapshotError), match="source root"):
        client.load_snapshot(elsewhere, model="ctr")
