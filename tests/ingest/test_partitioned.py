"""A version built by tasks: each may fail, die, run twice or late; what is committed is what one machine would have built."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

import tierstore
from tests.collisions import family
from tests.predict.onnx_models import linear
from tierstore.errors import Conflict, InvalidInput, SnapshotError, StorageError, WrongPartition
from tierstore.formats import files
from tierstore.ingest import load_plan
from tierstore.types import Partitions

ROWS, PARTS = 20_000, 4
KEYS = np.random.default_rng(3).permutation(ROWS) - ROWS // 2
WORDS = [*family(3), "a", "b", "ü"]  # three of them share a hash


def vectors(keys: np.ndarray) -> np.ndarray:
    return np.repeat((keys % 1000).astype(np.float32)[:, None], 8, axis=1)


def template(where: Path, **more: Any) -> Path:
    with tierstore.SnapshotWriter(where, model="ctr", version=7, delta_seq=3) as writer:
        writer.table("item", dim=8, default="mean", **more)
        writer.table("word", dim=2, dtype="float16", key="string")
        writer.feature("item_id", table="item")
        writer.feature("clicked", table="item", combiner="mean")
        writer.feature("word", table="word")
        writer.warmup("item", np.arange(100))
        writer.request({"item_id": np.arange(3), "clicked": (np.arange(3), np.array([0])), "word": ["a"]})
    return where


def items(build: tierstore.PartitionedBuild, partition: int, keys: np.ndarray = KEYS) -> Iterator[pa.RecordBatch]:
    mine = keys[build.partition_of("item", keys) == partition]
    for part in np.array_split(mine, 3):
        columns = {"id": part, "embedding": pa.FixedSizeListArray.from_arrays(vectors(part).ravel(), 8)}
        yield pa.record_batch({name: pa.array(column) for name, column in columns.items()})


def words(build: tierstore.PartitionedBuild, partition: int) -> pa.Table:
    mine = [i for i, of in enumerate(build.partition_of("word", pa.array(WORDS))) if of == partition]
    rows = [[float(i), -float(i)] for i in mine]
    return pa.table(
        {"key": pa.array([WORDS[i] for i in mine], pa.string()), "vector": pa.array(rows, pa.list_(pa.float64()))}
    )


def write(build: tierstore.PartitionedBuild, partition: int) -> int:
    build.write("word", partition, words(build, partition))
    return build.write("item", partition, items(build, partition), key="id", vector="embedding")


def check(source: str | Path, data: Path, **settings: Any) -> None:
    with tierstore.open(data, host_budget="4MiB", load_workers=1, disk_threads=2, **settings) as store:
        assert store.load_snapshot(source) == 7
        model, own = store.model("ctr"), settings.get("partition")
        keys = KEYS
        if own is not None:
            from tierstore.formats.keys import are_own

            keys = KEYS[are_own(KEYS, Partitions.parse(own))]
        rows, found = model.lookup("item_id", keys, return_found=True)
        assert found.all()
        np.testing.assert_array_equal(rows, vectors(keys))
        if own is None:
            assert model.lookup("item_id", [ROWS])[0].tolist() == pytest.approx(vectors(KEYS).mean(0).tolist())
            assert model.lookup("word", WORDS)[:, 0].tolist() == list(range(len(WORDS)))
            assert not model.lookup("word", ["c"], return_found=True)[1][0]
        assert store.verify().ok


def names(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def build(tmp_path: Path) -> tierstore.PartitionedBuild:
    return tierstore.begin_build(template(tmp_path / "template"), tmp_path / "out", partitions=PARTS)


def test_what_tasks_have_built_serves_what_they_were_given(
    build: tierstore.PartitionedBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_plan, "_FILE_BYTES", 64 << 10)  # several files a partition
    monkeypatch.setattr(load_plan, "MIN_RANGE_BYTES", 64 << 10)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    sent = pickle.loads(pickle.dumps(build))
    assert sum(write(sent, partition) for partition in range(PARTS)) == ROWS
    assert build.pending("item") == build.pending("word") == []
    assert build.commit({"item": ROWS, "word": len(WORDS)}) == 7
    assert list((tmp_path / "scratch").iterdir()) == []
    check(tmp_path / "out", tmp_path / "data")
    check(tmp_path / "out", tmp_path / "some", partition="1-2/4")
    there = names(tmp_path / "out")
    assert sum(name.startswith("partition-0002/base-item-") for name in there) > 1
    assert not [name for name in there if "/_" in name or name.startswith("_")]


@pytest.mark.parametrize("kept", ["all", "off", "not by all tasks"])
def test_what_tasks_have_built_carries_the_strings_of_keys(
    tmp_path: Path, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    made, out = template(tmp_path / "template"), tmp_path / "out"
    build = tierstore.begin_build(made, out, partitions=PARTS, string_keys=kept != "off")
    for partition in range(PARTS):
        task = build if kept != "not by all tasks" or partition else replace(build, string_keys=False)
        task.write("word", partition, words(task, partition))
    build.commit({"item": 0, "word": len(WORDS)})
    assert ("these partitions came without them: 0" in caplog.text) is (kept == "not by all tasks")
    assert any(name.endswith(".strings") for name in names(out)) == (kept == "all")
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(out)
        assert store.model("ctr").lookup("word", WORDS)[:, 0].tolist() == list(range(len(WORDS)))
        assert store.verify().ok
        if kept != "all":
            with pytest.raises(InvalidInput, match="'word' has string keys, and it was loaded from a built version"):
                store.export("ctr", tmp_path / "exported")
            return
        store.export("ctr", tmp_path / "exported")
    shards = sorted((tmp_path / "exported/word").glob("*.arrow"))
    found = [key for shard in shards for key in pa.ipc.open_file(shard).read_all()["key"].to_pylist()]
    assert sorted(found) == sorted(WORDS)


@pytest.mark.thorough
def test_one_machine_builds_the_same_rows(build: tierstore.PartitionedBuild, tmp_path: Path) -> None:
    for partition in range(PARTS):
        write(build, partition)
    build.commit()
    with tierstore.SnapshotWriter(tmp_path / "whole", model="ctr", version=7, delta_seq=3) as writer:
        writer.table("item", dim=8, default="mean").write(KEYS, vectors(KEYS))
        word = writer.table("word", dim=2, dtype="float16", key="string")
        word.write(WORDS, np.array([[i, -i] for i in range(len(WORDS))], np.float32))
    tierstore.build_snapshot(tmp_path / "whole", tmp_path / "one", partitions=PARTS, load_workers=1)
    for partition in range(PARTS):
        ours, theirs = (
            json.loads((tmp_path / of / f"partition-{partition:04}/built.json").read_text())["tables"]
            for of in ("out", "one")
        )
        assert ours[0] == theirs[0]
        assert ours[1]["mean"] == theirs[1]["mean"]
        assert {text for text, _ in ours[1]["colliding"]} == {text for text, _ in theirs[1]["colliding"]}


@pytest.mark.thorough
def test_nothing_is_loadable_before_the_commit(build: tierstore.PartitionedBuild, tmp_path: Path) -> None:
    for partition in range(PARTS):
        write(build, partition)
    with (
        tierstore.open(tmp_path / "data", host_budget="4MiB") as store,
        pytest.raises(SnapshotError, match="not a snapshot"),
    ):
        store.load_snapshot(tmp_path / "out")
    files_before = names(tmp_path / "out")

    class Broken(files.FileSystem):
        def rename(self, old: Path, new: Path) -> None:
            if new == tmp_path / "out/built.json":
                raise OSError(5, "broken")
            super().rename(old, new)

    with files.use(Broken()), pytest.raises(StorageError):
        build.commit()
    assert "built.json" not in names(tmp_path / "out") >= files_before
    assert build.commit() == 7, "again, as if nothing had been"
    check(tmp_path / "out", tmp_path / "data")
    with pytest.raises(Conflict, match="committed already"):
        build.commit()


@pytest.mark.thorough
def test_a_task_that_runs_twice_or_late_changes_nothing(build: tierstore.PartitionedBuild, tmp_path: Path) -> None:
    """Two attempts at once, as engines start them for slow tasks: each has files of its own, and one of them counts."""
    both = threading.Barrier(2)

    def attempt() -> None:
        def slowly() -> Iterator[pa.RecordBatch]:
            both.wait(30)
            yield from items(build, 0)

        build.write("item", 0, slowly(), key="id", vector="embedding")

    threads = [threading.Thread(target=attempt) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("base-item-0000" in name for name in names(tmp_path / "out")) == 2
    for partition in range(PARTS):
        write(build, partition)
    build.commit()
    assert sum("base-item-0000" in name for name in names(tmp_path / "out")) == 1
    check(tmp_path / "out", tmp_path / "data")


@pytest.mark.thorough
def test_a_build_goes_on_where_it_was_broken_off(build: tierstore.PartitionedBuild, tmp_path: Path) -> None:
    write(build, 1)
    before = names(tmp_path / "out")

    def fails() -> Iterator[pa.RecordBatch]:
        yield next(items(build, 2))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build.write("item", 2, fails(), key="id", vector="embedding")
    assert names(tmp_path / "out") == before
    time.sleep(1.1)  # the template's created_at is in whole seconds
    again = tierstore.begin_build(template(tmp_path / "template2"), tmp_path / "out", partitions=PARTS)
    assert again.pending("item") == [0, 2, 3]

    def unread() -> Iterator[pa.RecordBatch]:
        raise AssertionError("a finished partition was read")
        yield

    assert again.write("item", 1, unread()) > 0
    for partition in again.pending("item"):
        write(again, partition)
    again.commit()
    check(tmp_path / "out", tmp_path / "data")


KILLED = """
import os, pickle, signal, sys
import pyarrow as pa
build = pickle.loads(bytes.fromhex(sys.argv[1]))
from tierstore.formats import targets
move = targets._Directory._move
def moves(self, path, name):
    if name.name == "_item.json":
        os.kill(os.getpid(), signal.SIGKILL)
    move(self, path, name)
