"""A directory of Parquet, as Spark writes it, and a table of words: served by two commands.

python examples/parquet_to_served.py      # in any directory; writes `data/`, `items/`, `words.parquet` there
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tierstore

TABLES = """
[tables.item]
path = "items"
key = "item_id"
vector = "embedding"
dtype = "float16"
[tables.item.features]
item_id = {}
clicked = { combiner = "mean" }

[tables.word]
path = "words.parquet"
key = "word"
vector = "f*"
"""


def write_data() -> None:
    """Write the tables that you would already have."""
    Path("items").mkdir()
    for part in range(4):
        ids = np.arange(part * 25, part * 25 + 25)
        columns = {"item_id": ids, "price": ids * 0.5, "embedding": [[i, i / 2, i / 4] for i in ids.tolist()]}
        pq.write_table(pa.table(columns), f"items/part-{part:05d}.snappy.parquet", compression="snappy")
    Path("items/_SUCCESS").touch()
    pq.write_table(pa.table({"word": ["red", "shoe"], "f0": [0.1, 0.2], "f1": [0.3, 0.4]}), "words.parquet")
    Path("tables.toml").write_text(TABLES)


def main() -> None:
    write_data()
    command = [sys.executable, "-m", "tierstore"]
    subprocess.run([*command, "import", "tables.toml", "--model", "shop"], check=True)
    service = subprocess.Popen(
        [*command, "serve", "--port", "0", "--grpc-port", "off"], stdout=subprocess.PIPE, text=True
    )
    assert service.stdout is not None
    try:
        url = service.stdout.readline().split()[-1]
        with tierstore.Client(url) as client:
            rows, found = client.lookup("shop", "item_id", [17, 4711], return_found=True)
            assert rows.tolist() == [[17, 8.5, 4.25], [0, 0, 0]]
            assert found.tolist() == [True, False]
            assert client.lookup_bags("shop", "clicked", [10, 20, 30], [0, 2]).tolist() == [
                [15, 7.5, 3.75],
                [30, 15, 7.5],
            ]
            np.testing.assert_array_equal(client.lookup("shop", "word", ["shoe"]), np.array([[0.2, 0.4]], np.float32))
    finally:
        service.terminate()
        service.wait()
    print("every row is served as it was written")


if __name__ == "__main__":
    main()
