"""Miss ratios of the host tier beside textbook policies: `python -m benchmarks.cache_policy [--quick] [--json FILE]`.

The host tier is the real one, driven as the cascade drives it: look a batch up, then insert the batch's
distinct misses. The others are simulated access by access. A key that misses twice in one batch is
read from disk once, and counted once, as it would be a miss and a hit for the others. All hold the
same number of rows, and only the second half of the stream is counted, when every cache has long been full.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks import access_traces, policy_models, report
from benchmarks.options import parser_of
from tierstore.tiers.host.table import HostTable
from tierstore.types import KeyType, StorageDtype, TableSpec, Tier

BATCH = 512
SHARES = (0.01, 0.02, 0.05, 0.10)
BAR = 1.03  # of S3-FIFO's miss ratio
SPEC = TableSpec("t", KeyType.INT64, 1, StorageDtype.FLOAT32)
MODELS = {
    "lru": policy_models.lru,
    "s3fifo": policy_models.s3fifo,
    "w_tinylfu": policy_models.w_tinylfu,
    "belady": policy_models.belady,
}


@dataclass(frozen=True)
class Stream:
    """A stream of keys to be drawn: `alpha` None is the reuse pattern of production ads models; `drift` as in `draw`."""

    alpha: float | None
    drift: float = 0.0

    @property
    def label(self) -> str:
        name = "ads models" if self.alpha is None else f"Zipf {self.alpha}"
        return name + (f", drift {self.drift:g}" if self.drift else "")

    def draw(self, universe: int, n: int) -> access_traces.Trace:
        weights = (
            access_traces.meta_weights(universe)
            if self.alpha is None
            else access_traces.zipf_weights(universe, self.alpha)
        )
        return access_traces.draw(weights, n, drift=self.drift)


STREAMS = (
    *(Stream(alpha, drift) for alpha in (0.8, 0.9, 1.0, 1.1, 1.2) for drift in (0.0, 0.1, 0.5)),
    Stream(None),
)


def row_bytes_of(spec: TableSpec) -> float:
    """Bytes of memory that a row takes, with all that finds it."""
    probe = HostTable(spec, 1 << 20, default_vector=np.zeros(spec.dim, np.float32))
    row_bytes = probe.bytes_in_use / probe.capacity_rows
    probe.close()
    return row_bytes


def table_for(capacity: int) -> HostTable:
    """A host table of at most, and nearly, `capacity` rows."""
    row_bytes = row_bytes_of(SPEC)
    table = HostTable(SPEC, int(capacity * row_bytes), default_vector=np.zeros(1, np.float32))
    assert 0.85 * capacity < table.capacity_rows <= capacity  # whole sets, of which a small table has few
    return table


def drive(table: HostTable, keys: npt.NDArray[np.int64], batch: int = BATCH) -> npt.NDArray[np.int64]:
    """Misses (distinct keys) of each batch."""
    out, rows = np.empty((batch, table.spec.dim), np.float32), np.zeros((batch, table.spec.row_bytes), np.uint8)
    misses = np.zeros(len(keys) // batch, np.int64)
    for i in range(len(misses)):
        wanted = keys[i * batch : (i + 1) * batch]
        state = np.zeros(batch, np.uint8)
        table.lookup(wanted, out, state)
        missed = np.unique(wanted[state == Tier.PENDING])
        misses[i] = len(missed)
        table.insert(missed, rows[: len(missed)], 0)
    return misses


def measure(
    keys: npt.NDArray[np.int64], universe: int, share: float, models: tuple[str, ...] = tuple(MODELS)
) -> dict[str, float]:
    """Miss ratios of the second half of the stream, by policy, all with as many rows as the table can hold."""
    table = table_for(int(universe * share))
    misses = drive(table, keys)
    half = len(misses) // 2
    counted = slice(half * BATCH, len(misses) * BATCH)
    ratios = {"tierstore": float(misses[half:].sum() / (len(misses) - half) / BATCH)}
    for name in models:
        ratios[name] = float(MODELS[name](keys, universe, table.capacity_rows)[counted].mean())
    table.close()
    return ratios


def main() -> None:
    options = parser_of(__file__, __doc__, "quick").parse_args()
    universe, n = (200_000, 4_000_000) if options.quick else (1_000_000, 20_000_000)
    streams = [s for s in STREAMS if s.alpha in (None, 0.8, 1.2)] if options.quick else list(STREAMS)
    results = []
    print(f"{universe:,} keys, {n:,} accesses, batches of {BATCH}; miss ratios, second half\n")
    print(
        "| stream | rows / keys | LRU | S3-FIFO | W-TinyLFU | Belady | tierstore | of S3-FIFO |\n|---|---|---|---|---|---|---|---|"
    )
    started = time.perf_counter()
    for stream in streams:
        keys = stream.draw(universe, n)
        for share in SHARES:
            ratios = measure(keys, universe, share)
            relative = ratios["tierstore"] / ratios["s3fifo"]
            results.append({"stream": stream.label, "share": share, "miss_ratio": ratios, "of_s3fifo": relative})
            cells = " | ".join(f"{ratios[name]:.4f}" for name in (*MODELS, "tierstore"))
            print(f"| {stream.label} | {share:.0%} | {cells} | {relative:.3f} |", flush=True)
    worst = max(results, key=lambda r: r["of_s3fifo"])
    mean = float(np.mean([r["of_s3fifo"] for r in results]))
    print(
        f"\nworst {worst['of_s3fifo']:.3f} of S3-FIFO ({worst['stream']}, {worst['share']:.0%}), mean {mean:.3f}, bar {BAR}; {time.perf_counter() - started:.0f} s"
    )
    document = {
        "universe": universe,
        "accesses": n,
        "batch": BATCH,
        "worst_of_s3fifo": worst["of_s3fifo"],
        "mean_of_s3fifo": mean,
        "points": results,
    }
    report.write(options.json, document)


if __name__ == "__main__":
    main()
