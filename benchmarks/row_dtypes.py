"""What a storage dtype takes and costs: `python -m benchmarks.row_dtypes [--tiny | --full] [--json FILE]`.

Rows of float32, float16, int8 and int4, beside each other: bytes of a row on disk and in memory; keys a second with all rows
in memory, of calls in turn; the hit rate of one budget of memory, by Zipf's law; and, of the demo's click model, how far
numbers are off and the AUC of the newest events.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from benchmarks import access_traces, cache_policy, report
from benchmarks.alternation import alternate, one_thread, ratio
from benchmarks.contenders import Rows, Tierstore, keys_of
from benchmarks.footprint import file_bytes
from benchmarks.lookup_peers import check
from benchmarks.machine import describe
from benchmarks.options import parser_of
from tierstore.demo.clicklog import WorldSize, item_keys, user_keys
from tierstore.demo.graph import CLICKED, ITEM, USER
from tierstore.demo.scoring import auc
from tierstore.demo.shop import Shop
from tierstore.demo.trainer import DIM
from tierstore.tiers.host.table import HostTable
from tierstore.types import KeyType, StorageDtype, TableSpec

DTYPES = (StorageDtype.FLOAT32, StorageDtype.FLOAT16, StorageDtype.INT8, StorageDtype.INT4)
DIMS = (16, 32, 64, 128)
BATCH = 4096
ZIPF, MEMORY = 1.05, 0.05  # the budget holds so large a share of the rows of float32
SIZES = {  # rows, rounds, seconds of a block, look-ups of the trace, share of the demo's world
    "tiny": (5_000, 2, 0.002, 1 << 15, 0.002),
    "default": (1_000_000, 21, 0.01, 1 << 22, 1.0),
    "full": (4_000_000, 41, 0.02, 1 << 24, 1.0),
}


def bytes_on_disk(dim: int, dtype: StorageDtype, rows: int, folder: Path) -> float:
    """Of a row, of a version that was loaded: all files of the store over its rows."""
    with tierstore.SnapshotWriter(folder / "snapshot", model="m", version=1) as writer:
        table, rng = writer.table("item", dim=dim, dtype=dtype), np.random.default_rng(dim)
        for begin in range(0, rows, 1 << 18):
            positions = np.arange(begin, min(rows, begin + (1 << 18)))
            table.write(keys_of(positions), rng.standard_normal((len(positions), dim), np.float32))
        writer.feature("item", table="item")
    with tierstore.open(folder / "data", host_budget="8MiB", load_workers=1) as store:
        store.load_snapshot(folder / "snapshot")
        return file_bytes(folder / "data" / "models") / rows


def in_memory(dim: int, rows: int, rounds: int, block_s: float) -> list[dict[str, Any]]:
    """Look-ups of rows that are all there, of one dtype after the other: what a key takes, and the rate in processor time over int8's."""
    tables = {dtype: Rows(rows, dim, dtype) for dtype in DTYPES}
    ours = {dtype: Tierstore(of) for dtype, of in tables.items()}
    out, works = np.empty((BATCH, dim), np.float32), {}
    for dtype, table in ours.items():
        resident = table.resident(tables[dtype])
        calls = [np.random.default_rng(i).choice(resident, BATCH) for i in range(max(8, rows // BATCH))]
        keys = [keys_of(positions) for positions in calls]

        def work(i: int, look_up: Callable[..., Any], keys: list[np.ndarray]) -> None:
            look_up(keys[i % len(keys)], out)

        asked = partial(work, look_up=table.session(), keys=keys)
        check(f"{dim} {dtype}", tables[dtype], calls[0], asked, out)
        works[dtype.value] = one_thread(asked)
    samples = alternate(works, BATCH, rounds, block_s)
    for table in ours.values():
        table.close()
    return [
        {"part": "in memory", "dim": dim, "dtype": dtype.value, **samples[dtype].as_dict(),
         "of_int8": ratio(samples[dtype].per_cpu_second(), samples["int8"].per_cpu_second())}
        for dtype in DTYPES
    ]  # fmt: skip


def hit_rate(dim: int, dtype: StorageDtype, rows: int, accesses: int) -> float:
    """Of the second half of a trace, with the memory that a share of the rows would take as float32."""
    budget = MEMORY * rows * cache_policy.row_bytes_of(TableSpec("t", KeyType.INT64, dim, StorageDtype.FLOAT32))
    table = HostTable(
        TableSpec("t", KeyType.INT64, dim, dtype), max(1 << 16, int(budget)), default_vector=np.zeros(dim, np.float32)
    )
    keys = access_traces.draw(access_traces.zipf_weights(rows, ZIPF), accesses)
    misses = cache_policy.drive(table, keys)
    table.close()
    half = len(misses) // 2
    return 1 - float(misses[half:].sum()) / (len(misses) - half) / cache_policy.BATCH


def click_model(scale: float, folder: Path) -> list[dict[str, Any]]:
    """The demo's model after its day and all of its minutes: how far stored numbers are off, and the AUC of newest events."""
    shop = Shop(WorldSize.scaled(scale, minutes=10), seed=1)
    shop.learn_day()
    for _ in range(shop.size.minutes):
        shop.next_delta()
    found = []
    for dtype in DTYPES:
        with tierstore.SnapshotWriter(folder / dtype / "snapshot", model="ctr", version=1) as writer:
            user, item = (writer.table(name, dim=DIM, dtype=dtype) for name in ("user", "item"))
            user.write(user_keys(np.arange(len(shop.trainer.user))), shop.trainer.user)
            there = np.flatnonzero(shop.item_exists)
            item.write(item_keys(there), shop.trainer.item[there])
            for name, table, combiner in ((USER, "user", None), (ITEM, "item", None), (CLICKED, "item", "mean")):
                writer.feature(name, table=table, combiner=combiner)
        with tierstore.open(folder / dtype / "data", host_budget="1GiB", load_workers=1) as store:
            store.load_snapshot(folder / dtype / "snapshot")
            model, events = store.model("ctr"), shop.newest
            bags = model.lookup_bags(CLICKED, item_keys(events.history), events.starts[:-1])
            rows = (model.lookup(USER, user_keys(events.users)), model.lookup(ITEM, item_keys(events.items)), bags)
            served = auc(shop.trainer.dense.score(*rows, events.context), events.clicked)
        off = {
            f"{table.name}_{what}": getattr(table.rounding, what)
            for table in (user, item)
            for what in ("largest", "mean")
        }
        found.append(
            {
                "part": "click model",
                "dtype": dtype.value,
                "auc": served,
                "auc_lost": (found[0]["auc"] if found else served) - served,
                **off,
            }
        )
    return found


def main() -> None:
    options = parser_of(__file__, __doc__, "tiny", "full").parse_args()
    rows, rounds, block_s, accesses, scale = SIZES["tiny" if options.tiny else "full" if options.full else "default"]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tierstore-dtypes-") as scratch:
        for dim in DIMS:
            for dtype in DTYPES:
                spec, folder = TableSpec("t", KeyType.INT64, dim, dtype), Path(scratch) / f"{dim}-{dtype}"
                results.append(
                    {"part": "a row", "dim": dim, "dtype": dtype.value, "bytes": spec.row_bytes,
                     "disk_bytes_a_row": bytes_on_disk(dim, dtype, rows // 4, folder),
                     "memory_bytes_a_row": cache_policy.row_bytes_of(spec), "hit_rate": hit_rate(dim, dtype, rows, accesses)}
                )  # fmt: skip
            results += in_memory(dim, rows, rounds, block_s)
        results += click_model(scale, Path(scratch))
    slowest = min(row["of_int8"] for row in results if row.get("of_int8") is not None and row["dtype"] == "int4")
    marks = [
        report.headline("keys a second of int4 rows in memory", "int8 rows, the slowest dim", slowest, at_least=0.7)
    ]
    document = {"benchmark": "row_dtypes", "machine": describe(), "headlines": marks, "results": results}
    print(report.markdown(document))
    report.write(options.json, document)


if __name__ == "__main__":
    main()
