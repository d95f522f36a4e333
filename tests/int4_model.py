"""A model whose tables have rows of four bits, what it ought to answer, and the check of it, wherever the model is."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tests import int4_rows
from tests.tiers.devices import to_host

DIM = {"odd": 7, "even": 64}
ROWS = 500
COMBINERS = {"odd": "sum", "even": "mean"}


def vectors(table: str, stamp: int, keys: np.ndarray) -> np.ndarray:
    """Before they are rounded: no two rows, and no two stamps, have the same scale, offset or codes."""
    numbers = np.sin(keys[:, None] * 0.37 + stamp + np.arange(DIM[table]) * 1.7) * (1 + keys[:, None] % 13) + stamp
    return np.asarray(numbers, np.float32)


class Model:
    """What was written of the model `ctr`: by table and key the stamp, or -1 where there is no row."""

    def __init__(self) -> None:
        self.stamps = {table: np.full(ROWS + 20, -1) for table in DIM}
        for stamps in self.stamps.values():
            stamps[:ROWS] = 0

    def snapshot(self, where: Path, version: int = 1, delta_seq: int = 0) -> Path:
        with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=delta_seq) as writer:
            for table, dim in DIM.items():
                keys = np.arange(ROWS)
                writer.table(table, dim=dim, dtype="int4").write(keys, vectors(table, 0, keys))
                writer.feature(table, table=table)
                writer.feature(f"{table}_bags", table=table, combiner=COMBINERS[table])
        return where

    def delta(self, seq: int) -> bytes:
        """Changes every seventh row and some of those that there were not, and deletes others."""
        buffer, changed, gone = io.BytesIO(), np.arange(seq, ROWS + 20, 7), np.arange(seq + 1, ROWS, 50)
        with tierstore.DeltaWriter(buffer, model="ctr", seq=seq, event_time=datetime.now(UTC)) as writer:
            for table in DIM:
                writer.upsert(table, changed, vectors(table, seq, changed))
                writer.delete(table, gone)
                self.stamps[table][changed], self.stamps[table][gone] = seq, -1
        return buffer.getvalue()

    def rows(self, table: str, keys: np.ndarray) -> np.ndarray:
        """float32 [n, dim], as stored; zeros where there is none."""
        rows = np.zeros((len(keys), DIM[table]), np.float32)
        for stamp in set(self.stamps[table][keys].tolist()) - {-1}:
            of = self.stamps[table][keys] == stamp
            rows[of] = int4_rows.rounded(vectors(table, stamp, keys[of]))
        return rows

    def check(self, served: Any, **options: Any) -> None:
        """`served` answers rows and bags of every key, to the last bit; it is a model of a store or of a client."""
        keys = np.random.default_rng(1).permutation(ROWS + 20)
        offsets = np.array([0, 0, 3, 9, 200, 201], np.int64)
        for table in DIM:
            expected = self.rows(table, keys)
            got, found = served.lookup(table, keys, return_found=True, **options)
            np.testing.assert_array_equal(to_host(got), expected)
            np.testing.assert_array_equal(found, self.stamps[table][keys] >= 0)
            halves = served.lookup(table, keys, dtype="float16", **options)
            np.testing.assert_array_equal(to_host(halves), expected.astype(np.float16))
            bags = served.lookup_bags(f"{table}_bags", keys, offsets, **options)
            np.testing.assert_array_equal(to_host(bags), pooled(expected, offsets, COMBINERS[table]))


def pooled(rows: np.ndarray, offsets: np.ndarray, combiner: str) -> np.ndarray:
    """Rows of each bag, added in their order in float32; a mean counts absent ones, which are the default, too."""
    out = np.zeros((len(offsets), rows.shape[1]), np.float32)
    for bag, (first, last) in enumerate(zip(offsets, [*offsets[1:], len(rows)], strict=True)):
        if last > first:
            out[bag] = reduce(np.add, rows[first:last]) / np.float32(last - first if combiner == "mean" else 1)
    return out
