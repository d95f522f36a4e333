#!/usr/bin/env bash
# PyIceberg's reader of batches reads the whole table into memory while its caller holds the first batch.
#
# Guess: `scan().to_arrow_batch_reader()` is for tables that are larger than memory. Its documentation says that it takes
# less memory than `to_arrow()`, because a batch is read at a time.
# What happens: each data file becomes a task of a thread pool, which reads all batches of its file into a list, and all
# tasks are handed over at once. The first batch comes when the first file is read; the pool then goes on with
# all others, whether somebody asks for a batch or not, and keeps what it has read.
# Why it matters: an embedding table is most often larger than what the job that publishes it may take, and such a job
# is killed for memory although it reads batch by batch. One task of `plan_files()` at a time
# (`ArrowScan(…).to_record_batches([task])`) holds one data file and
# what reading it takes.
# Source: https://github.com/apache/iceberg-python/blob/pyiceberg-0.12.0/pyiceberg/io/pyarrow.py (ArrowScan.to_record_batches),
# https://py.iceberg.apache.org/api/#apache-arrow
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check 'pyiceberg[sql-sqlite]==0.12.0' pyarrow==26.0.1 numpy==2.4.6

cat > "$work/run.py" <<'PY'
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyiceberg
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import ArrowScan

FILES, ROWS, DIM = 12, 16384, 64
BYTES = ROWS * DIM * 4  # numbers of a data file
catalog = SqlCatalog("c", uri="sqlite:///:memory:", warehouse=Path(sys.argv[1]).as_uri())
catalog.create_namespace("shop")
kind = pa.schema([("item_id", pa.int64()), ("embedding", pa.list_(pa.float32()))])
table = catalog.create_table("shop.items", schema=kind)
for part in range(FILES):
    numbers = pa.array(np.random.default_rng(part).normal(size=ROWS * DIM).astype("f4"))
    lists = pa.ListArray.from_arrays(pa.array(np.arange(ROWS + 1, dtype="i4") * DIM), numbers)
    table.append(pa.table({"item_id": pa.array(np.arange(ROWS) + part * ROWS), "embedding": lists}, schema=kind))
    del numbers, lists
print("pyiceberg", pyiceberg.__version__, "-", FILES, "data files of", BYTES >> 20, "MiB of numbers")


def held(before):
    """What Arrow has allocated since, in data files; the most within a minute, or as soon as it is nearly all."""
    most, end = 0.0, time.monotonic() + 60
    while most < FILES - 1 and time.monotonic() < end:
        most = max(most, (pa.total_allocated_bytes() - before) / BYTES)
        time.sleep(0.05)
    return most


before = pa.total_allocated_bytes()
reader = table.scan().to_arrow_batch_reader()
first = reader.read_next_batch()
all_files = held(before)
print(f"to_arrow_batch_reader: one batch of {len(first)} rows was asked for; {all_files * BYTES / 2**20:.0f} MiB are in memory")
del first
rows = ROWS + sum(map(len, reader))
del reader
assert rows == FILES * ROWS, rows

before, most = pa.total_allocated_bytes(), 0.0
scan = table.scan()
one_by_one = ArrowScan(scan.table_metadata, scan.io, scan.projection(), scan.row_filter)
for task in scan.plan_files():
    for batch in one_by_one.to_record_batches([task]):
        most = max(most, (pa.total_allocated_bytes() - before) / BYTES)
print(f"a task at a time: at most {most * BYTES / 2**20:.0f} MiB are in memory, of all {FILES * BYTES >> 20}")
if not (all_files > FILES - 1 and most < FILES / 2):
    raise SystemExit("this has changed")
PY
"$work/venv/bin/python" "$work/run.py" "$work"
