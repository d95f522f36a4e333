"""Built versions: made once from a snapshot, copied by any store, and refused where anything is not as it was."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.collisions import digest, family
from tests.formats.make_golden import built_source
from tierstore.engine.store import Store
from tierstore.errors import Conflict, Corruption, InvalidInput, Locked, SnapshotError, WrongPartition
from tierstore.formats.keys import partition_of
from tierstore.formats.snapshot.built import open_source
from tierstore.ingest import finished_files, load_plan, tasks
from tierstore.types import Progress

GOLDEN = Path(__file__).parents[2] / "schema/golden"
ROWS = 60_000


@pytest.fixture(autouse=True)
def _many_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(load_plan, "MIN_RANGE_BYTES", 1 << 20)


def vectors(keys: np.ndarray) -> np.ndarray:
    return np.repeat((keys % 1000).astype(np.float32)[:, None], 8, axis=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("snapshot") / "s"
    rng = np.random.default_rng(3)
    with tierstore.SnapshotWriter(where, model="ctr", version=7, delta_seq=3) as writer:
        keys = rng.permutation(ROWS) - ROWS // 2
        writer.table("item", dim=8, default="mean", rows_per_shard=ROWS // 4).write(keys, vectors(keys))
        writer.table("word", dim=2, dtype="float16", key="string").write(["a", "b", "c"], np.ones((3, 2)))
        writer.table("none", dim=2)
        writer.warmup("item", np.arange(100))
        writer.request({"item": np.arange(3)})
    return where


@pytest.fixture(scope="module")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_plan, "_FILE_BYTES", 1 << 20)
        patch.setattr(load_plan, "MIN_RANGE_BYTES", 1 << 20)
        assert tierstore.build_snapshot(root, out, load_workers=2) == 7
    return out


@pytest.fixture
def store(tmp_path: Path) -> Store:
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=2, disk_threads=2) as store:
        yield store


def right(store: Store) -> None:
    keys = np.arange(-ROWS, ROWS)
    rows, found = store.model("ctr").lookup("item", keys, return_found=True)
    there = (keys >= -ROWS // 2) & (keys < ROWS // 2)
    np.testing.assert_array_equal(found, there)
    np.testing.assert_array_equal(rows[there], vectors(keys[there]))
    assert (rows[~there] == rows[0]).all()
    assert store.model("ctr").lookup("word", ["b"])[0].tolist() == [1, 1]


def test_a_built_version_is_copied_and_serves_what_the_snapshot_would(
    root: Path, built: Path, store: Store, tmp_path: Path
) -> None:
    phases: list[str] = []
    assert store.load_snapshot(built, progress=lambda step: phases.append(step.phase)) == 7
    assert "copy" in phases
    assert not {"read", "join", "write"} & set(phases), "nothing is sorted"
    right(store)
    assert store.verify().ok
    with tierstore.open(tmp_path / "other", host_budget="4MiB", load_workers=2) as other:
        other.load_snapshot(root)
        mean = other.model("ctr").lookup("item", [ROWS])
        np.testing.assert_array_equal(store.model("ctr").lookup("item", [ROWS]), mean)
        records = [json.loads((of.settings.data / "models/ctr/7/version.json").read_text()) for of in (store, other)]
        tables = [{name: {**of, "strings": None} for name, of in record["tables"].items()} for record in records]
        assert tables[0] == tables[1]
        strings = [record["tables"]["word"]["strings"]["files"] for record in records]
        assert [of[1:] for of in strings[0]] == [of[1:] for of in strings[1]]


def test_it_takes_deltas_and_survives_a_restart_without_what_it_was_copied_from(built: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(built, tmp_path / "copy")
    with tierstore.open(tmp_path / "data", host_budget="4MiB") as store:
        store.load_snapshot(f"file://{copy}")
        shutil.rmtree(copy)
        with tierstore.DeltaWriter(tmp_path / "4.arrow", model="ctr", seq=4, event_time=0) as delta:
            delta.upsert("item", [5], np.full((1, 8), 77, np.float32))
        store.apply_delta(tmp_path / "4.arrow")
    with tierstore.open(tmp_path / "data", host_budget="4MiB") as store:
        assert store.model("ctr").lookup("item", [5, 6])[:, 0].tolist() == [77, 6]


def test_the_same_snapshot_gives_the_same_bytes(root: Path, built: Path, tmp_path: Path) -> None:
    tierstore.build_snapshot(root, tmp_path / "again", load_workers=2)
    names = sorted(path.relative_to(built) for path in built.rglob("*") if path.is_file())
    assert names == sorted(p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*") if p.is_file())
    for name in names:
        assert (built / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def flip(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["base-item-0001.sealed", "built.json", "warmup/item.npy"])
def test_a_damaged_one_is_refused_by_the_name_of_the_file(
    built: Path, store: Store, tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    copy = shutil.copytree(built, tmp_path / "copy")
    if name != "built.json":
        if name.startswith("warmup") and damage is flip:
            (copy / name).write_bytes((copy / name).read_bytes()[:-1] + b"x")
        else:
            damage(copy / name)
    else:
        text = (copy / name).read_text()
        (copy / name).write_text(text.replace('"rows": ', '"rows": 1', 1) if damage is flip else text[:-9])
    if name == "built.json" and damage is Path.unlink:
        (copy / name).unlink()
        name = "snapshot.json"
    with pytest.raises(SnapshotError) as refused:
        store.load_snapshot(copy)
    assert refused.value.file == name
    assert store.models() == []
    store.load_snapshot(built)
    right(store)


def test_a_copy_that_goes_wrong_is_the_disks_fault(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = json.loads((built / "built.json").read_text())["files"][1]
    told: list[int] = []
    source = open_source(built)
    task = tasks.CopyFile(
        "item",
        file["name"],
        str(tmp_path / "copy"),
        file["rows"],
        int(file["digest"], 16),
        file["xxh3"],
        file["bytes"],
    )
    assert finished_files.copy_file(source, task, told.append).rows == sum(told) == file["rows"]
    with monkeypatch.context() as patch:  # where the system cannot copy by itself
        patch.setattr(os, "copy_file_range", _refuse)
        finished_files.copy_file(source, task, told.append)
    assert (tmp_path / "copy").read_bytes() == (built / file["name"]).read_bytes()
    monkeypatch.setattr(finished_files, "drop_from_cache", lambda path: path.name == "copy" and flip(path))
    with pytest.raises(Corruption, match="do not trust this disk"):
        finished_files.copy_file(source, task, told.append)


def _refuse(*_: object) -> int:
    raise OSError(errno.EXDEV, "injected failure")


def test_what_does_not_suit_the_store_or_the_release_is_said(built: Path, tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "data", host_budget="4MiB", base="rocksdb") as store:
        with pytest.raises(SnapshotError, match=r"base.*sealed.*rocksdb"):
            store.load_snapshot(built)
        assert store.models() == []
    copy = shutil.copytree(built, tmp_path / "copy")
    document = json.loads((built / "built.json").read_text())
    for change, words in (({"format": 2}, "another release"), ({"sealed_format": 9}, "sealed"), ({"more": 1}, "more")):
        (copy / "built.json").write_text(json.dumps(document | change))
        with (
            tierstore.open(tmp_path / "data", host_budget="4MiB") as store,
            pytest.raises(SnapshotError, match=words),
        ):
            store.load_snapshot(copy)
    with pytest.raises(SnapshotError, match="built already"):
        tierstore.build_snapshot(built, tmp_path / "twice")


def test_a_directory_that_holds_something_is_refused(root: Path, built: Path, tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="built version already"):
        tierstore.build_snapshot(root, built)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("mine")
    with pytest.raises(InvalidInput, match="not empty"):
        tierstore.build_snapshot(root, tmp_path / "mine")
    assert (tmp_path / "mine/notes").read_text() == "mine"
    with pytest.raises(InvalidInput, match="partitions"):
        tierstore.build_snapshot(root, tmp_path / "none", partitions=0)

    def second(step: Progress) -> None:
        if step.phase == "write":
            with pytest.raises(Locked):
                tierstore.build_snapshot(root, tmp_path / "two")

    tierstore.build_snapshot(root, tmp_path / "two", progress=second)


PROGRAM = """
import os, signal, sys
import tierstore
from tierstore.ingest import build, load_plan
load_plan._FILE_BYTES = load_plan.MIN_RANGE_BYTES = 1 << 20
root, out, when = sys.argv[1:]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if when == "end":
    build.write_built = die
