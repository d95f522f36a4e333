"""A table that Spark sorts, each executor some partitions of it; nodes only copy what is built.

python examples/spark_build.py      # needs pyspark 4.1, pandas and Java 17; writes `template/`, `built/` and `data/`
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.functions import col

import tierstore

ROWS, PARTITIONS = 50_000, 4


def main() -> None:
    with tierstore.SnapshotWriter("template", model="shop", version=1) as template:  # all of a version but its rows
        template.table("item", dim=4, dtype="float16")
        template.feature("item_id", table="item")
    build = tierstore.begin_build("template", Path("built").absolute(), partitions=PARTITIONS)  # or s3://…

    def numbered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            partitions = pa.array(build.partition_of("item", batch["item_id"]), pa.int32())
            yield batch.append_column("partition", partitions)

    def built(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        rows = build.write("item", context.partitionId(), batches, key="item_id", vector="embedding")
        yield pa.record_batch({"rows": pa.array([rows])})

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    vector = "transform(sequence(0, 3), i -> float(id % 1000 + i)) AS embedding"
    items = spark.range(ROWS).selectExpr("id AS item_id", vector)
    parts = items.mapInArrow(numbered, "item_id long, embedding array<float>, partition int")
    parts = parts.where(col("partition").isin(build.pending("item")))  # started again, it goes on
    parts.repartitionById(PARTITIONS, "partition").mapInArrow(built, "rows long").collect()
    build.commit(rows={"item": items.count()})
    spark.stop()

    with tierstore.open("data", host_budget="64MiB") as store:  # elsewhere: `tierstore load`, on every node
        store.load_snapshot("built")
        keys = np.arange(ROWS)
        rows, found = store.model("shop").lookup("item_id", keys, return_found=True)
        assert found.all()
        np.testing.assert_array_equal(rows, (keys % 1000)[:, None] + np.arange(4))
    print("every row that Spark built is served")


if __name__ == "__main__":
    main()
