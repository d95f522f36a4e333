"""Bulk load through real helper processes: what comes out, what is refused, and what is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.counts import with_large_counts
from tests.ingest.loads import bulk_load
from tests.sealed_files import write_sealed
from tierstore.errors import Corruption, LoadCancelled, SnapshotError, StorageError
from tierstore.formats.keys import as_codes
from tierstore.formats.names import JOURNAL
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.formats.snapshot.writer import SnapshotWriter
from tierstore.ingest import bulkload, load_plan
from tierstore.ingest.helpers import NICENESS, Helpers
from tierstore.ingest.results import BaseBuild
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.disk.sealed import BASES, base_record
from tierstore.tiers.disk.sst import file_xxh3, write_sst
from tierstore.tiers.disk.tier import DiskTier
from tierstore.types import BaseKind, KeyType, Progress

MEMORY = 64 << 20


@pytest.fixture(scope="module")
def readers() -> Iterator[ReaderPool]:
    pool = ReaderPool(1)
    yield pool
    pool.close()


@pytest.fixture(params=["sealed", "rocksdb"])
def base(request: pytest.FixtureRequest) -> BaseKind:
    return request.param


def ingested(build: BaseBuild, db: Path, readers: ReaderPool) -> DiskTier:
    """A disk tier of what was built, as the engine makes it."""
    records = {"watermark": b"0", **(base_record(build.files) if build.base == "sealed" else {})}
    tier = BASES[build.base].create(db, block_cache_bytes=1 << 20, reader=readers)
    tier.ingest([*build.files, write_sst(db.with_suffix(".sst"), records=records, delta=True)])
    return tier


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "build"


@pytest.fixture
def started(own_helpers: None, monkeypatch: pytest.MonkeyPatch) -> list[Helpers]:
    """The helpers that loads have started."""
    made: list[Helpers] = []

    class Recorded(Helpers):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.all_pids = self.pids
            made.append(self)

    monkeypatch.setattr(bulkload, "Helpers", Recorded)
    return made


def load(root: Path, out: Path, **options: Any) -> BaseBuild:
    settings = {"memory_bytes": MEMORY, "workers": 2, "base": "sealed", **options}
    with bulk_load(open_snapshot(root), out, **settings) as bulk:
        return bulk.build()


def refused(root: Path, out: Path, **options: Any) -> SnapshotError:
    with pytest.raises(SnapshotError) as failure:
        load(root, out, **options)
    assert not out.exists(), "nothing is left of a load that failed"
    return failure.value


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], deadline_s: float = 120) -> None:
    end = time.monotonic() + deadline_s  # what has the lowest priority may wait long on a busy machine
    while not condition():
        assert time.monotonic() < end, "took too long"
        threading.Event().wait(0.02)


def one_table(root: Path, keys: Any, vectors: np.ndarray, *, shards: int = 1, name: str = "item", **table: Any) -> Path:
    with SnapshotWriter(root, model="ctr", version=1) as snapshot:
        rows = -(-len(keys) // shards) or None
        writer = snapshot.table(name, dim=vectors.shape[1], rows_per_shard=rows, **table)
        writer.write(keys, vectors)
    return root


# ---- what comes out -------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rows", "workers", "shards"), [(300_000, 2, 3), pytest.param(300_000, 1, 1, marks=with_large_counts), (5, 2, 2)]
)
def test_every_row_comes_out_once_in_files_that_overlap_nowhere(
    tmp_path: Path,
    out: Path,
    readers: ReaderPool,
    monkeypatch: pytest.MonkeyPatch,
    base: BaseKind,
    rows: int,
    workers: int,
    shards: int,
) -> None:
    monkeypatch.setattr(load_plan, "_FILE_BYTES", 3 << 20)
    monkeypatch.setattr(load_plan, "MAX_FAN_IN", 2)
    rng = np.random.default_rng(rows + workers)
    limits = np.iinfo(np.int64)
    keys = np.unique(np.concatenate([rng.integers(limits.min, limits.max, rows), [limits.min, -1, 0, limits.max]]))
    keys = rng.permutation(keys)
    vectors = rng.standard_normal((len(keys), 8), np.float32)
    # the narrowest memory: several runs, several ranges
    build = load(
        one_table(tmp_path / "s", keys, vectors, shards=shards), out, base=base, memory_bytes=8 << 20, workers=workers
    )
    assert len(build.files) > 3 if rows > 5 else len(build.files) == 1
    assert {path.name for path in out.iterdir()} == {JOURNAL, *(file.path.name for file in build.files)}
    if base == "rocksdb":
        assert all(file_xxh3(file.path) == file.xxh3 for file in build.files)
    assert max(file.entries for file in build.files) < 2 * len(keys) / len(build.files) + 10, "ranges are about equal"

    tier = ingested(build, tmp_path / "db", readers)
    assert tier.stats()["l0_files"] <= 1, (
        "files that overlapped would have to wait in level 0, where that of the records may lie"
    )
    content = tier.verify({1: 32})[1]
    table = build.tables["item"]
    assert (content.rows, content.digest) == (table.rows, table.digest) == (len(keys), content.digest)
    order = np.argsort(keys)
    scanned = list(tier.scan(1, 32))
    np.testing.assert_array_equal(np.concatenate([k for k, _ in scanned]), keys[order])
    np.testing.assert_array_equal(np.concatenate([r for _, r in scanned]).view(np.float32), vectors[order])
    np.testing.assert_allclose(table.mean, vectors.mean(axis=0, dtype=np.float64), atol=1e-7)
    tier.close()


def test_tables_of_every_key_type_dtype_and_format_with_ids_in_the_order_of_the_manifest(
    tmp_path: Path, out: Path, readers: ReaderPool, base: BaseKind
) -> None:
    rng = np.random.default_rng(5)
    kinds: list[tuple[str, str, str, Any]] = [
        ("a", "int64", "parquet", np.arange(-100, 100)),
        ("b", "uint64", "safetensors", np.arange(200, dtype=np.uint64) + np.uint64(2**63 - 100)),
        ("c", "string", "arrow", [f"user-{i}" for i in range(200)]),
        ("d", "int64", "npz", np.arange(200)),
        ("e", "int64", "hugectr", np.arange(200)),
    ]
    vectors = rng.standard_normal((200, 4), np.float32).astype(np.float16).astype(np.float32)
    with SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        for name, key, format, keys in kinds:
            table = snapshot.table(name, dim=4, dtype="float16", key=key, format=format, rows_per_shard=70)
            table.write(keys, vectors)
        snapshot.table("empty", dim=3)
    build = load(tmp_path / "s", out, base=base)
    assert build.tables["empty"].rows == 0
    np.testing.assert_array_equal(build.tables["empty"].mean, np.zeros(3, np.float32))
    tier = ingested(build, tmp_path / "db", readers)
    for table_id, (name, key, _, keys) in enumerate(kinds, 1):
        codes = as_codes(keys, KeyType(key))
        order = np.argsort(codes)
        ((scanned, rows),) = tier.scan(table_id, 8)
        np.testing.assert_array_equal(scanned, codes[order])
        np.testing.assert_array_equal(rows.view(np.float16), vectors[order].astype(np.float16))
        assert build.tables[name].rows == 200
    tier.close()


def test_a_load_gives_the_same_digest_and_mean_however_it_is_split(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    keys, vectors = rng.permutation(150_000), rng.standard_normal((150_000, 8), np.float32)
    root = one_table(tmp_path / "s", keys, vectors, shards=4)
    builds = [
        load(root, tmp_path / f"build-{workers}-{memory}", workers=workers, memory_bytes=memory << 20)
        for workers, memory in ((1, 8), (2, 64))
    ]
    assert len(builds[0].files) != len(builds[1].files)
    assert builds[0].tables["item"].digest == builds[1].tables["item"].digest
    np.testing.assert_array_equal(builds[0].tables["item"].mean, builds[1].tables["item"].mean)


def test_progress_counts_every_row_of_both_phases_and_comes_often(tmp_path: Path, out: Path) -> None:
    rng = np.random.default_rng(7)
    root = one_table(tmp_path / "s", rng.permutation(200_000), rng.standard_normal((200_000, 8), np.float32), shards=3)
    seen: list[tuple[float, Progress]] = []
    load(root, out, progress=lambda step: seen.append((time.monotonic(), step)))
    for phase in ("read", "write"):
        steps = [step for _, step in seen if step.phase == phase]
        assert steps[0] == Progress(phase, 0, 200_000)
        assert steps[-1] == Progress(phase, 200_000, 200_000)
        assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert [step.phase for _, step in seen] == sorted(step.phase for _, step in seen), "read comes before write"
    assert len(seen) <= 6 + 20 * (seen[-1][0] - seen[0][0])


@with_large_counts
@pytest.mark.thorough
@pytest.mark.usefixtures("own_helpers")
def test_a_helper_holds_its_share_of_memory_and_not_the_table(own_helpers: None, tmp_path: Path, out: Path) -> None:
    """The table takes 264 MB, twice that while it is merged; the helper may hold 32, its libraries (120), and what a reader holds of a batch (130)."""
    rng = np.random.default_rng(8)
    keys = rng.permutation(1_000_000)
    root = one_table(tmp_path / "s", keys, rng.standard_normal((1_000_000, 64), np.float32), shards=1)
    build = load(root, out, memory_bytes=32 << 20, workers=1)
    assert 20 << 20 < build.helper_peak_bytes < (32 + 120 + 130 + 20) << 20


# ---- what is refused ------------------------------------------------------------------------------------------


def test_a_key_given_twice_is_refused_with_both_places(tmp_path: Path, out: Path) -> None:
    keys = np.arange(1000)
    keys[900] = 17
    error = refused(one_table(tmp_path / "s", keys, np.ones((1000, 4), np.float32), shards=2), out)
    assert error.row == 400
    assert error.file is not None
    assert "duplicate key 17" in error.reason
    assert "row 17" in error.reason
    other = error.reason.split("also in ")[1].split(",")[0]
    assert other != error.file, "the two files are told apart"


def test_a_uint64_key_and_a_string_given_twice_are_shown_as_the_user_wrote_them(tmp_path: Path, out: Path) -> None:
    numbers = np.array([1, 2**64 - 1, 5, 2**64 - 1], np.uint64)
    ones = np.ones((4, 2), np.float32)
    error = refused(one_table(tmp_path / "u", numbers, ones, key="uint64"), out)
    assert f"duplicate key {2**64 - 1}" in error.reason
    assert error.row == 3
    error = refused(one_table(tmp_path / "s", ["a", "it's", "b", "it's"], ones, key="string"), out)
    assert "duplicate key" in error.reason
    assert "it's" in error.reason
    assert error.row == 3


@pytest.mark.parametrize(
    ("dtype", "value", "words"),
    [
        ("float32", np.nan, "NaN"),
        ("float32", -np.inf, "inf"),
        ("float16", 1e6, "large"),
        ("int8", np.nan, "NaN"),
        ("int4", 65520.0, "large"),
    ],
)
def test_a_number_that_cannot_be_stored_is_refused_with_file_and_row(
    tmp_path: Path, out: Path, dtype: str, value: float, words: str
) -> None:
    root = tmp_path / "s"
    vectors = np.ones((1000, 4), np.float32)
    one_table(root, np.arange(1000), vectors, shards=2, format="npz")
    manifest = (root / "snapshot.json").read_text().replace('"float32"', f'"{dtype}"')
    (root / "snapshot.json").write_text(_without_checksums(manifest))
    second = open_snapshot(root).manifest.tables[0].shards[1].path
    bad = np.ones((500, 4), np.float32)
    bad[123, 2] = value
    with open(root / second, "wb") as file:
        np.savez(file, keys=np.arange(500, 1000), vectors=bad)
    error = refused(root, out)
    assert (error.file, error.row) == (second, 123)
    assert words.lower() in error.reason.lower()
    assert "column 2" in error.reason


def _without_checksums(manifest: str) -> str:
    document = json.loads(manifest)
    for table in document["tables"]:
        for shard in table["shards"]:
            shard.pop("xxh3", None)
    return json.dumps(document)


def test_a_wrong_checksum_and_a_wrong_row_count_are_refused_naming_the_file(tmp_path: Path, out: Path) -> None:
    root = one_table(tmp_path / "s", np.arange(1000), np.ones((1000, 4), np.float32), shards=2, format="npz")
    second = open_snapshot(root).manifest.tables[0].shards[1].path
    with open(root / second, "wb") as file:
        np.savez(file, keys=np.arange(500, 999), vectors=np.ones((499, 4), np.float32))
    error = refused(root, out)
    assert error.file == second
    assert "checksum" in error.reason
    manifest = (root / "snapshot.json").read_text()
    (root / "snapshot.json").write_text(_without_checksums(manifest))
    error = refused(root, out)
    assert error.file == second
    assert "500 rows" in error.reason
    assert "499" in error.reason


# ---- what goes wrong around it --------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rng = np.random.default_rng(9)
    return one_table(tmp_path / "s", rng.permutation(400_000), rng.random((400_000, 8), np.float32), shards=4)


@pytest.mark.parametrize("phase", ["read", "write"])
def test_a_killed_helper_is_one_clear_error_and_leaves_what_can_be_gone_on_from(
    root: Path, out: Path, started: list[Helpers], phase: str
) -> None:
    def kill(step: Progress) -> None:
        if step.phase == phase and started and started[0].pids:
            # the kernel takes these before the service, which goes on then
            assert {Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in started[0].pids} == {"1000"}
            os.kill(started[0].pids[0], signal.SIGKILL)

    with pytest.raises(StorageError, match="SIGKILL"):
        load(root, out, progress=kill)
    assert not out.exists() or (out / JOURNAL).exists()
    assert not any(map(is_running, started[0].all_pids))


def test_a_cancelled_load_ends_its_helpers(root: Path, out: Path, started: list[Helpers]) -> None:
    cancelled = threading.Event()

    def cancel(step: Progress) -> None:
        if step.done:
            cancelled.set()

    with pytest.raises(LoadCancelled):
        load(root, out, progress=cancel, cancelled=cancelled)
    assert len(started[0].all_pids) == 2
    assert not any(map(is_running, started[0].all_pids))


def test_an_error_of_the_caller_passes_and_leaves_nothing(root: Path, out: Path, started: list[Helpers]) -> None:
    def fail(step: Progress) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        load(root, out, progress=fail)
    assert not out.exists()
    assert not any(map(is_running, started[0].all_pids))


def test_a_disk_without_room_is_refused_before_anything_is_read(
    root: Path, out: Path, started: list[Helpers], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10 << 20))
    with pytest.raises(StorageError, match=r"10 MiB free.*free some space"):
        load(root, out)
    assert started == []
    assert not out.exists()


def test_leftovers_of_an_earlier_load_are_cleared_away(root: Path, out: Path) -> None:
    (out / "runs").mkdir(parents=True)
    (out / "base-item-0000.sst").write_bytes(b"old")
    build = load(root, out)
    assert {path.name for path in out.iterdir()} == {JOURNAL, *(file.path.name for file in build.files)}


def test_helpers_end_with_a_parent_that_is_killed(root: Path, tmp_path: Path) -> None:
    program = """
