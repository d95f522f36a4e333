"""The plan of a load, from sizes alone: at five and at fifty billion rows it stays within what one machine gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.formats.snapshot.manifest import Manifest, TableEntry
from tierstore.ingest.load_plan import MAX_FAN_IN, MAX_FILES, SAMPLES, LoadPlan, plan_load
from tierstore.types import BaseKind

GB, TB = 10**9, 10**12
SHARD_ROWS = 30_000_000
MEMORY = 512 << 20  # the default of load_memory
FILES_OPEN = 1024  # that a process may have open where nobody has raised the limit


def table(rows: int, dim: int = 64, dtype: str = "float16", shard_rows: int = SHARD_ROWS) -> TableEntry:
    shards = [
        {"path": f"part-{first}.parquet", "rows": min(shard_rows, rows - first)} for first in range(0, rows, shard_rows)
    ]
    entry = {"name": "item", "dim": dim, "dtype": dtype, "rows": rows, "shards": tuple(shards)}
    return Manifest.create(model="m", version=1, tables=(entry,)).tables[0]


def planned(rows: int, workers: int = 4, base: BaseKind = "sealed", memory: int = MEMORY, **shape: object) -> LoadPlan:
    return plan_load((table(rows, **shape),), base=base, memory_bytes=memory, workers=workers)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    ("rows", "tasks", "pieces"), [(5 * GB, 10_000, 300_000), (50 * GB, 10_000, 1_000_000)], ids=["5e9", "5e10"]
)
def test_a_table_of_terabytes_is_planned_within_bounds(rows: int, tasks: int, pieces: int, workers: int) -> None:
    load = planned(rows, workers)
    (plan,) = load.tables
    # memory: of a helper, and of who plans (the keys by which ranges are chosen)
    assert max(2 * plan.step_bytes, plan.run_bytes + 2 * plan.batch_bytes) <= load.share_bytes
    assert load.workers * load.share_bytes <= MEMORY
    assert plan.fan_in * SAMPLES * 8 * 4 <= 32 << 20
    # work, and what is opened for it
    assert plan.tasks <= tasks
    assert plan.pieces <= pieces
    assert plan.fan_in + 64 <= FILES_OPEN / 2
    # what stays
    assert 100 <= plan.files <= MAX_FILES
    # reads are long enough for a drive
    assert plan.read_bytes >= 64 << 10
    # and the disk: the table once as runs, once as files
    assert load.scratch_bytes <= 1.05 * plan.bytes
    assert plan.bytes == rows * 136


def test_what_fits_into_few_runs_is_read_and_written_once() -> None:
    (plan,) = planned(400_000_000, 2, dim=16).tables
    assert plan.join(plan.runs) == 1
    assert plan.runs <= 150
    assert plan.files == 60
    assert plan.pieces <= 10_000


def test_files_of_rocksdb_fit_into_memory() -> None:
    (plan,) = planned(1 * GB, base="rocksdb").tables
    assert plan.bytes / plan.files <= plan.step_bytes


@given(
    rows=st.integers(1, 10**11),
    dim=st.sampled_from([1, 16, 64, 4096]),
    memory=st.sampled_from([1, 64 << 20, 512 << 20, 64 << 30]),
    workers=st.integers(1, 64),
    base=st.sampled_from(["sealed", "rocksdb"]),
)
def test_plans_of_any_size_make_sense(rows: int, dim: int, memory: int, workers: int, base: BaseKind) -> None:
    load = planned(rows, workers, base, memory, dim=dim, shard_rows=max(1, rows // 50))
    (plan,) = load.tables
    shards = [shard for group in plan.groups for shard in group]
    assert shards == sorted(shards) == list(range(len(table(rows, dim, shard_rows=max(1, rows // 50)).shards)))
    assert (1 <= load.helpers <= workers) if plan.bytes > 8 << 20 else load.helpers == 0
    assert plan.files >= 1
    assert base != "sealed" or plan.files <= MAX_FILES
    joined = -(-plan.runs // plan.join(plan.runs))
    assert max(joined, plan.join(plan.runs)) == plan.fan_in or plan.join(plan.runs) == 1
    if plan.runs <= MAX_FAN_IN**2:
        assert plan.fan_in <= MAX_FAN_IN


def test_a_load_without_rows_is_nothing() -> None:
    load = plan_load((table(0),), base="sealed", memory_bytes=MEMORY, workers=2)
    assert load.tables[0].files == load.tables[0].runs == 0
    assert load.scratch_bytes == load.disk_bytes == 0
