"""A load that was broken off goes on from what it had finished, and from nothing that is not what it was."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.counts import few_or_many, with_large_counts
from tests.ingest.loads import bulk_load
from tierstore.errors import LoadCancelled, SnapshotError, StorageError
from tierstore.formats.names import JOURNAL
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.formats.snapshot.writer import SnapshotWriter
from tierstore.ingest import load_plan
from tierstore.ingest.journal import Journal
from tierstore.ingest.results import BaseBuild
from tierstore.types import Progress

ROWS = 400_000
SETTINGS = {"memory_bytes": 16 << 20, "workers": 2}

# A load that kills itself, and so its helpers: once `count` tasks of a phase are done, or when a later phase has begun.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.ingest import bulkload, helpers, load_plan

helpers._lower_priority = lambda _: None  # else they would wait for the tests of other processes
root, out, base, phase, count, fan_in = sys.argv[1:]
load_plan._FILE_BYTES, load_plan.MIN_RANGE_BYTES, load_plan.MAX_FAN_IN = 1 << 20, 1 << 20, int(fan_in)
kinds = {"runs": "read", "run": "join", "rows": "write"}
seen = 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Journal(bulkload.Journal):
    def note(self, key, result):
        global seen
        super().note(key, result)
        seen += next((of for name, of in kinds.items() if name in result), None) == phase
        if phase in kinds.values() and seen >= int(count):
            die()

bulkload.Journal = Journal
work = load_plan.LoadWork(16 << 20, 2, progress=lambda step: step.phase == phase and not int(count) and die())
with bulkload.BulkLoad(open_snapshot(root), Path(out), load_plan.FileSpec(base), work) as bulk:
    build = bulk.build()
    bulk.ingest(build, Path(out).with_suffix(".db"), {"watermark": b"0"})
    bulk.read_back(Path(out).with_suffix(".db"))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(3)
    where = tmp_path_factory.mktemp("snapshot") / "s"
    with SnapshotWriter(where, model="ctr", version=1) as snapshot:
        for name, rows in (("item", ROWS), ("user", 1000)):
            writer = snapshot.table(name, dim=8, default="mean", rows_per_shard=rows // 8)
            writer.write(rng.permutation(rows), rng.random((rows, 8), np.float32))
    return where


@pytest.fixture(autouse=True)
def _many_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(load_plan, "MIN_RANGE_BYTES", 1 << 20)


def load(root: Path, out: Path, base: Any = "sealed", **options: Any) -> BaseBuild:
    with bulk_load(open_snapshot(root), out, base=base, **SETTINGS | options) as bulk:
        build = bulk.build()
        db = out.with_suffix(".db")
        shutil.rmtree(db, ignore_errors=True)
        bulk.ingest(build, db, {"watermark": b"0"})
        bulk.read_back(db)
        return build


@pytest.fixture(scope="module")
def whole(root: Path, tmp_path_factory: pytest.TempPathFactory) -> BaseBuild:
    """What a load gives that nothing breaks off."""
    return load(root, tmp_path_factory.mktemp("whole") / "build", workers=1)


def same(build: BaseBuild, whole: BaseBuild) -> bool:
    return all(
        (build.tables[name].rows, build.tables[name].digest) == (of.rows, of.digest)
        and np.array_equal(build.tables[name].mean, of.mean)
        for name, of in whole.tables.items()
    )


def finished(out: Path) -> list[dict[str, Any]]:
    """What the journal says of a load that is over."""
    lines = (out / JOURNAL).read_bytes().split(b"\n")[1:-1]
    return [json.loads(line[17:]) for line in lines]


def rows_of(lines: list[dict[str, Any]]) -> dict[str, int]:
    """Rows that were finished, by phase."""
    rows = {"read": 0, "join": 0, "write": 0}
    for line in lines:
        of = line["result"]
        if "runs" in of:
            rows["read"] += sum(count for _, count in of["runs"])
        elif "run" in of:
            rows["join"] += of["run"][1]
        elif "rows" in of:
            rows["write"] += of["rows"]
    return rows


def killed(root: Path, out: Path, phase: str, count: int, *, base: str = "sealed", fan_in: int = 400) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root), str(out), base, phase, str(count), str(fan_in)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.fixture(scope="module")
def killed_once(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a load was that was killed while it wrote files. The folder `left` beside it has what it has left."""
    out = tmp_path_factory.mktemp("killed") / "build"
    killed(root, out, "write", 6)
    shutil.copytree(out, out.with_name("left"))
    return out


