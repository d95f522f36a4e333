"""What TLS adds to a look-up: server CPU and p50 beside the same in clear, over HTTP/1.1 and gRPC.

    python -m benchmarks.tls [--quick] [--rows 200_000] [--keys 64 1024] [--before FOLDER] [--json FILE]

Servers are processes of their own on loopback, over the same rows, all in memory: one in clear, one with TLS, and with `--before`
one with TLS that runs the package of another checkout. They take turns, a round each, on one connection; figures are medians
over the rounds, ratios medians of each round's ratio. CPU is the server process's own clock, p50 what the client sees: it
decrypts too. Both go to the HTTP port. Needs the program openssl and grpcio.
"""

from __future__ import annotations

import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.wire_lookup import child, connect, cpu_s, http_request, read_http
from benchmarks.wire_table import ROW_BYTES, keys_of

METHOD = "/inference.GRPCInferenceService/ModelInfer"
PATIENCE_S = 300.0
LEARNED = 200  # requests before the first round
VARIANTS = 16


def certificate(root: Path) -> Path:
    """A file with a key and its certificate for 127.0.0.1, by the program openssl."""
    file = root / "both.pem"
    kind = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=bench",
    ]
    made = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(file), "-out", f"{file}c"]
    subprocess.run(["openssl", *kind, *made], check=True, capture_output=True)
    file.write_text(file.read_text() + Path(f"{file}c").read_text())
    return file


def over_http(port: int, batches: list[np.ndarray], trusted: Path | None, stack: ExitStack) -> Callable[[int], None]:
    """Asks once, and checks that the rows have come."""
    link: socket.socket = stack.enter_context(connect(port))
    if trusted is not None:
        context = ssl.create_default_context(cafile=str(trusted))
        link = stack.enter_context(context.wrap_socket(link, server_hostname="127.0.0.1"))
    requests = [http_request(keys) for keys in batches]

    def ask(i: int) -> None:
        link.sendall(requests[i % len(requests)])
        _, body = read_http(link)
        assert len(body) > len(batches[0]) * ROW_BYTES

    return ask


def over_grpc(port: int, batches: list[np.ndarray], trusted: Path | None, stack: ExitStack) -> Callable[[int], None]:
    from benchmarks.wire_grpc import OPTIONS, request_of

    if trusted is None:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
    else:
        trust = grpc.ssl_channel_credentials(trusted.read_bytes())
        channel = grpc.secure_channel(f"127.0.0.1:{port}", trust, options=OPTIONS)
    call = stack.enter_context(channel).unary_unary(METHOD)
    requests = [request_of(keys) for keys in batches]

    def ask(i: int) -> None:
        assert len(call(requests[i % len(requests)], wait_for_ready=True)) > len(batches[0]) * ROW_BYTES

    return ask


WAYS = {"HTTP/1.1": over_http, "gRPC": over_grpc}


def wait_until_warm(port: int, trusted: Path | None) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        with ExitStack() as stack:
            link: socket.socket = stack.enter_context(connect(port))
            if trusted is not None:
                context = ssl.create_default_context(cafile=str(trusted))
                link = stack.enter_context(context.wrap_socket(link, server_hostname="127.0.0.1"))
            link.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if link.recv(64).startswith(b"HTTP/1.1 200"):
                return
        if time.monotonic() > until:
            raise TimeoutError("the service was not warm in time")
        time.sleep(0.05)


def measure(
    servers: dict[str, tuple[int, int, Path | None]],
    sizes: list[int],
    rows: int,
    rounds: int,
    requests: int,
    against: str = "clear",
) -> list[dict[str, Any]]:
    """Server CPU and p50 a request, and the CPU over that of the server `against`, of each way and size; prints them as they come."""
    results, rng = [], np.random.default_rng(1)
    for size in sizes:
        batches = [keys_of(rng.integers(0, rows, size)) for _ in range(VARIANTS)]
        for way, connected in WAYS.items():
            cpu: dict[str, list[float]] = {name: [] for name in servers}
            took: dict[str, list[float]] = {name: [] for name in servers}
            with ExitStack() as stack:
                ask = {name: connected(port, batches, trusted, stack) for name, (_, port, trusted) in servers.items()}
                for name in servers:
                    for i in range(LEARNED):
                        ask[name](i)
                for _ in range(rounds):
                    for name, (pid, _, _) in servers.items():
                        began, times = cpu_s(pid), []
                        for i in range(requests):
                            at = time.perf_counter()
                            ask[name](i)
                            times.append(time.perf_counter() - at)
                        cpu[name].append((cpu_s(pid) - began) / requests * 1e6)
                        took[name].append(statistics.median(times) * 1e6)
            for name in servers:
                over = [mine / clear for mine, clear in zip(cpu[name], cpu[against], strict=True)]
                row = {"way": way, "keys": size, "server": name, f"over_{against}": statistics.median(over)}
                row |= {"cpu_us": statistics.median(cpu[name]), "p50_us": statistics.median(took[name])}
                results.append(row)
                print(
                    f"| {way} | {size:,} | {name} | {row['cpu_us']:.1f} | {row[f'over_{against}']:.3f} | {row['p50_us']:.0f} |",
                    flush=True,
                )
    return results


def main() -> int:
    options = parser_of(
        __file__,
        __doc__,
        "quick",
        rows=200_000,
        keys=[64, 1024],
        before=(Path, "another checkout, with a package that serves TLS"),
    ).parse_args()
    rounds, requests = (5, 150) if options.quick else (15, 400)
    here = Path(__file__).with_name("wire_servers.py")
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tls-")))
        trusted = certificate(root)
        servers: dict[str, tuple[int, int, Path | None]] = {}
        cases = {"clear": (None, None), "TLS": (trusted, None)}
        if options.before is not None:
            cases["TLS before"] = trusted, options.before
        for name, (tls, other) in cases.items():
            where = root / name.replace(" ", "-")
            where.mkdir()
            more = [] if tls is None else ["--tls", str(tls)]
            package = ["env", f"PYTHONPATH={other or os.getcwd()}", sys.executable, "-P", str(here)]
            pid, ports = stack.enter_context(
                child(*package, "store", "--where", str(where), "--rows", str(options.rows), *more)
            )
            servers[name] = pid, ports[0], tls
            wait_until_warm(ports[0], tls)
        print(f"{describe()}; {options.rows:,} rows of {ROW_BYTES} bytes; medians of {rounds} rounds of {requests}\n")
        print("| | keys | server | CPU µs | over clear | p50 µs |\n|---|---|---|---|---|---|")
        results = measure(servers, options.keys, options.rows, rounds, requests)
    marks = [
        report.headline(
            f"{row['way']} with TLS, {row['keys']} keys, server CPU", "in clear", row["over_clear"], at_most=2.0
        )
        for row in results
        if row["server"] == "TLS"
    ]
    document = {"benchmark": "tls", "machine": describe(), "rounds": rounds, "headlines": marks, "results": results}
    report.write(options.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
