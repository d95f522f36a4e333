"""Writing to object storage: what is there is whole and loads again, or nothing is there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tierstore.errors import Closed, Conflict, SnapshotError, StorageError, WrongPartition
from tierstore.formats import uploads
from tierstore.formats.keys import partition_of

pytest.importorskip("obstore", reason="the extra s3 is not installed")
pytest.importorskip("moto.server", reason="moto's server is not installed")

from tests.formats.object_server import BUCKET, ObjectServer, dying, object_server, refused, slow

ROWS, DIM = 90_000, 64  # 24 MB: more than two parts
KEYS = np.arange(ROWS, dtype=np.int64)
VECTORS = (KEYS[:, None] * 0.5 + np.arange(DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with object_server() as running:
        yield running


@pytest.fixture(autouse=True)
def _without_faults(server: ObjectServer, tmp_path: Path, monkeypatch: Any) -> Iterator[None]:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    server.written.clear()
    yield
    server.write_faults.clear()
    assert list((tmp_path / "scratch").iterdir()) == []


def write(url: str, *, rows: int = ROWS, fails: bool = False) -> None:
    with tierstore.SnapshotWriter(url, model="ctr", version=1) as writer:
        table = writer.table("item", dim=DIM, rows_per_shard=rows // 2 + 1000)
        table.write(KEYS[:rows], VECTORS[:rows])
        writer.feature("item", table="item")
        writer.warmup("item", KEYS[:100])
        if fails:
            raise KeyboardInterrupt


def check(store: tierstore.Store, url: str, rows: int = ROWS) -> None:
    store.load_snapshot(url)
    got, found = store.model("ctr").lookup("item", KEYS[:rows], return_found=True)
    assert found.all()
    np.testing.assert_array_equal(got, VECTORS[:rows])


@pytest.mark.thorough
def test_a_snapshot_is_written_through_failures_and_its_manifest_last(open_store, server) -> None:
    url = f"s3://{BUCKET}/writer"
    server.write_faults += [dying(4), refused(2), slow(0.01)]
    write(url)
    assert server.names("writer") == [
        "item/part-00000.arrow",
        "item/part-00001.arrow",
        "snapshot.json",
        "warmup/item.npy",
    ]
    assert server.written[-1].endswith("/snapshot.json")
    with pytest.raises(SnapshotError, match="holds a snapshot already"):
        write(url)
    check(open_store(host_budget="64MiB"), url)


def test_an_error_in_the_block_removes_what_was_uploaded(server) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(f"s3://{BUCKET}/aborted", fails=True)
    assert server.names("aborted") == []


def test_a_storage_that_refuses_is_an_error_that_names_the_object(server, monkeypatch) -> None:
    server.write_faults.append(refused(1000, "403 Forbidden"))
    with pytest.raises(StorageError, match=f"cannot write s3://{BUCKET}/refused/"):
        write(f"s3://{BUCKET}/refused", rows=1000)
    server.write_faults[:] = [refused(1000, "400 Bad Request")]
    monkeypatch.setattr(uploads, "PATIENCE_S", 0.1)
    with pytest.raises(StorageError, match=r"within 0 s"):
        write(f"s3://{BUCKET}/refused", rows=1000)
    server.write_faults.clear()
    assert server.names("refused") == []
    with pytest.raises(StorageError, match="no-such-bucket"):
        write("s3://no-such-bucket/a", rows=1000)


@pytest.mark.thorough
def test_an_export_loads_elsewhere_as_a_snapshot_and_built(open_store, server, tmp_path) -> None:
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.apply_delta(scenes.stamped(1, {"item": [5]}))
    url = f"s3://{BUCKET}/exports"
    server.write_faults.append(dying(3))
    report = store.export("ctr", f"{url}/snapshot", as_version=7)
    assert (report.version, report.seq, report.rows) == (7, 1, 1500)
    store.export("ctr", f"{url}/built", as_version=8, partitions=1)
    assert server.written[-1].endswith("/built.json")
    store.export("ctr", tmp_path / "parts", as_version=9, partitions=2)
    with pytest.raises(Conflict, match="exists already"):
        store.export("ctr", f"{url}/built")
    assert [path.name for path in store.root.root.glob(".tmp-*")] == []
    assert [path.name for path in tmp_path.glob(".tmp-*")] == []
    with tierstore.open(tmp_path / "other", host_budget="4MiB", load_workers=1) as other:
        for source in (f"{url}/snapshot", f"{url}/built"):
            other.load_snapshot(source)
            np.testing.assert_array_equal(other.model("ctr").lookup("item_id", [5])[0], scenes.vector("item", 1, 5))
        assert other.model("ctr").active_version == 8
    for part in (0, 1):
        with tierstore.open(tmp_path / f"{part}", host_budget="4MiB", load_workers=1, partition=f"{part}/2") as other:
            other.load_snapshot(tmp_path / "parts")
            keys = KEYS[:1000][partition_of(KEYS[:1000], 2) == part]
            assert other.model("ctr").lookup("item_id", keys, return_found=True)[1].all()


@pytest.mark.thorough
def test_a_node_copies_its_partitions_out_of_what_was_built_there(server, tmp_path) -> None:
    write(tmp_path / "s", rows=20_000)
    for source, partitions in (("parts", 8), ("whole", 1)):
        url = f"s3://{BUCKET}/node/{source}"
        tierstore.build_snapshot(tmp_path / "s", url, partitions=partitions, load_workers=1)
        with tierstore.open(tmp_path / source, host_budget="4MiB", load_workers=2, partition="1-2,7/8") as store:
            store.load_snapshot(url)
            own = np.isin(partition_of(KEYS[:20_000], 8), [1, 2, 7])
            rows, found = store.model("ctr").lookup("item", KEYS[:20_000][own], return_found=True)
            assert found.all()
            np.testing.assert_array_equal(rows, VECTORS[:20_000][own])
            assert store.verify().rows == np.count_nonzero(own)
            with pytest.raises(WrongPartition):
                store.model("ctr").lookup("item", KEYS[:20_000])


def test_an_export_that_is_cancelled_leaves_nothing(open_store, server, tmp_path) -> None:
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))

    def end(step: tierstore.Progress) -> None:
        if step.phase == "write":
            raise Closed("enough")

    for target in (f"s3://{BUCKET}/cancelled", tmp_path / "cancelled"):
        with pytest.raises(Closed):
            store.export("ctr", target, partitions=1, progress=end)
    assert server.names("cancelled") == []
    assert not (tmp_path / "cancelled").exists()
    assert [path.name for path in [*tmp_path.glob(".tmp-*"), *store.root.root.glob(".tmp-*")]] == []


def test_a_build_is_written_there(open_store, server) -> None:
    write(f"s3://{BUCKET}/source", rows=5000)
    url = f"s3://{BUCKET}/built"
    tierstore.build_snapshot(f"s3://{BUCKET}/source", url, load_workers=1)
    assert server.written[-1].endswith("/built.json")
    with pytest.raises(Conflict, match="exists already"):
        tierstore.build_snapshot(f"s3://{BUCKET}/source", url, load_workers=1)
    check(open_store(), url, 5000)


def test_an_export_over_http(server, tmp_path) -> None:
    from tests.service.conftest import eventually, settings_for
    from tierstore.service.server import ServerThread

    settings = settings_for(tmp_path, grpc_port="off", export_root=f"s3://{BUCKET}/http")
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(tierstore.Store(settings))
        running = stack.enter_context(ServerThread(store))
        store.load_snapshot(scenes.write_snapshot(tmp_path))
        http = stack.enter_context(httpx.Client(base_url=running.url, timeout=60))
        body = {"directory": "ctr/1", "partitions": 1}
        job = http.post("/admin/models/ctr/exports", json=body).json()["job"]

        def ended() -> Any:
            document = http.get(f"/admin/jobs/{job}").json()
            return document if document["state"] != "running" else None

        document = eventually(ended, "the export")
    assert document["state"] == "done", document
    assert document["directory"] == f"s3://{BUCKET}/http/ctr/1"
    assert "built.json" in server.names("http/ctr/1")
