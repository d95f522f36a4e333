"""`tierstore bench`: measures this machine, and how much of that the store gets out of it.

Each figure stands beside a limit of the machine, which is measured in turn with it: memory, the drive, a flush, a
socket. All files are in a temporary directory on the drive that is measured, which is removed at the end.

For one thread. Nothing survives.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.client import Client
from tierstore.config import Settings
from tierstore.engine.model import Model
from tierstore.engine.store import Store
from tierstore.errors import InvalidInput
from tierstore.formats.delta.writer import DeltaWriter
from tierstore.formats.files import drop_from_cache
from tierstore.formats.snapshot.writer import SnapshotWriter
from tierstore.machine import memory_bytes, processors
from tierstore.service.server import ServerThread
from tierstore.sizes import size_text
from tierstore.tiers.host.table import HostTable
from tierstore.types import StorageDtype

MODEL, TABLE, FEATURE = "bench", "item", "item_id"
CALLS = (64, 4096)  # keys of a call in process
REQUESTS = (64, 1024)  # keys of a request over HTTP
COLD_KEYS = 512  # of a call whose rows are on the drive
DELTA_ROWS, DELTAS = 1000, 20
LEAST_ROWS = 10_000
PAGE = 4096
ROUNDS, TURN_S = 9, 0.05
_BATCH = 65_536
_SCATTER = -7046029254386353131  # odd, so that row numbers become distinct keys all over the key space
_SPACE = 5  # times the rows: the snapshot, the version, and files on their way
_TELLING_BYTES = 128 << 20  # of rows: more than the caches of most processors
_FEW_READS_S, _LONG_FLUSH_S, _FEW_HUGE_PAGES = 20_000, 0.005, 0.5  # from which on a note says so
_ECHO = """
import socket, sys
takes, gives = int(sys.argv[1]), bytes(int(sys.argv[2]))
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        missing = takes
        while missing:
            got = len(connection.recv(missing))
            if not got:
                sys.exit()
            missing -= got
        connection.sendall(gives)
