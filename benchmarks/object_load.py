"""Loading from object storage, against the load of the same snapshot from local files.

    python -m benchmarks.object_load [--rows 4_000_000] [--dim 32] [--rounds 3] [--outage 60] [--tiny] [--json FILE]

The storage is a server of the S3 protocol on loopback that answers ranges of local files and does little else: nginx's part, in a
hundred lines of Python, because moto's server, which the tests use, spends more of the processors on a byte than the load does. It runs in a
process of its own and shares the processors with the load, as no real storage does. In turns: local, from the server, from the
server while every connection dies after 50 MB. The mark is the local load's time over the one from the server. Beside each time is the
processor time of the load, with its helpers, and of the server.

With `--outage` one more load, during which the server answers 503 to everything for so many seconds once half of the bytes are sent.
"""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import numpy as np

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import HIDDEN, parser_of
from benchmarks.report import headline
from benchmarks.ten_million import keys_of, write

MODEL, BUCKET = "bench", "bucket"
DIES_AFTER = 50 << 20


class Storage(BaseHTTPRequestHandler):
    """HEAD and GET of objects, with ranges, and ListObjectsV2: what a load needs of S3."""

    protocol_version = "HTTP/1.1"
    root: Path
    dies_after = 0
    outage_s = outage_at = 0.0  # how long, and after how many bytes
    away_until_s = 0.0
    sent_by_all = 0
    sent = 0  # over this connection

    def do_GET(self) -> None:
        if time.monotonic() < Storage.away_until_s:
            return self._send(503, b"")
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if "list-type" in query:
            return self._list(query.get("prefix", [""])[0], query.get("delimiter", [""])[0])
        path = self.root / unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")
        if not path.is_file():
            return self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        size = path.stat().st_size
        first, last, status = 0, size - 1, 200
        if asked := self.headers.get("Range"):
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            first, last, status = int(begin), min(int(end or size), size - 1), 206
        self.send_response(status)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("ETag", f'"{_etag(path)}"')
        self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.flush()
            self._send_file(path, first, last)
        return None

    do_HEAD = do_GET

    def _send_file(self, path: Path, first: int, last: int) -> None:
        with open(path, "rb") as file:
            while first <= last:
                if self.dies_after and self.sent >= self.dies_after:
                    self.close_connection = True
                    self.connection.shutdown(2)
                    return
                sent = os.sendfile(self.connection.fileno(), file.fileno(), first, min(last - first + 1, 1 << 20))
                first, self.sent = first + sent, self.sent + sent
                Storage.sent_by_all += sent
                if self.outage_s and not Storage.away_until_s and Storage.sent_by_all > self.outage_at:
                    Storage.away_until_s = time.monotonic() + self.outage_s

    def _list(self, prefix: str, delimiter: str) -> None:
        names = sorted(file.relative_to(self.root).as_posix() for file in self.root.rglob("*") if file.is_file())
        found = [name for name in names if name.startswith(prefix)]
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{(self.root / name).stat().st_size}</Size><ETag>&quot;{_etag(self.root / name)}&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
            for name in found
            if not delimiter or delimiter not in name[len(prefix) :]
        )
        folders = sorted(
            {
                prefix + name[len(prefix) :].split("/")[0] + "/"
                for name in found
                if delimiter and delimiter in name[len(prefix) :]
            }
        )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        self._send(
            200,
            f"<ListBucketResult><Name>{BUCKET}</Name><IsTruncated>false</IsTruncated>{contents}{common}</ListBucketResult>".encode(),
        )

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/xml")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _etag(path: Path) -> str:
    return hashlib.md5(f"{path.stat().st_mtime_ns} {path.stat().st_size}".encode()).hexdigest()


def serve(root: Path, dies_after: int, outage_s: float) -> None:
    """The server process: prints its port, ends with its standard input, and then prints its processor time and bytes sent."""
    Storage.root, Storage.dies_after, Storage.outage_s = root, dies_after, outage_s
    Storage.outage_at = sum(file.stat().st_size for file in (root / "snapshot").rglob("*") if file.is_file()) / 2
    server = ThreadingHTTPServer(("127.0.0.1", 0), Storage)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    began_s = time.process_time()
    sys.stdin.read()
    sys.stdout.write(f"{time.process_time() - began_s} {Storage.sent_by_all}\n")