@pytest.fixture
def broken_off(killed_once: Path) -> Path:
    """A load that was killed while it wrote files: at the same path each time, as its journal names it."""
    shutil.rmtree(killed_once, ignore_errors=True)
    return Path(shutil.copytree(killed_once.with_name("left"), killed_once))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("phase", "count", "base", "fan_in"),
    [
        ("read", 4, "sealed", 400),
        ("join", 1, "sealed", 2),
        pytest.param("write", 6, "sealed", 400, marks=with_large_counts),
        ("write", 6, "sealed", 2),
        ("write", 6, "rocksdb", 400),
        ("ingest", 0, "sealed", 400),
        pytest.param("verify", 0, "sealed", 400, marks=with_large_counts),
        ("verify", 0, "rocksdb", 400),
    ],
)
def test_a_load_that_is_killed_in_any_phase_goes_on_from_what_it_had_finished(
    root: Path,
    tmp_path: Path,
    whole: BaseBuild,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    count: int,
    base: str,
    fan_in: int,
) -> None:
    monkeypatch.setattr(load_plan, "MAX_FAN_IN", fan_in)
    out = tmp_path / "build"
    killed(root, out, phase, count, base=base, fan_in=fan_in)
    before = finished(out)
    assert before, "nothing was finished that could be used again"
    steps: list[Progress] = []
    build = load(root, out, base, progress=steps.append)
    assert same(build, whole)
    again = [line["key"] for line in finished(out)[len(before) :]]
    assert not set(again) & {line["key"] for line in before}, "what was finished was done again"
    rows = rows_of(before)
    assert build.kept_rows == {name: count for name, count in rows.items() if name in build.kept_rows}
    assert sum(build.kept_rows.values()) > 0
    if phase in ("ingest", "verify"):
        assert again == []
        assert build.kept_rows["write"] == ROWS + 1000
    first = next(step for step in steps if step.phase == "read")
    assert first.done == rows["read"]


