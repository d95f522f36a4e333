"""What it costs look-ups to be observed: server CPU with sampling of the cache, metrics and traces on, over that without.

    python -m benchmarks.observed [--quick] [--rows 200_000] [--keys 64 1024] [--json FILE]

Two servers on loopback over the same rows, all in memory, take turns, a round each, on one connection, over HTTP/1.1 and gRPC. Of one the
metrics are read each second, `traces` are on, and its cache is sampled, as it is by default; of the other none of that is so. No request has a
`traceparent` that is sampled: such a one is answered by Python, at the wish of who sends it. CPU is the server process's own clock, with
all that its other threads do meanwhile.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.tls import measure, wait_until_warm
from benchmarks.wire_lookup import child
from benchmarks.wire_table import ROW_BYTES

EVERY_S = 1.0


class Collector(BaseHTTPRequestHandler):
    """Takes spans, and throws them away."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@contextmanager
def scraped(port: int) -> Iterator[None]:
    """Meanwhile its metrics are read."""
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(EVERY_S):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                answer.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def main() -> int:
    options = parser_of(__file__, __doc__, "quick", rows=200_000, keys=[64, 1024]).parse_args()
    rounds, requests = (5, 200) if options.quick else (25, 1000)
    program = str(Path(__file__).with_name("wire_servers.py"))
    cases = {"off": ["--unsampled"], "on": ["--traces"]}
    servers: dict[str, tuple[int, int, Path | None]] = {}
    with ExitStack() as stack:
        root, url = (
            stack.enter_context(tempfile.TemporaryDirectory(prefix="observed-")),
            stack.enter_context(collector()),
        )
        here = [
            "env",
            f"OTEL_EXPORTER_OTLP_ENDPOINT={url}",
            f"PYTHONPATH={Path(__file__).parents[1]}",
            sys.executable,
            "-P",
            program,
        ]
        for name, more in cases.items():
            where = Path(root, name)
            where.mkdir()
            words = ["store", "--where", str(where), "--rows", str(options.rows)]
            pid, ports = stack.enter_context(child(*here, *words, *more))
            servers[name] = pid, ports[0], None
            wait_until_warm(ports[0], None)
        stack.enter_context(scraped(servers["on"][1]))
        print(f"{describe()}; {options.rows:,} rows of {ROW_BYTES} bytes; medians of {rounds} rounds of {requests}\n")
        print("| | keys | observed | CPU us | over off | p50 us |\n|---|---|---|---|---|---|")
        results = measure(servers, options.keys, options.rows, rounds, requests, against="off")
    marks = [
        report.headline(
            f"{row['way']}, {row['keys']} keys, observed, server CPU", "not observed", row["over_off"], at_most=1 / 0.98
        )
        for row in results
        if row["server"] == "on"
    ]
    document = {
        "benchmark": "observed",
        "machine": describe(),
        "rounds": rounds,
        "headlines": marks,
        "results": results,
    }
    report.write(options.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