targets._Directory._move = moves
sys.path.insert(0, sys.argv[2])
from tests.ingest.test_partitioned import items
build.write("item", 0, items(build, 0), key="id", vector="embedding")
"""


@pytest.mark.thorough
def test_a_build_goes_on_that_the_release_before_began(tmp_path: Path) -> None:
    """It has recorded a digest of the template: of the manifest, and of side files in this order."""
    where, out = tmp_path / "template", tmp_path / "out"
    with tierstore.SnapshotWriter(where, model="ctr", version=7) as writer:
        writer.table("item", dim=8)
        writer.feature("item_id", table="item")
        writer.dense(linear({"item_id": [1.0] * 8}))
        writer.warmup("item", np.arange(100))
        writer.request({"item_id": np.arange(3)})
    tierstore.begin_build(where, out, partitions=PARTS)
    document = json.loads((where / "snapshot.json").read_text())
    del document["created_at"]
    names = [document["warmup"]["item"], *document["requests"], document["dense"]["path"]]
    digests = [xxhash.xxh3_64_hexdigest((where / name).read_bytes()) for name in names]
    recorded = xxhash.xxh3_128_hexdigest(json.dumps([document, digests]).encode())
    assert json.loads((out / "_build.json").read_text())["template"] == recorded


def test_a_task_that_is_killed_before_its_receipt_leaves_files_that_nothing_names(
    build: tierstore.PartitionedBuild, tmp_path: Path
) -> None:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, pickle.dumps(build).hex(), root],
        check=False, env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    (lost,) = (name for name in names(tmp_path / "out") if "base-item" in name)
    assert 0 in build.pending("item")
    for partition in range(PARTS):
        write(build, partition)
    build.commit()
    assert lost not in names(tmp_path / "out")
    check(tmp_path / "out", tmp_path / "data")


def test_a_commit_names_what_is_missing(build: tierstore.PartitionedBuild, tmp_path: Path) -> None:
    for partition in (0, 3):
        write(build, partition)
    with pytest.raises(InvalidInput, match=r"table 'item': no task has written the partitions 1, 2"):
        build.commit()
    with pytest.raises(InvalidInput, match=rf"expected {ROWS} rows, got \d+; no task has written the partitions 1, 2"):
        build.commit({"item": ROWS})
    with pytest.raises(InvalidInput, match="got 'itme'"):
        build.commit({"itme": ROWS})


@pytest.mark.thorough
def test_a_partition_that_no_task_was_given_has_no_rows(build: tierstore.PartitionedBuild, tmp_path: Path) -> None:
    """As where an engine calls a task for each group of rows that there is."""
    for partition in range(PARTS):
        build.write("item", partition, items(build, partition), key="id", vector="embedding")
    build.commit({"item": ROWS, "word": 0})
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "out")
        assert not store.model("ctr").lookup("word", ["a"], return_found=True)[1][0]


@pytest.mark.thorough
def test_rows_expire_by_the_time_at_which_the_build_began(tmp_path: Path) -> None:
    made = template(tmp_path / "template", ttl_s="1h", time_column="at")
    build = tierstore.begin_build(made, tmp_path / "out", partitions=2)
    now = int(time.time())
    keys = np.arange(100)
    for partition in range(2):
        mine = keys[build.partition_of("item", keys) == partition]
        times = np.where(mine % 2, now, now - 7200)
        columns = {"id": mine, "v": pa.FixedSizeListArray.from_arrays(vectors(mine).ravel(), 8), "at": times}
        table = pa.table({name: pa.array(column) for name, column in columns.items()})
        build.write("item", partition, table, key="id", vector="v", time_column="at")
        build.write("word", partition, [])
    build.commit({"item": 100})
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "out")
        found = store.model("ctr").lookup("item_id", keys, return_found=True)[1]
        np.testing.assert_array_equal(found, keys % 2 == 1)


def test_what_cannot_be_is_refused_by_name(build: tierstore.PartitionedBuild, tmp_path: Path) -> None:
    names_ = {"key": "id", "vector": "embedding"}
    with pytest.raises(WrongPartition, match=r"table 'item': the task of partition 0 got a row of partition 1"):
        build.write("item", 0, items(build, 1), **names_)
    with pytest.raises(InvalidInput, match="partition: expected 0 to 3, got 4"):
        build.write("item", 4, [])
    with pytest.raises(InvalidInput, match="expected a table of the template, 'item', 'word'; got 'itme'"):
        build.write("itme", 0, [])
    with pytest.raises(InvalidInput, match="expected Arrow record batches, got dict"):
        build.write("item", 0, [{"key": 1}])
    with pytest.raises(SnapshotError, match="table 'item', partition 0: expected one column 'key'"):
        build.write("item", 0, items(build, 0))
    with pytest.raises(SnapshotError, match="table 'item', partition 0: duplicate key"):
        build.write("item", 0, items(build, 0, np.concatenate([KEYS, KEYS[:50]])), **names_)
    with pytest.raises(InvalidInput, match="partitions: expected 2 to"):
        tierstore.begin_build(build.template, tmp_path / "o", partitions=1)
    with pytest.raises(Conflict, match="begun with 4 partitions"):
        tierstore.begin_build(build.template, build.out, partitions=5)
    with tierstore.SnapshotWriter(tmp_path / "other", model="ctr", version=8) as writer:
        writer.table("item", dim=8)
    with pytest.raises(Conflict, match="begun with another template"):
        tierstore.begin_build(tmp_path / "other", build.out, partitions=4)
    with tierstore.SnapshotWriter(tmp_path / "full", model="ctr", version=8) as writer:
        writer.table("item", dim=1).write([1], [[1.0]])
    with pytest.raises(InvalidInput, match="'item' has 1"):
        tierstore.begin_build(tmp_path / "full", tmp_path / "o", partitions=4)
    with pytest.raises(InvalidInput, match="is not empty"):
        tierstore.begin_build(build.template, tmp_path / "full", partitions=4)
    assert names(tmp_path / "out") == {"_build.json"}


def test_a_damaged_receipt_is_named(build: tierstore.PartitionedBuild, tmp_path: Path) -> None:
    write(build, 0)
    receipt = tmp_path / "out/partition-0000/_item.json"
    receipt.write_bytes(receipt.read_bytes()[:-9])
    with pytest.raises(StorageError, match=r"partition-0000/_item\.json is damaged"):
        build.commit()


@pytest.mark.thorough
def test_in_object_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    pytest.importorskip("moto.server", reason="moto's server is not installed")
    from tests.formats.object_server import BUCKET, ObjectServer

    with ObjectServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        out = f"s3://{BUCKET}/built/7"
        build = tierstore.begin_build(template(tmp_path / "template"), out, partitions=PARTS)
        for partition in (1, 2):
            write(build, partition)
        build = tierstore.begin_build(tmp_path / "template", out, partitions=PARTS)
        assert build.pending("item") == [0, 3]
        for partition in range(PARTS):
            write(build, partition)
        with tierstore.open(tmp_path / "no", host_budget="4MiB") as store, pytest.raises(SnapshotError):
            store.load_snapshot(out)
        assert build.commit() == 7
        assert not [name for name in server.names("built/7") if "/_" in name]
        check(out, tmp_path / "data")
        check(out, tmp_path / "own", partition="0/4")
