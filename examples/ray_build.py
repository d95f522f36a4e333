"""A table that Ray sorts, each worker some partitions of it; nodes only copy what is built.

python examples/ray_build.py      # needs ray[data]; writes `items/`, `template/`, `built/` and `data/`
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

import tierstore

ROWS, PARTITIONS = 50_000, 4


def write_data() -> None:
    """Write the table that you would already have."""
    Path("items").mkdir(exist_ok=True)
    for part, keys in enumerate(np.array_split(np.arange(ROWS), 4)):
        vectors = (keys[:, None] % 1000 + np.arange(4)).astype(np.float32)
        columns = {"item_id": keys, "embedding": pa.FixedSizeListArray.from_arrays(vectors.ravel(), 4)}
        pq.write_table(pa.table(columns), f"items/part-{part}.parquet")


def main() -> None:
    write_data()
    with tierstore.SnapshotWriter("template", model="shop", version=1) as template:  # all of a version but its rows
        template.table("item", dim=4, dtype="float16")
        template.feature("item_id", table="item")
    build = tierstore.begin_build("template", Path("built").absolute(), partitions=PARTITIONS)  # or s3://…
    pending = build.pending("item")  # started again, it goes on

    def numbered(batch: pa.Table) -> pa.Table:
        batch = batch.append_column("partition", pa.array(build.partition_of("item", batch["item_id"])))
        return batch.filter(pa.compute.is_in(batch["partition"], pa.array(pending, pa.int64())))

    def built(group: pa.Table) -> pa.Table:
        partition = group["partition"][0].as_py()
        rows = build.write("item", partition, group, key="item_id", vector="embedding")
        return pa.table({"rows": [rows]})

    ray.init(num_cpus=2, include_dashboard=False)
    items = ray.data.read_parquet(str(Path("items").absolute()))
    parts = items.map_batches(numbered, batch_format="pyarrow").groupby("partition", num_partitions=PARTITIONS)
    parts.map_groups(built, batch_format="pyarrow").materialize()
    build.commit(rows={"item": items.count()})
    ray.shutdown()

    with tierstore.open("data", host_budget="64MiB") as store:  # elsewhere: `tierstore load`, on every node
        store.load_snapshot("built")
        keys = np.arange(ROWS)
        rows, found = store.model("shop").lookup("item_id", keys, return_found=True)
        assert found.all()
        np.testing.assert_array_equal(rows, (keys[:, None] % 1000) + np.arange(4))
    print("every row that Ray built is served")


if __name__ == "__main__":
    main()
