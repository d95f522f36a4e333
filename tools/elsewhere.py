"""A service that shares no directory with those who use it: `python -m tools.elsewhere OUT [--rows 1000000]`, on Linux.

It runs with a network of its own, of which only loopback is up, and does not see the directory of those who ask it (root may have that made;
anybody else gets a service with directories of its own). The first snapshot of three tables, one with string keys, is sent to it, the next is imported into it, deltas
follow, versions are switched and rolled back, and what serves in the end is exported, carried away as `kubectl cp` would, and loaded into
another data directory. After each step all rows are compared.

With `--nodes URL[,URL…]` the services are there already: `python tools/elsewhere.py WORK --nodes URL --exports DIR` does what those do who use them, and
needs tierstore alone. Without `--exports` it ends before the export. `tools.first_hour`, tests/deploy/test_first_model.py and tests/deploy/test_image.py run that.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

import tierstore

COMMAND = (sys.executable, "-m", "tierstore")
DIMS = {"item": 32, "user": 8, "query": 4}
TABLES_TOML = """
model = "ctr"
[tables.item]
path = "item-{version}.parquet"
[tables.user]
path = "user-{version}.parquet"
key_type = "uint64"
[tables.query]
path = "query-{version}.parquet"
key_type = "string"
"""
CALL_KEYS = 50_000
Answer = tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]


class Elsewhere:
    """Where services run that see nothing of `hidden`; `beside` runs a command in their network.

    A context manager, which ends with the services ended.
    """

    def __init__(self, hidden: Path) -> None:
        self._hidden = hidden
        self._holder: subprocess.Popen[bytes] | None = None  # holds the network open

    def __enter__(self) -> Elsewhere:
        programs = ("unshare", "nsenter", "ip", "mount")
        if os.geteuid() == 0 and all(map(shutil.which, programs)):
            line = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]
            self._holder = subprocess.Popen(line, stdout=subprocess.PIPE)
            assert self._holder.stdout is not None
            if self._holder.stdout.readline() != b"up\n":  # where even root may not
                self._end()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._holder is not None:
            self._holder.kill()
            self._holder.communicate()
            self._holder = None

    @property
    def apart(self) -> bool:
        """Whether services have a network of their own, and do not see the directory."""
        return self._holder is not None

    def beside(self, command: list[str]) -> list[str]:
        """The command line that runs a command in the network of the services."""
        if self._holder is None:
            return command
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", *command]

    @contextmanager
    def serve(self, folder: Path, port: int, *, python: str = sys.executable, **settings: str) -> Iterator[str]:
        """`tierstore serve` with its data and its empty source root in `folder`. Yields its URL once it is ready."""
        url = f"http://127.0.0.1:{port}"
        (folder / "roots").mkdir(parents=True)
        own = {"data": str(folder / "data"), "source_root": str(folder / "roots"), "port": str(port)}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERSTORE_")}
        environment |= {
            f"TIERSTORE_{name.upper()}": value for name, value in ({"grpc_port": "off"} | own | settings).items()
        }
        line = [python, "-m", "tierstore", "serve"]
        if self.apart:
            hide = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
            line = self.beside([*hide, 'mount -t tmpfs none "$0" && exec "$@"', str(self._hidden), *line])
        with (folder / "log").open("wb") as log:
            service = subprocess.Popen(line, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 300
            while f"tierstore serves {own['data']}" not in (said := (folder / "log").read_text()):
                assert service.poll() is None, said
                assert time.monotonic() < until, said
                time.sleep(0.1)
            yield url
        finally:
            for _ in range(2):  # the second ends what drains
                service.terminate()
            service.wait(60)


# --- what those do who use it


def keys(table: str, rows: int) -> npt.NDArray[np.uint64] | npt.NDArray[np.int64] | npt.NDArray[np.object_]:
    if table == "query":
        return np.array([f"shoes size {row}" for row in range(rows)], object)
    if table == "user":
        return np.arange(rows, dtype=np.uint64) + np.uint64(2**63 - rows // 2)
    return np.arange(rows) * 7 - rows


def vectors(table: str, rows: int, stamp: int) -> npt.NDArray[np.float32]:
    """Of a version, or of the upserts of a delta."""
    return np.random.default_rng([stamp, DIMS[table]]).standard_normal((rows, DIMS[table]), np.float32)


def changed(rows: int, seq: int) -> tuple[slice, slice]:
    """Which rows of each table a delta writes, and which it deletes."""
    return slice(seq, rows, 10), slice(seq + 1, rows, 100)  # the second delta brings back what the first has deleted


def expected(table: str, rows: int, version: int, seqs: range) -> Answer:
    answer, found = vectors(table, rows, version), np.ones(rows, bool)
    for seq in seqs:
        written, deleted = changed(rows, seq)
        answer[written], found[written] = vectors(table, rows, 1000 + seq)[written], True
        answer[deleted], found[deleted] = 0, False
    return answer, found


def write_tables(work: Path, rows: int, version: int) -> Path:
    """Files of the tables, as a job leaves them. Returns the `tables.toml` that names them."""
    for table, dim in DIMS.items():
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors(table, rows, version).ravel()), dim)
        pq.write_table(pa.table({"key": keys(table, rows), "vector": column}), work / f"{table}-{version}.parquet")
    named = work / f"tables-{version}.toml"
    named.write_text(TABLES_TOML.format(version=version))
    return named


def write_delta(work: Path, rows: int, seq: int) -> Path:
    where = work / f"{seq}.arrow"
    written, deleted = changed(rows, seq)
    with tierstore.DeltaWriter(where, model="ctr", seq=seq) as delta:
        for table in DIMS:
            delta.upsert(table, keys(table, rows)[written], vectors(table, rows, 1000 + seq)[written])
            delta.delete(table, keys(table, rows)[deleted])
    return where


def compare(lookup: Callable[..., Answer], rows: int, version: int, seqs: range = range(0)) -> None:
    """All rows of the tables, to the bit."""
    for table in DIMS:
        wanted, there = expected(table, rows, version, seqs)
        for start in range(0, rows, CALL_KEYS):
            part = slice(start, start + CALL_KEYS)
            answer, found = lookup(table, keys(table, rows)[part], return_found=True)
            right = (found == there[part]).all() and answer.tobytes() == wanted[part].tobytes()
            assert right, f"{table} from row {start} on, of version {version} with deltas {list(seqs)}"


def use(urls: list[str], work: Path, exports: Path | None, rows: int) -> None:
    """Bring a model to the services by their URLs alone, and go on with the first.

    exports: where its exports get to; None: somewhere that cannot be seen from here, and so there is none.
    """
    url, at = urls[0], ("--url", urls[0])

    def tierstore_(*words: str | Path) -> None:
        subprocess.run([*COMMAND, *map(str, words)], cwd=work, check=True, stdout=2)

    def check(version: int, seqs: range = range(0), url: str = url) -> None:
        with tierstore.Client(url, token=os.environ.get("TIERSTORE_TOKEN")) as client:
            compare(client.model("ctr").lookup, rows, version, seqs)

    with step(f"the first snapshot is sent, {rows:,} rows of each of {len(DIMS)} tables"):
        tierstore_("import", write_tables(work, rows, 1), "--version", "1", "--out", "snapshot-1")
        if len(urls) > 1:
            tierstore_("rollout", "snapshot-1", "--nodes", ",".join(urls), "--check", "0s")
        else:
            tierstore_("load", "snapshot-1", *at)
    with step("every row read back"):
        for one in urls:
            check(1, url=one)
    with step("the next is imported, and every row read back"):
        tierstore_("import", write_tables(work, rows, 2), "--version", "2", *at)
        check(2)
    with step("back to the first and to the next"):
        for version in (1, 2):
            tierstore_("activate", "ctr", str(version), *at)
            check(version)
    with step("two deltas"):
        for seq in (1, 2):
            tierstore_("delta", write_delta(work, rows, seq), *at)
            check(2, range(1, seq + 1))
    with step("rolled back"):
        tierstore_("rollback", "ctr", *at)
        check(1, range(1, 3))
    if exports is None:
        return
    with step("exported, carried away and loaded elsewhere"):
        tierstore_("export", "ctr", "ctr/3", "--as-version", "3", *at)
        shutil.copytree(exports / "ctr/3", work / "carried")
        tierstore_("load", "carried", "--data", "other")
        with tierstore.open(work / "other") as store:
            compare(store.model("ctr").lookup, rows, 1, range(1, 3))


@contextmanager
def step(name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{time.monotonic() - began:8.1f} s  {name}", flush=True)


def program(urls: list[str], work: Path, exports: Path | None, rows: int, python: str = sys.executable) -> list[str]:
    """The command line of `use`."""
    carried = [] if exports is None else ["--exports", str(exports)]
    return [python, __file__, str(work), "--nodes", ",".join(urls), *carried, "--rows", str(rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="an empty directory")
    parser.add_argument(
        "--nodes", metavar="URL,URL…", help="services that are there already, of which the first exports"
    )
    parser.add_argument("--exports", type=Path, help="where that one's exports get to")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each table")
    given = parser.parse_args()
    out = given.out.resolve()
    if given.nodes is not None:
        use(given.nodes.split(","), out, given.exports, given.rows)
        return 0
    (out / "work").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Elsewhere(out / "work") as there, there.serve(out / "service", port) as url:
        print(f"{'' if there.apart else 'not '}in a network and with mounts of its own", flush=True)
        subprocess.run(there.beside(program([url], out / "work", out / "service/data/exports", given.rows)), check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