import sys, threading
from pathlib import Path
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.ingest.helpers import Helpers
with Helpers(open_snapshot(sys.argv[1]), 2, Path(sys.argv[2])) as helpers:
    print(*helpers.pids, flush=True)
    threading.Event().wait()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(root), str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_running, pids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not any(map(is_running, pids)))


@pytest.mark.thorough
def test_a_program_in_another_directory_with_modules_of_its_own_can_load(root: Path, tmp_path: Path) -> None:
    """Helpers must not pick up what lies in the caller's working directory."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "json.py").write_text("raise RuntimeError('not this one')")
    program = """
import sys
from pathlib import Path
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.ingest.bulkload import BulkLoad
from tierstore.ingest.load_plan import FileSpec, LoadWork
with BulkLoad(open_snapshot(sys.argv[1]), Path(sys.argv[2]), FileSpec(), LoadWork(1 << 26, 1)) as bulk:
    print(bulk.build().tables["item"].rows)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(root), str(tmp_path / "b")],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert done.stdout.strip() == "400000", done.stderr


def test_what_was_ingested_is_read_back_and_compared(tmp_path: Path, out: Path, readers: ReaderPool, base: BaseKind):
    root, db = tmp_path / "snapshot", tmp_path / "db"
    with SnapshotWriter(root, model="ctr", version=1) as writer:
        keys = np.arange(3000, dtype=np.int64)
        writer.table("item", dim=4).write(keys, np.ones((3000, 4), np.float32))
    with bulk_load(open_snapshot(root), out, memory_bytes=MEMORY, workers=1, base=base) as bulk:
        ingested(bulk.build(), db, readers).close()
        bulk.read_back(db)
        other = np.zeros((3000, 16), np.uint8)  # as many rows as before, whole files, and not what was built
        if base == "sealed":
            path, (_, merged) = db / "base/base-item-0000.sealed", bulk.written[0]
            path.unlink()
            exchanged = write_sealed(path, 1, keys, other)
            bulk.written[0] = bulk.written[0][0], replace(merged, xxh3=exchanged.xxh3)
        else:
            disk = BASES[base].open(db, block_cache_bytes=1 << 20, reader=readers)
            disk.ingest([write_sst(tmp_path / "other.sst", tables=[(1, keys, other, None)], delta=True)])
            disk.close()
        with pytest.raises(Corruption, match=r"base-item-0000\.(sst|sealed)"):
            bulk.read_back(db)


