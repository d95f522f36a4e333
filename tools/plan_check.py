"""Checks `tierstore plan` against a real store: bytes on disk and in memory, and the hit rate; and what the store itself says of its cache.

    python -m tools.plan_check --rows 10000000

Writes and loads a snapshot of 16 float16 a row in a temporary directory, gives the host tier room for a share of it, looks
keys up by Zipf's law until the cache has settled in, and counts the second half. Prints planned and measured, and beside them
what trials with sampled look-ups say of the cache with half and with twice the memory: compare that with another `--share`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tierstore
from tierstore.formats.files import tree_bytes
from tierstore.sizing.plan import HOST_ROW_BYTES, Load, bytes_of
from tierstore.sizing.reuse import Zipf, hit_rate
from tierstore.types import StorageDtype

DIM, BATCH = 16, 4096
_TURN = 4  # batches between two samples


@dataclass(frozen=True, slots=True)
class Found:
    """One distribution: measured and planned."""

    exponent: float
    disk_bytes: float
    planned_disk_bytes: float
    memory_bytes: float
    planned_memory_bytes: float
    hit_rate: float
    planned_hit_rate: float
    tried: dict[float, float | None]  # hit rates by how many times the memory, as the store has them


def measure(root: Path, *, rows: int, lookups: int, exponents: Sequence[float], share: float) -> Iterator[Found]:
    """Each distribution in a store of its own, with memory for `share` of the rows."""
    random = np.random.default_rng(1)
    keys = random.permutation(rows)
    with tierstore.SnapshotWriter(root / "snapshot", model="m", version=1, delta_seq=0) as snapshot:
        table = snapshot.table("t", dim=DIM, dtype="float16")
        for start in range(0, rows, 1 << 20):
            part = keys[start : start + (1 << 20)]
            table.write(part, random.normal(size=(len(part), DIM)).astype(np.float16))
        snapshot.feature("f", table="t")
    load = Load(rows, DIM, StorageDtype.FLOAT16)
    for exponent in exponents:
        budget = int(rows * share * (load.row_bytes + HOST_ROW_BYTES))
        data = root / f"data-{exponent}"
        with tierstore.open(data, host_budget=budget, load_workers=1) as store:
            store.load_snapshot(root / "snapshot")
            hits = _hit_rate(store, rows, lookups, exponent)
            state = store.status("m")["models"]["m"]["tables"]["t"]
            memory = state["tier_bytes"]["host"]
            tried = {point["scale"]: point["hit_rate"] for point in state["cache"]["curve"]}
        yield Found(
            exponent,
            tree_bytes(data / "models" / "m"),
            bytes_of(load).version,
            memory,
            budget,
            hits,
            hit_rate(Zipf(exponent), rows * share, rows),
            tried,
        )


def _hit_rate(store: tierstore.Store, rows: int, lookups: int, exponent: float) -> float:
    """The hit rate of the second half of the look-ups: the share that the host tier answered."""
    random = np.random.default_rng(2)
    cumulative = np.cumsum(1.0 / np.arange(1, rows + 1) ** exponent)
    ranks = random.permutation(rows)  # so that heat has nothing to do with the order of keys
    counts = np.zeros(2)
    sampler = store.shared.sampler
    sampler.close()  # its thread would have too little time for look-ups that come one behind the other
    for _half in range(2):
        before = _counts(store)
        for turn in range(lookups // 2 // BATCH):
            if turn % _TURN == 0:
                sampler.step(turn / _TURN)
            drawn = np.searchsorted(cumulative, random.random(BATCH) * cumulative[-1])
            store.model("m").lookup("f", ranks[np.minimum(drawn, rows - 1)])
        counts = _counts(store) - before
    return float(counts[0] / counts.sum())


def _counts(store: tierstore.Store) -> np.ndarray:
    keys = store.status("m")["models"]["m"]["tables"]["t"]["lookup_keys"]
    return np.array([keys["host"], sum(keys.values()) - keys["host"]], np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--lookups", type=int, help="default: ten a row")
    parser.add_argument("--share", type=float, default=0.1, help="of the rows, that there is memory for")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        lookups = wanted.lookups or 10 * wanted.rows
        for found in measure(
            Path(root), rows=wanted.rows, lookups=lookups, exponents=(0.8, 1.0, 1.2), share=wanted.share
        ):
            print(
                f"Zipf {found.exponent}: hit rate {found.hit_rate:.3f}, planned {found.planned_hit_rate:.3f}, "
                f"tried {', '.join(f'{scale:g}: {rate:.3f}' for scale, rate in found.tried.items() if rate is not None)}; "
                f"disk {found.disk_bytes / 1e6:.1f} MB, planned {found.planned_disk_bytes / 1e6:.1f}; "
                f"memory {found.memory_bytes / 1e6:.1f} MB, planned {found.planned_memory_bytes / 1e6:.1f}"
            )


if __name__ == "__main__":
    main()
