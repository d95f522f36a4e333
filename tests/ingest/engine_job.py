"""A build on Spark or Ray, as a program: `engine_job.py spark OUT TEMPLATE MARKS [fails]`.

The task of partition 0 is killed the first time, after its files and before its receipt. With `fails`, that of the last partition
waits until all others are finished, and raises. Each partition that is sorted leaves a mark.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import tierstore
from tierstore.formats import targets

ROWS, PARTITIONS = 20_000, 4


def vectors(keys: np.ndarray) -> np.ndarray:
    return (keys[:, None] % 1000 + np.arange(4)).astype(np.float32)


class Job:
    """What the tasks do."""

    def __init__(self, build: tierstore.PartitionedBuild, marks: Path, fails: bool) -> None:
        self.build, self.marks, self.fails = build, marks, fails
        self.pending = build.pending("item")

    def number(self, batch: Any) -> Any:
        partitions = pa.array(self.build.partition_of("item", batch["item_id"]), pa.int32())
        return batch.append_column("partition", partitions)

    def sort(self, partition: int, batches: Any) -> int:
        if self.fails and partition == PARTITIONS - 1:
            until = time.monotonic() + 120
            while self.build.pending("item") != [partition] and time.monotonic() < until:
                time.sleep(0.1)
            raise RuntimeError("this task always fails")
        if partition == 0 and not (self.marks / "killed").exists():
            targets._Directory._move = self.killed_before_the_receipt  # type: ignore[method-assign]
        if partition in self.pending:
            (self.marks / f"sorted-{partition}").touch()
        return self.build.write("item", partition, batches, key="item_id", vector="embedding")

    def killed_before_the_receipt(self, path: Path, name: Path) -> None:
        if name.name == "_item.json":
            (self.marks / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def on_spark(job: Job) -> None:
    from pyspark import TaskContext
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import col

    def numbered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from map(job.number, batches)

    def built(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        yield pa.record_batch({"rows": pa.array([job.sort(context.partitionId(), batches)])})

    spark = SparkSession.builder.master("local[2,2]").config("spark.ui.enabled", "false").getOrCreate()
    items = spark.range(ROWS).selectExpr(
        "id AS item_id", "transform(sequence(0, 3), i -> float(id % 1000 + i)) AS embedding"
    )
    parts = items.mapInArrow(numbered, "item_id long, embedding array<float>, partition int")
    parts = parts.where(col("partition").isin(job.pending)).repartitionById(PARTITIONS, "partition")
    parts.mapInArrow(built, "rows long").collect()


def on_ray(job: Job) -> None:
    import ray

    def built(group: pa.Table) -> pa.Table:
        return pa.table({"rows": [job.sort(group["partition"][0].as_py(), group)]})

    keys = np.arange(ROWS)
    table = pa.table({"item_id": keys, "embedding": pa.FixedSizeListArray.from_arrays(vectors(keys).ravel(), 4)})
    ray.init(num_cpus=2, include_dashboard=False)
    parts = ray.data.from_arrow(table).map_batches(job.number, batch_format="pyarrow")
    parts.groupby("partition", num_partitions=PARTITIONS).map_groups(built, batch_format="pyarrow").materialize()


def main() -> None:
    engine, out, template, marks = sys.argv[1:5]
    build = tierstore.begin_build(template, out, partitions=PARTITIONS)
    {"spark": on_spark, "ray": on_ray}[engine](Job(build, Path(marks), "fails" in sys.argv))
    build.commit({"item": ROWS})


if __name__ == "__main__":
    main()