def test_what_was_ingested_is_dropped_from_the_cache_and_then_read(
    tmp_path: Path, out: Path, readers: ReaderPool, base: BaseKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, db = tmp_path / "snapshot", tmp_path / "db"
    one_table(root, np.arange(3000), np.ones((3000, 4), np.float32))
    dropped: list[Path] = []
    with bulk_load(open_snapshot(root), out, memory_bytes=MEMORY, workers=1, base=base) as bulk:
        ingested(bulk.build(), db, readers).close()
        run = Helpers.run

        def noted(self: Helpers, tasks: Any, tick: Any) -> list[Any]:
            kept = {db / "base/base-item-0000.sealed"} if base == "sealed" else set(db.glob("*.sst"))
            assert kept <= set(dropped)
            return run(self, tasks, tick)

        monkeypatch.setattr(Helpers, "run", noted)
        monkeypatch.setattr(bulkload, "drop_from_cache", dropped.append)
        bulk.read_back(db)
    assert dropped


@contextmanager
def own_device(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(a file system's root, the image that its device is): what is written to the image is not seen by its cache."""
    image, where = tmp_path / "image", tmp_path / "mounted"
    image.touch()
    os.truncate(image, 64 << 20)
    where.mkdir()
    tools = ("mkfs.ext4", "mount", "umount", "filefrag")
    if os.geteuid() or any(shutil.which(tool) is None for tool in tools):
        pytest.skip("needs root, mkfs.ext4 and filefrag to have a device of its own")
    subprocess.run(["mkfs.ext4", "-q", "-b", "4096", image], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", image, where], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a loop device")
    try:
        yield where, image
    finally:
        subprocess.run(["umount", where], check=True, capture_output=True)


def test_damage_on_the_device_is_found_though_the_cache_has_what_was_written(
    tmp_path: Path, readers: ReaderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_table(tmp_path / "s", np.arange(50_000), np.ones((50_000, 8), np.float32))
    with (
        own_device(tmp_path) as (where, image),
        bulk_load(
            open_snapshot(tmp_path / "s"), where / "build", memory_bytes=MEMORY, workers=1, base="sealed"
        ) as bulk,
    ):
        ingested(bulk.build(), where / "db", readers).close()
        path = where / "db/base/base-item-0000.sealed"
        extents = subprocess.run(["filefrag", "-v", path], check=True, capture_output=True, text=True).stdout
        first = next(line for line in extents.splitlines() if line.split(":")[0].strip() == "0")
        block = int(first.split(":")[2].split("..")[0])
        with monkeypatch.context() as patch:
            patch.setattr(bulkload, "drop_from_cache", lambda path: None)
            with open(image, "r+b") as device:
                device.seek((block + 20) * 4096 + 100)
                device.write(b"\xff" * 64)
                device.flush()
                os.fsync(device.fileno())
            assert b"\xff" * 64 not in path.read_bytes(), "the cache has what was written"
            bulk.read_back(where / "db")
        with pytest.raises(Corruption, match=r"base-item-0000\.sealed: block 19"):
            bulk.read_back(where / "db")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor cannot be shared out")
@pytest.mark.parametrize("aside", [False, True])
def test_helpers_beside_what_serves_leave_half_of_the_processors_to_it(root: Path, tmp_path: Path, aside: bool) -> None:
    mine = os.sched_getaffinity(0)
    with Helpers(open_snapshot(root), 2, tmp_path, aside=aside) as helpers:
        for pid in helpers.pids:
            theirs = os.sched_getaffinity(pid)
            assert os.getpriority(os.PRIO_PROCESS, pid) == NICENESS
            assert (len(theirs) == -(-len(mine) // 2) and theirs < mine) if aside else theirs == mine


# ---- small loads ----------------------------------------------------------------------------------------------


def test_a_small_load_starts_no_process_and_is_refused_and_cancelled_as_others_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: Path
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("tierstore.ingest.helpers.start", start)
    steps: list[str] = []
    root = one_table(tmp_path / "s", np.arange(1000), np.zeros((1000, 4), np.float32), shards=3)
    assert load(root, out, progress=lambda step: steps.append(step.phase)).files
    assert {"read", "write"} <= set(steps)
    keys = np.arange(1000)
    keys[900] = 17
    twice = one_table(tmp_path / "twice", keys, np.zeros((1000, 4), np.float32), shards=3)
    with pytest.raises(SnapshotError, match="17"):
        load(twice, tmp_path / "out-of-twice")
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(LoadCancelled):
        load(root, tmp_path / "out-of-cancelled", cancelled=cancelled)
