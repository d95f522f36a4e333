"""What a small delta costs: `python -m benchmarks.small_deltas [--tiny | --full] [--json FILE]`.

Deltas of 1,000 and 10,000 rows × 16 float32, one after the other, each acknowledged before the next: in process and over HTTP,
their folds counted. Beside them, in the same turns, what a plain program does with the same bytes: Arrow decodes them, they are
written to a file and flushed, and a loop of Python puts the rows into a write batch of RocksDB. Processor time of the process
that takes the deltas, of which each contender has its own, so that RocksDB's threads count for whom they work; medians over the
rounds.
"""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import rocksdict

import tierstore
from benchmarks import report
from benchmarks.changing import Service
from benchmarks.machine import describe
from benchmarks.options import HIDDEN, parser_of
from benchmarks.predict_service import MODEL, Served
from benchmarks.wire_lookup import cpu_s

DIM = 16
DELTAS = {1_000: 200, 10_000: 60}  # of one size in a round, by each contender
PLAIN = "Arrow, one flush, a batch of RocksDB"
_PAUSE_S = 2.0  # between looks whether all is folded, which take milliseconds
_DUE_S = 30.0


def write_snapshot(where: Path, rows: int) -> Path:
    with tierstore.SnapshotWriter(where, model=MODEL, version=1) as writer:
        writer.table("item", dim=DIM).write(np.arange(rows, dtype=np.int64), np.zeros((rows, DIM), np.float32))
        writer.feature("item_id", table="item")
    return where


class Deltas:
    """Deltas of random rows of a table; seqs count from 1 over all sizes."""

    def __init__(self, table_rows: int) -> None:
        self._rng, self._table_rows, self._seq = np.random.default_rng(1), table_rows, 0

    def next(self, rows: int) -> bytes:
        self._seq += 1
        sink = io.BytesIO()
        with tierstore.DeltaWriter(sink, model=MODEL, seq=self._seq) as writer:
            keys = self._rng.choice(self._table_rows, rows, replace=False).astype(np.int64)
            writer.upsert("item", keys, self._rng.random((rows, DIM), dtype=np.float32))
        return sink.getvalue()


class Plain:
    """Arrow, one flush and a write batch of RocksDB."""

    def __init__(self, where: Path) -> None:
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        self._where, self._db, self._number = where, rocksdict.Rdict(str(where / "plain"), options), 0
        self._unlogged = rocksdict.WriteOptions()
        self._unlogged.disable_wal = True  # the file is its log

    def apply(self, data: bytes) -> None:
        self._number += 1
        with open(self._where / f"plain-{self._number}", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        reader = pa.ipc.open_stream(data)
        for batch in reader:
            keys = batch.column("key").to_numpy()
            vectors = batch.column("vector").flatten().to_numpy().reshape(len(keys), -1)
            rows = rocksdict.WriteBatch(raw_mode=True)
            for key, vector in zip(keys, vectors, strict=True):
                rows.put(key.tobytes(), vector.tobytes())
            self._db.write(rows, self._unlogged)

    def settle(self) -> None:
        self._db.flush()

    def serve(self) -> None:
        """Do what comes by standard input: deltas, each behind its length, and a length of 0 to settle."""
        while size := sys.stdin.buffer.read(8):
            data = sys.stdin.buffer.read(int.from_bytes(size, "little"))
            self.apply(data) if data else self.settle()
            sys.stdout.buffer.write(b".")
            sys.stdout.buffer.flush()
        self._db.close()


class PlainProcess:
    """`Plain` in a process of its own."""

    def __init__(self, where: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.small_deltas", "--plain", str(where)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def apply(self, data: bytes) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(len(data).to_bytes(8, "little") + data)
        self._process.stdin.flush()
        if self._process.stdout.read(1) != b".":
            raise RuntimeError("the plain program ended")

    def settle(self, pause_s: float) -> None:
        self.apply(b"")
        time.sleep(pause_s)

    def cpu_s(self) -> float:
        return cpu_s(self._process.pid)

    def close(self) -> None:
        self._process.communicate()


def folded(store: tierstore.Store, pause_s: float) -> None:
    until_s = time.monotonic() + _DUE_S
    while store.model(MODEL).publisher.current.overlays:
        if time.monotonic() > until_s:
            raise TimeoutError("deltas were not folded")
        time.sleep(pause_s)


Contender = tuple[
    Callable[[bytes], Any], Callable[[], Any], Callable[[], float]
]  # apply, wait until all is done, a clock


def in_turns(
    contenders: dict[str, Contender], made: Callable[[int], bytes], deltas: dict[int, int], rounds: int
) -> Iterator[dict[str, Any]]:
    for rows, count in deltas.items():
        used: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(rounds + 1):  # one to warm up
            ready = [made(rows) for _ in range(count)]
            for name, (apply, settle, clock) in contenders.items():
                before = clock()
                for data in ready:
                    apply(data)
                settle()
                if turn:
                    used[name].append((clock() - before) / count * 1e3)
        limit = used[PLAIN]
        for name, each in used.items():
            over = statistics.median(mine / theirs for mine, theirs in zip(each, limit, strict=True))
            yield {"rows": rows, "contender": name, "cpu_ms_a_delta": statistics.median(each), "over_plain": over}


def main() -> None:
    options = parser_of(__file__, __doc__, "tiny", "full", plain=(Path, HIDDEN)).parse_args()
    if options.plain is not None:
        Plain(options.plain).serve()
        return
    table_rows, rounds = (20_000, 1) if options.tiny else (400_000, 9 if options.full else 3)
    pause_s = 0.05 if options.tiny else _PAUSE_S
    deltas = {rows: count // 20 for rows, count in DELTAS.items()} if options.tiny else DELTAS
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as folder:
        where = Path(folder)
        source = write_snapshot(where / "snapshot", table_rows)
        with tierstore.open(where / "served", host_budget="256MiB") as store:
            store.load_snapshot(source)
        plain = PlainProcess(where)
        with (
            Served(where / "served", host_budget="256MiB") as served,
            tierstore.open(where / "here", host_budget="256MiB") as store,
        ):
            store.load_snapshot(source)
            service = Service(served.pid, served.port)
            contenders: dict[str, Contender] = {
                PLAIN: (plain.apply, lambda: plain.settle(pause_s), plain.cpu_s),
                "in process": (store.apply_delta, lambda: folded(store, pause_s), time.process_time),
                "HTTP": (
                    lambda data: service.post(f"/admin/models/{MODEL}/deltas", data),
                    lambda: service.wait_until_folded(pause_s=pause_s),
                    lambda: cpu_s(served.pid),
                ),
            }
            results = list(in_turns(contenders, Deltas(table_rows).next, deltas, rounds))
        plain.close()
    document: dict[str, Any] = {"benchmark": "small_deltas", "machine": describe(), "results": results}
    document["headlines"] = [
        report.headline(
            f"a delta of {row['rows']:,} rows, {row['contender']}", PLAIN, row["over_plain"],
            at_most=0.8 if row["rows"] == 1_000 else 0.35,
        )
        for row in results
        if row["contender"] != PLAIN
    ]  # fmt: skip
    report.write(options.json, document)
    print(report.markdown(document))


if __name__ == "__main__":
    main()
