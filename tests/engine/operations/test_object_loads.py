"""Loads from object storage: the rows are those of a load from local files, whatever the server does meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tierstore
from tests.formats.shards import save_hugectr, save_npz, save_safetensors, save_shard, snapshot_of
from tierstore.errors import NotFound, SnapshotError
from tierstore.types import Progress

pytest.importorskip("obstore", reason="the extra s3 is not installed")
pytest.importorskip("moto.server", reason="moto's server is not installed")

from tests.formats.object_server import ObjectServer, cut_off, object_server, unavailable

ROWS, DIM = 120_000, 32
KEYS = np.random.default_rng(5).permutation(ROWS)
VECTORS = (KEYS[:, None] * 0.5 + np.arange(DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with object_server() as running:
        yield running


@pytest.fixture(autouse=True)
def _without_faults(server: ObjectServer) -> Iterator[None]:
    yield
    server.faults.clear()


def columns() -> pa.Table:
    return pa.table({"key": KEYS, "vector": pa.FixedSizeListArray.from_arrays(pa.array(VECTORS.ravel()), DIM)})


def directory(root: Path) -> str:
    for part, begin in enumerate(range(0, ROWS, ROWS // 3)):
        (root / "rows" / f"day={part}").mkdir(parents=True)
        pq.write_table(columns().slice(begin, ROWS // 3), root / "rows" / f"day={part}" / "part-0.parquet")
    (root / "rows" / "_SUCCESS").touch()
    return "rows"


def check(store: tierstore.Store, rows: int = ROWS) -> None:
    got, found = store.model("ctr").lookup("item", KEYS[:rows], return_found=True)
    assert found.all()
    np.testing.assert_array_equal(got, VECTORS[:rows])


def with_feature(root: Path) -> Path:
    import json

    document = json.loads((root / "snapshot.json").read_text())
    document["features"] = [{"name": "item", "table": "item"}]
    (root / "snapshot.json").write_text(json.dumps(document))
    return root


@pytest.mark.thorough
@pytest.mark.parametrize(
    "save",
    [
        save_shard(columns(), "p.parquet"),
        save_shard(columns(), "p.arrow"),
        save_npz(keys=KEYS, vectors=VECTORS),
        save_safetensors({"keys": ("I64", KEYS), "vectors": ("F32", VECTORS)}),
        save_hugectr(KEYS.tobytes(), VECTORS.tobytes()),
        directory,
    ],
    ids=["parquet", "arrow", "npz", "safetensors", "hugectr", "directory"],
)
def test_every_format_loads_from_a_server_whose_connections_die(open_store, server, tmp_path, save) -> None:
    root = with_feature(snapshot_of(tmp_path / "s", save, rows=ROWS, dim=DIM))
    url = server.put(root, tmp_path.name)
    server.faults += [cut_off(4), unavailable(3)]
    store = open_store(host_budget="64MiB")
    assert store.load_snapshot(url) == 1
    check(store)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the writer makes: checksums, warm-up keys, requests, several shards."""
    root = tmp_path_factory.mktemp("written") / "s"
    with tierstore.SnapshotWriter(root, model="ctr", version=1) as writer:
        writer.table("item", dim=DIM, rows_per_shard=ROWS // 2).write(KEYS, VECTORS)
        writer.feature("item", table="item")
        writer.warmup("item", KEYS[:100])
    return root


def test_a_snapshot_with_all_that_one_can_have(open_store, server, written) -> None:
    store = open_store(host_budget="64MiB")
    store.load_snapshot(server.put(written, "full") + "/snapshot.json")
    check(store)


def test_a_built_version_is_copied_from_there(open_store, server, written, tmp_path) -> None:
    url = server.put(written, "source")
    tierstore.build_snapshot(url, tmp_path / "built", load_workers=1)
    built = server.put(tmp_path / "built", "built")
    server.faults.append(cut_off(3))
    store = open_store(host_budget="64MiB")
    store.load_snapshot(built)
    check(store)


@pytest.mark.thorough
def test_a_shard_that_is_replaced_meanwhile_fails_the_load(open_store, server, tmp_path) -> None:
    root = with_feature(snapshot_of(tmp_path / "s", save_npz(keys=KEYS, vectors=VECTORS), rows=ROWS, dim=DIM))
    url, store = server.put(root, "changing"), open_store()

    def change(step: Progress) -> None:
        if step.phase == "write":
            np.savez(root / "p.npz", keys=KEYS, vectors=VECTORS + 1)
            server.put_bytes("changing/p.npz", (root / "p.npz").read_bytes())

    with pytest.raises(SnapshotError, match="its files changed while they were read"):
        store.load_snapshot(url, progress=change)
    with pytest.raises(NotFound):
        store.model("ctr")
    assert store.load_snapshot(url) == 1


@pytest.mark.thorough
def test_one_that_is_damaged_or_not_finished_is_refused_by_name(open_store, server, written) -> None:
    url, store = server.put(written, "damaged"), open_store()
    shard = next(path for path in written.glob("item/*") if path.is_file())
    name = shard.relative_to(written).as_posix()
    for place in (0, len(shard.read_bytes()) // 2, -1):
        content = bytearray(shard.read_bytes())
        content[place] ^= 1
        server.put_bytes(f"damaged/{name}", bytes(content))
        with pytest.raises(SnapshotError, match=f"{name}: wrong checksum"):
            store.load_snapshot(url)
        with pytest.raises(NotFound):
            store.model("ctr")
    server.delete(f"damaged/{name}")
    with pytest.raises(SnapshotError, match=f"{name}: is missing"):
        store.load_snapshot(url)
    server.delete("damaged/snapshot.json")
    with pytest.raises(SnapshotError, match=r"has no snapshot\.json"):
        store.load_snapshot(url)