"""
Work = Callable[[int], int]  # does piece of work number n; returns how much it was
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: `value` and `limit` in `unit`, which is a rate if it ends in "/s", else a time in seconds."""

    name: str
    unit: str
    value: float
    limit: float
    limit_is: str

    @property
    def share(self) -> float:
        """How much of the limit this is: 1.0 is all that the machine gives."""
        return self.value / self.limit if self.unit.endswith("/s") else self.limit / self.value


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured, and where. `notes` say what about the machine makes the store slow."""

    machine: str
    rows: int
    dim: int
    dtype: str
    seconds: float
    figures: list[Figure]
    notes: list[str]

    def document(self) -> dict[str, Any]:
        figures = [asdict(figure) | {"share": figure.share} for figure in self.figures]
        return asdict(self) | {"figures": figures}


def run(
    where: Path, rows: int = 2_000_000, dim: int = 32, dtype: StorageDtype = StorageDtype.FLOAT32, note: Note = print
) -> Report:
    """Measure the machine, with the drive that `where` is on. Takes about half a minute once kernels are compiled.

    note: told what is measured next. InvalidInput where `where` is no directory or lacks the space; for too few rows.
    """
    if rows < LEAST_ROWS:
        raise InvalidInput(f"expected at least {LEAST_ROWS:,} rows, got {rows:,}")
    if not where.is_dir():
        raise InvalidInput(f"{where} is no directory; expected one on the drive that is to be measured")
    needed, free = _SPACE * rows * (4 * dim + 8), shutil.disk_usage(where).free
    if free < needed:
        raise InvalidInput(
            f"{rows:,} rows need {needed / 2**30:.1f} GiB on the drive of {where}, where {free / 2**30:.1f} GiB are "
            "free; ask for fewer rows, or for another directory"
        )
    began = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="tierstore-bench-", dir=where))
    try:
        bench = _Bench(root, rows, dim, dtype, note)
        figures = list(bench.figures())
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if rows * dim * 4 < _TELLING_BYTES:
        bench.notes.insert(
            0,
            f"{rows:,} rows of {dim} numbers are {size_text(rows * 4 * dim)}, which the processor's caches and those "
            "of the drive may hold: these figures say what a small table gives, and nothing of memory or the drive; "
            "the default, 2,000,000 rows of 32, does",
        )
    machine = f"{processors()} processors, {memory_bytes() / 2**30:.0f} GiB of memory; the drive of {where.resolve()}"
    return Report(machine, rows, dim, dtype.value, time.monotonic() - began, figures, bench.notes)


class _Bench:
    """One run: its directory, its rows, and what it has found about the machine."""

    def __init__(self, root: Path, rows: int, dim: int, dtype: StorageDtype, note: Note) -> None:
        self.root, self.rows, self.dim, self.dtype, self.note = root, rows, dim, dtype, note
        self.rng = np.random.default_rng(1)
        self.notes: list[str] = []

    def figures(self) -> Iterator[Figure]:
        self.note("write a snapshot")
        self._write_snapshot()
        budget = self.rows * (4 * self.dim + 64) * 2 + (64 << 20)
        with Store(self._settings(host_budget=budget, fold_grace_s=0.0)) as store:
            yield self._load(store)
            model = store.model(MODEL)
            yield from self._in_memory(model)
            yield from self._over_http(store)
            yield self._deltas(store)
        with Store(self._settings(host_budget=1 << 20)) as store:
            yield self._cold(store)

    def _settings(self, **own: Any) -> Settings:
        """Defaults: what the environment or a file sets is for other stores."""
        defaults = {name: field.get_default(call_default_factory=True) for name, field in Settings.model_fields.items()}
        return Settings(**defaults | {"data": self.root / "data", "port": 0, "grpc_port": "off"} | own)

    def _write_snapshot(self) -> None:
        with SnapshotWriter(self.root / "snapshot", model=MODEL, version=1) as writer:
            table = writer.table(TABLE, dim=self.dim, dtype=self.dtype.value)
            for first in range(0, self.rows, _BATCH):
                numbers = np.arange(first, min(first + _BATCH, self.rows))
                table.write(keys_of(numbers), self._vectors(len(numbers)))
            writer.feature(FEATURE, table=TABLE)

    def _vectors(self, count: int) -> np.ndarray:
        return self.rng.standard_normal((count, self.dim), dtype=np.float32)

    def _drawn(self, keys: int) -> np.ndarray:
        """Row numbers at random, for 64 calls of so many keys."""
        return self.rng.integers(0, self.rows, (64, keys))

    def _load(self, store: Store) -> Figure:
        self.note("load it, read it back and verify it")
        began = time.perf_counter()
        store.load_snapshot(self.root / "snapshot")
        took_s = time.perf_counter() - began
        nbytes = sum(path.stat().st_size for path in (self.root / "data").rglob("*.sealed"))
        shutil.rmtree(self.root / "snapshot")
        piece = bytes(1 << 20)
        began = time.perf_counter()
        with open(self.root / "written", "wb") as file:
            for _ in range(max(1, nbytes >> 20)):
                file.write(piece)
            os.fsync(file.fileno())
        limit = self.rows / (time.perf_counter() - began)
        os.unlink(self.root / "written")
        return Figure("load a snapshot", "rows/s", self.rows / took_s, limit, "write and flush as many bytes, once")

    def _in_memory(self, model: Model) -> Iterator[Figure]:
        self.note("look up rows in memory")
        for _ in range(2):  # the first time rows are noted, the second time all are let in
            for first in range(0, self.rows, _BATCH):
                model.lookup(FEATURE, keys_of(np.arange(first, min(first + _BATCH, self.rows))))
        with model.view() as view:
            table = view.open_version.tables[TABLE]
            stored = np.ones((self.rows, table.spec.row_bytes), np.uint8)
            assert table.host is not None
            self._note_huge_pages(table.host)
        for count in CALLS:
            drawn = self._drawn(count)
            keys = keys_of(drawn)
            ours, take = _in_turn(
                lambda n, keys=keys: len(model.lookup(FEATURE, keys[n % 64])),  # type: ignore[misc]
                lambda n, drawn=drawn: len(np.take(stored, drawn[n % 64], axis=0)),  # type: ignore[misc]
            )
            name = f"look up {count:,} keys in process, rows in memory"
            yield Figure(name, "rows/s", ours, take, "numpy.take of the rows as they are stored")

    def _note_huge_pages(self, host: HostTable) -> None:
        if (share := host.huge_page_bytes() / host.bytes_in_use) < _FEW_HUGE_PAGES:
            self.notes.append(
                f"the kernel backs {share:.0%} of the cache with huge pages, and look-ups of a large cache may take "
                "twice as long: /sys/kernel/mm/transparent_hugepage/enabled should say madvise or always; some virtual "
                "machines get huge pages only after a while"
            )

    def _over_http(self, store: Store) -> Iterator[Figure]:
        self.note("look up rows over HTTP")
        with ServerThread(store) as server, Client(server.url) as client:
            while client.status()["service"].get("reactors") == "compiling":
                time.sleep(0.1)
            remote = client.model(MODEL)
            for count in REQUESTS:
                keys = keys_of(self._drawn(count))
                with _echo(8 * count + 300, 4 * self.dim * count + 200) as echoed:
                    ours, echo = _in_turn(lambda n, keys=keys: bool(len(remote.lookup(FEATURE, keys[n % 64]))), echoed)  # type: ignore[misc]
                name = f"look up {count:,} keys over HTTP, one connection, the client's time included"
                yield Figure(name, "s", 1 / ours, 1 / echo, "as many bytes there and back over loopback")

    def _deltas(self, store: Store) -> Figure:
        self.note("apply deltas")
        deltas = []
        for seq in range(1, DELTAS + 1):
            where = self.root / "delta.arrow"
            with DeltaWriter(where, model=MODEL, seq=seq, event_time=datetime.now(UTC)) as writer:
                numbers = np.sort(self.rng.choice(self.rows, DELTA_ROWS, replace=False))
                writer.upsert(TABLE, keys_of(numbers), self._vectors(len(numbers)))
            deltas.append(where.read_bytes())

        def flush(number: int) -> int:
            with open(self.root / f"flushed-{number}", "wb") as file:
                file.write(deltas[number])
                file.flush()
                os.fsync(file.fileno())
            return 1

        ours, limit = _in_turn(lambda n: store.apply_delta(deltas[n]).applied, flush, rounds=DELTAS, turn_s=0.0)
        if 1 / limit > _LONG_FLUSH_S:
            self.notes.append(f"the drive takes {1e3 / limit:.0f} ms to flush a file, and each delta waits for that")
        name = f"apply a delta of {DELTA_ROWS:,} rows, durable and visible"
        return Figure(name, "s", 1 / ours, 1 / limit, "write and flush as many bytes")

    def _cold(self, store: Store) -> Figure:
        self.note("look up rows on the drive")
        model, paths = store.model(MODEL), sorted((self.root / "data").rglob("*.sealed"))
        keys = keys_of(self._drawn(COLD_KEYS))

        def forget() -> None:
            for path in paths:
                drop_from_cache(path)

        with Drive(paths) as drive:
            ours, limit = _in_turn(
                lambda n: len(model.lookup(FEATURE, keys[n % 64])), drive.read, before=forget, turn_s=2 * TURN_S
            )
        if limit < _FEW_READS_S:
            self.notes.append(
                f"the drive gives {limit:,.0f} random reads a second, where an NVMe drive gives 100,000 and more: rows "
                "that are not in memory take long. `tierstore plan --reads` says how much memory makes up for it"
            )
        what = f"4 KiB at random, {COLD_KEYS} at once"
        return Figure(f"look up {COLD_KEYS} keys in process, rows on the drive", "rows/s", ours, limit, what)


class Drive:
    """Reads single pages of files at random, all of a call at once: from the drive, as far as no cache has them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._rng, self._into = np.random.default_rng(2), bytearray(PAGE)
        self._files = [os.open(path, os.O_RDONLY) for path in paths]
        self._pages = np.array([os.fstat(file).st_size // PAGE for file in self._files])
        for file in self._files:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # no more than what is asked for

    def __enter__(self) -> Drive:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            os.close(file)

    def read(self, _: int) -> int:
        """Read COLD_KEYS pages. Returns how many."""
        which = self._rng.integers(0, len(self._files), COLD_KEYS)
        wanted = list(zip(which.tolist(), (self._rng.integers(0, self._pages[which]) * PAGE).tolist(), strict=True))
        for file, at in wanted:
            os.posix_fadvise(self._files[file], at, PAGE, os.POSIX_FADV_WILLNEED)
        for file, at in wanted:
            os.preadv(self._files[file], [self._into], at)
        return COLD_KEYS


def keys_of(numbers: np.ndarray) -> np.ndarray:
    """int64 keys of row numbers: distinct, spread over all 64 bits."""
    with np.errstate(over="ignore"):
        return numbers.astype(np.int64) * np.int64(_SCATTER)


def _in_turn(
    ours: Work, limit: Work, before: Callable[[], None] = lambda: None, rounds: int = ROUNDS, turn_s: float = TURN_S
) -> tuple[float, float]:
    """What both do in a second, each in turns of `turn_s` and at least one piece of work: medians over the rounds."""
    rates: tuple[list[float], list[float]] = ([], [])
    numbers = [0, 0]
    for _ in range(rounds):
        for which, work in enumerate((ours, limit)):
            before()
            done, began = 0, time.perf_counter()
            while True:
                done += work(numbers[which])
                numbers[which] += 1
                if (took := time.perf_counter() - began) >= turn_s:
                    break
            rates[which].append(done / took)
    return statistics.median(rates[0]), statistics.median(rates[1])


@contextmanager
def _echo(takes: int, gives: int) -> Iterator[Work]:
    """A process that answers `takes` bytes with `gives` bytes, and the work of asking it once."""
    command = [sys.executable, "-c", _ECHO, str(takes), str(gives)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            with socket.create_connection(("127.0.0.1", int(process.stdout.readline())), timeout=60) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                request, into = bytes(takes), memoryview(bytearray(gives))

                def ask(_: int) -> int:
                    connection.sendall(request)
                    got = 0
                    while got < gives:
                        got += connection.recv_into(into[got:])
                    return 1

                yield ask
        finally:
            process.kill()