tierstore.build_snapshot(root, out, load_workers=2, progress=lambda step: step.phase == when and step.done and die())
"""


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["write", "end"])
def test_a_build_that_is_killed_goes_on(root: Path, built: Path, tmp_path: Path, when: str) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root), str(out), when],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.raises(SnapshotError):
        open_source(out)
    steps: dict[str, Progress] = {}
    tierstore.build_snapshot(root, out, load_workers=2, progress=lambda step: steps.setdefault(step.phase, step))
    assert steps["read"].done == ROWS + 3
    if when == "end":
        assert steps["write"].done == ROWS + 3
    for path in built.rglob("*"):
        assert path.is_dir() or (out / path.relative_to(built)).read_bytes() == path.read_bytes()
    assert not (out / "build").exists()


def test_partitions_hold_every_key_once_where_the_function_says(root: Path, built: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tierstore.build_snapshot(root, out, partitions=3, load_workers=2, load_memory="16MiB")
    with tierstore.open(tmp_path / "all", host_budget="4MiB") as store:
        store.load_snapshot(out)
        right(store)
        assert store.verify().ok
    keys = np.arange(-ROWS // 2, ROWS // 2)
    whole = json.loads((built / "built.json").read_text())["tables"]
    total = 0
    for partition in range(3):
        with tierstore.open(tmp_path / f"data-{partition}", host_budget="4MiB") as store:
            store.load_snapshot(out / f"partition-{partition:04}")
            mine = keys[partition_of(keys, 3) == partition]
            rows, found = store.model("ctr").lookup("item", mine, return_found=True)
            assert found.all()
            np.testing.assert_array_equal(rows, vectors(mine))
            words = partition_of(np.array([digest(word) for word in "abc"]), 3)
            assert store.verify().rows == len(mine) + np.count_nonzero(words == partition)
            with pytest.raises(WrongPartition, match=f"has partitions {partition}"):
                store.model("ctr").lookup("item", keys)
        document = json.loads((out / f"partition-{partition:04}/built.json").read_text())
        assert document["tables"][0]["mean"] == whole[0]["mean"]
        total += int(document["tables"][0]["digest"], 16)
    assert f"{total % 2**64:016x}" == whole[0]["digest"]


def test_keys_that_collide_are_built_under_codes_of_their_own(tmp_path: Path) -> None:
    twins, others = family(3), [f"w{i}" for i in range(500)]
    values = np.arange(503, dtype=np.float32)[:, None]
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as writer:
        writer.table("word", dim=1, key="string").write([*twins, *others], values)
    tierstore.build_snapshot(tmp_path / "s", tmp_path / "one", load_workers=1)
    tierstore.build_snapshot(tmp_path / "s", tmp_path / "four", partitions=4, load_workers=1)
    with tierstore.open(tmp_path / "data", host_budget="4MiB") as store:
        store.load_snapshot(tmp_path / "one")
        np.testing.assert_array_equal(store.model("ctr").lookup("word", [*twins, *others]), values)
    home = int(partition_of(np.array([digest(twins[0])]), 4)[0])
    for partition in range(4):
        with tierstore.open(tmp_path / f"data-{partition}", host_budget="4MiB") as store:
            store.load_snapshot(tmp_path / f"four/partition-{partition:04}")
            mine = partition_of(np.array([digest(word) for word in (*twins, *others)]), 4) == partition
            assert mine[:3].all() == mine[:3].any() == (partition == home)
            words = [word for word, own in zip((*twins, *others), mine, strict=True) if own]
            np.testing.assert_array_equal(store.model("ctr").lookup("word", words), values[mine])


def test_the_partition_of_a_key_is_what_the_schema_says() -> None:
    codes = np.array([0, 1, -1, 2**63 - 1, 42], np.int64)
    assert partition_of(codes, 16).tolist() == [10, 5, 0, 4, 7]
    assert partition_of(codes, 3).tolist() == [2, 0, 2, 0, 0]
    assert partition_of(codes, 1).tolist() == [0] * 5


def test_a_digest_of_rows_is_what_the_schema_says() -> None:
    """Of the golden table `unsigned`: bfloat16 rows of one number, 2 bytes."""

    def mix(x: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = ((x ^ x >> 33) * factor) % 2**64
        return x ^ x >> 33

    total = 0
    for code, row in ((0, 0x3F80), (1 << 63, 0x4000), ((1 << 64) - 1, 0x4040)):
        h = mix((code + 0x9E3779B97F4A7C15) % 2**64) ^ 2
        h = (h ^ row) * 0xFF51AFD7ED558CCD % 2**64
        total += mix(h ^ h >> 29)
    table = json.loads((GOLDEN / "built/built.json").read_text())["tables"][2]
    assert f"{total % 2**64:016x}" == table["digest"]


def test_todays_builder_writes_the_golden_files_byte_for_byte(tmp_path: Path) -> None:
    tierstore.build_snapshot(built_source(GOLDEN, tmp_path / "s"), tmp_path / "out", load_workers=1)
    golden = sorted(
        path.relative_to(GOLDEN / "built-hashed") for path in (GOLDEN / "built-hashed").rglob("*") if path.is_file()
    )
    assert len(golden) == 6
    assert golden == sorted(p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*") if p.is_file())
    for name in golden:
        assert (tmp_path / "out" / name).read_bytes() == (GOLDEN / "built-hashed" / name).read_bytes(), name


@pytest.mark.parametrize("name", ["built", "built-hashed"])
def test_todays_store_loads_the_golden_files(store: Store, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("tierstore.engine.operations.load._check_dense", lambda *_: None)  # its dense part is none
    store.load_snapshot(GOLDEN / name, activate=False)
    monkeypatch.setattr(type(store.model("golden").dense), "open", lambda *_, **__: None)
    store.activate("golden", 20261120)
    model = store.model("golden")
    keys = [-(1 << 63), -1, 0, 7, (1 << 63) - 1]
    numbers = np.arange(10, dtype=np.float32).reshape(5, 2) / 4 - 1
    np.testing.assert_array_equal(model.lookup("item_id", keys), numbers)
    np.testing.assert_array_equal(model.lookup("item_id", [5]), numbers.mean(0, keepdims=True))