def runs(out: Path) -> list[Path]:
    return sorted(path for path in (out / "runs").iterdir() if path.suffix != ".json")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("phase", "of", "base", "damage"),
    few_or_many(
        [
            ("read", "runs", "sealed", Path.unlink),
            ("write", "files", "sealed", flip),
            ("write", "runs", "sealed", truncate),
            ("write", "files", "rocksdb", flip),
        ],
        [
            (phase, of, base, damage)
            for phase, of, base in (
                ("read", "runs", "sealed"),
                ("write", "files", "sealed"),
                ("write", "runs", "sealed"),
                ("write", "files", "rocksdb"),
            )
            for damage in (truncate, flip, Path.unlink)
        ],
    ),
)
def test_what_is_damaged_of_it_is_made_again_and_not_used(
    root: Path, tmp_path: Path, whole: BaseBuild, phase: str, of: str, base: str, damage: Callable[[Path], None]
) -> None:
    out = tmp_path / "build"
    killed(root, out, phase, 3 if phase == "read" else 6, base=base)
    before = finished(out)
    made = {path for line in before for path, _ in line["result"].get("runs", ())}
    noted = {line["key"] for line in before}  # another helper may have been killed between a file and its line
    files = sorted(path for path in out.glob("base-*") if path.name in noted)
    path = Path(sorted(made)[1]) if of == "runs" else files[len(files) // 2]
    damage(path)
    build = load(root, out, base)
    assert same(build, whole)
    again = {line["key"] for line in finished(out)[len(before) :]} & noted
    assert again == {path.name.rsplit(".", 1)[0] if of == "runs" else path.name}


@pytest.mark.thorough
def test_a_file_that_is_damaged_when_the_runs_are_gone_is_made_again(
    root: Path, tmp_path: Path, whole: BaseBuild
) -> None:
    out = tmp_path / "build"
    killed(root, out, "verify", 0)
    files = sorted(out.glob("base-item-*"))
    flip(files[3])
    before = len(finished(out))
    build = load(root, out)
    assert same(build, whole)
    written = [line["key"] for line in finished(out)[before:] if line["key"].startswith("base-")]
    assert written == [files[3].name]
    assert build.kept_rows["read"] == 1000, "the runs of the other table are not needed"


@pytest.mark.thorough
@pytest.mark.parametrize("spoilt", ["tail", "line", "first", "rubbish"])
def test_a_journal_that_is_damaged_costs_work_and_nothing_else(
    root: Path, broken_off: Path, whole: BaseBuild, spoilt: str
) -> None:
    out = broken_off
    lines = (out / JOURNAL).read_bytes().split(b"\n")
    if spoilt == "tail":
        lines[-2:] = [lines[-2][:-5]]
    elif spoilt == "rubbish":
        lines = [b"\xff\x00 \n" * 5]
    else:
        at = 0 if spoilt == "first" else 2
        lines[at] = lines[at].replace(b"1", b"2")
    (out / JOURNAL).write_bytes(b"\n".join(lines))
    build = load(root, out)
    assert same(build, whole)
    assert (build.kept_rows["read"] > 0) == (spoilt in ("tail", "line"))


@pytest.mark.thorough
def test_a_load_of_another_snapshot_or_plan_uses_nothing_of_it(
    root: Path, tmp_path: Path, broken_off: Path, whole: BaseBuild
) -> None:
    out, left = broken_off, broken_off.with_name("left")
    other = tmp_path / "other"
    shutil.copytree(root, other)
    document = json.loads((other / "snapshot.json").read_text())
    document["delta_seq"] = 7
    (other / "snapshot.json").write_text(json.dumps(document))
    assert load(other, out).kept_rows == {"read": 0, "write": 0}

    shutil.rmtree(out)
    shutil.copytree(left, out)
    with bulk_load(open_snapshot(root), out, memory_bytes=64 << 20, workers=1, base="sealed") as bulk:
        assert bulk.build().kept_rows == {"read": 0, "write": 0}

    shutil.rmtree(out)
    shutil.copytree(left, out)
    assert load(root, out).kept_rows["write"] > 0, "and the very same does"


def test_a_copy_of_the_snapshot_is_the_same_one_and_a_changed_shard_is_not(root: Path, tmp_path: Path) -> None:
    snapshot, copy = open_snapshot(root), tmp_path / "copy"
    shutil.copytree(root, copy, copy_function=shutil.copyfile)
    assert open_snapshot(copy).identity() == snapshot.identity()
    document = json.loads((copy / "snapshot.json").read_text())
    for table in document["tables"]:
        for shard in table["shards"]:
            del shard["xxh3"]
    (copy / "snapshot.json").write_text(json.dumps(document))
    before = open_snapshot(copy).identity()
    assert before != snapshot.identity()
    shard = copy / document["tables"][0]["shards"][0]["path"]
    os.utime(shard, ns=(0, 12345))
    assert open_snapshot(copy).identity() != before


@pytest.mark.thorough
def test_a_load_that_is_cancelled_goes_on_and_one_that_is_refused_leaves_nothing(
    root: Path, tmp_path: Path, whole: BaseBuild
) -> None:
    out, cancelled = tmp_path / "build", threading.Event()

    def cancel(step: Progress) -> None:
        if step.phase == "write" and step.done > 0.5 * step.total:
            cancelled.set()

    with pytest.raises(LoadCancelled):
        load(root, out, progress=cancel, cancelled=cancelled)
    build = load(root, out)
    assert same(build, whole)
    assert build.kept_rows["read"] == ROWS + 1000
    assert build.kept_rows["write"] > 0
    shutil.rmtree(out)

    def refuse(step: Progress) -> None:
        if step.phase == "write":
            raise SnapshotError("not this one")

    with pytest.raises(SnapshotError):
        load(root, out, progress=refuse)
    assert not out.exists()


@pytest.mark.thorough
def test_what_is_left_is_no_more_than_what_the_load_needs(root: Path, tmp_path: Path) -> None:
    """However often it is broken off: half-written files of one attempt do not outlive the next."""
    out = tmp_path / "build"
    with bulk_load(open_snapshot(root), out, base="sealed", **SETTINGS) as bulk:
        bound = bulk.plan.disk_bytes
    for _ in range(3):
        killed(root, out, "write", 2)
        assert sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) <= bound
    for name in ("base-item-0099.sealed", ".tmp-base-item-0001.sealed-abcd", "runs/item-77.0"):
        (out / name).write_bytes(b"left")
    load(root, out)
    assert not (out / "base-item-0099.sealed").exists()
    assert not list(out.glob(".tmp-*"))


@pytest.mark.thorough
def test_room_that_leftovers_take_is_not_asked_for_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "build"
    killed(root, out, "verify", 0)
    usage = shutil.disk_usage(root)
    needed = bulk_load(open_snapshot(root), out, base="sealed", **SETTINGS).plan.disk_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - (8 << 20)))
    load(root, out)
    shutil.rmtree(out)
    with pytest.raises(StorageError, match="free some space"):
        load(root, out)


def test_a_journal_holds_what_was_noted_in_the_order_of_the_last_word(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, {"of": 1})
    journal.note("a", {"rows": 1})
    journal.note("b", {"rows": 2})
    journal.note("a", {"rows": 3})
    journal.close()
    again = Journal(path, {"of": 1})
    assert again.done == {"a": {"rows": 3}, "b": {"rows": 2}}
    again.close()
    other = Journal(path, {"of": 2})
    assert other.done == {}
    other.close()