@contextmanager
def storage(root: Path, dies_after: int, outage_s: float, ended: list[float]) -> Iterator[str]:
    """The URL of a server; `ended` gets its processor seconds and the bytes that it sent."""
    command = [sys.executable, "-m", "benchmarks.object_load", "--serve", str(root)]
    command += ["--dies-after", str(dies_after), "--outage", str(outage_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        ended += map(float, process.communicate()[0].split())


class Measured(NamedTuple):
    seconds: float
    load_cpu_s: float
    server_cpu_s: float = 0.0
    sent: float = 0.0


def load(source: str | Path, data: Path, rows: int) -> Measured:
    """A load into an empty store; a thousand rows are looked up to see that it is right."""
    with tierstore.open(data, host_budget="64MiB") as store:
        began, cpu = time.perf_counter(), cpu_seconds()
        store.load_snapshot(source)
        measured = Measured(time.perf_counter() - began, cpu_seconds() - cpu)
        keys = keys_of(np.linspace(0, rows - 1, 1000).astype(np.int64))
        assert store.model(MODEL).lookup("item_id", keys, return_found=True)[1].all()
    shutil.rmtree(data)
    return measured


def cpu_seconds() -> float:
    """Processor seconds of this process and of the helpers that have ended."""
    return sum(
        of.ru_utime + of.ru_stime for of in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def from_server(root: Path, data: Path, rows: int, *, dies_after: int = 0, outage_s: float = 0.0) -> Measured:

    ended: list[float] = []
    with storage(root, dies_after, outage_s, ended) as url:
        os.environ["AWS_ENDPOINT_URL"] = url
        measured = load(f"s3://{BUCKET}/snapshot", data, rows)
    return measured._replace(server_cpu_s=ended[0], sent=ended[1])


def main() -> None:
    options = parser_of(
        __file__,
        __doc__,
        "tiny",
        rows=4_000_000,
        dim=32,
        rounds=3,
        outage=(0.0, "seconds of an outage in one more load"),
        serve=(Path, HIDDEN),
        dies_after=(0, HIDDEN),
    ).parse_args()
    if options.serve:
        serve(options.serve, options.dies_after, options.outage)
        return
    rows, rounds = (50_000, 1) if options.tiny else (options.rows, options.rounds)
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
    logging.getLogger("tierstore").setLevel(logging.ERROR)  # each range of a connection that dies is a warning
    runs: dict[str, list[Measured]] = {"local": [], "server": [], "dying": []}
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=Path.cwd()) as folder:
        root = Path(folder)
        write(root / "snapshot", rows, options.dim, "float16")
        size = sum(file.stat().st_size for file in (root / "snapshot").rglob("*") if file.is_file())
        for _ in range(rounds):
            runs["local"].append(load(root / "snapshot", root / "data", rows))
            runs["server"].append(from_server(root, root / "data", rows))
            runs["dying"].append(from_server(root, root / "data", rows, dies_after=DIES_AFTER))
        if options.outage:
            runs["outage"] = [from_server(root, root / "data", rows, outage_s=options.outage)]
    medians = {name: Measured(*map(statistics.median, zip(*of, strict=True))) for name, of in runs.items()}
    of_local = {
        name: statistics.median(a.seconds / b.seconds for a, b in zip(runs["local"], of, strict=False))
        for name, of in runs.items()
    }
    print(f"{describe()}; {rows:,} rows of {options.dim} float16, {size / 1e9:.2f} GB, {rounds} rounds\n")
    print("| from | s | M rows/s | of local | CPU s of the load | of the server | sent, of the snapshot |")
    print("|---|---|---|---|---|---|---|")
    for name, run in medians.items():
        cpu = f"{run.load_cpu_s:.1f} | {run.server_cpu_s:.1f} | {run.sent / size:.2f}"
        print(f"| {name} | {run.seconds:.1f} | {rows / run.seconds / 1e6:.2f} | {of_local[name]:.2f} | {cpu} |")
    document = {
        "benchmark": "object_load",
        "machine": describe(),
        "rows": rows,
        "bytes": size,
        "results": [{"from": name, **run._asdict()} for name, run in medians.items()],
        "headlines": [headline("load from an S3 server", "load from local files", of_local["server"], at_least=0.7)],
    }
    report.write(options.json, document)


if __name__ == "__main__":
    main()
