"""Look-ups over gRPC: what a request costs the server, beside the same over HTTP and beside grpcio echoing.

    python -m benchmarks.wire_grpc [--quick] [--rows 1_000_000] [--json FILE]

"grpc echo" is grpcio's own server, as it comes, with a handler that parses a request and answers as many ready bytes. It and
the service take turns, a round each; figures are medians over the rounds, ratios medians of each round's ratio.

The client of "grpc" is grpcio's, with a connection of its own a channel; messages are made and read as bytes, so that it costs
as little as it may. Only the server's CPU is compared: the wall time is mostly this client's. A server that waits for its client
pays for waking up, so "frames" are the same calls from a client as quick as that of "http": frames of HTTP/2 on a plain socket.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import grpc
import numpy as np

from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from benchmarks.ready import wait_until_warm
from benchmarks.wire_frames import METHOD, Frames
from benchmarks.wire_lookup import CONNECTIONS, VARIANTS, Server, child, cpu_s, over_http, turn
from benchmarks.wire_table import DIM, FEATURE, MODEL, ROW_BYTES, keys_of, vectors_of
from tierstore.service.rpc.protobuf import message_class

BOUND = 64 << 20
OPTIONS = [("grpc.max_receive_message_length", BOUND), ("grpc.use_local_subchannel_pool", 1)]
_Request = message_class("inference.ModelInferRequest")
_Response = message_class("inference.ModelInferResponse")


def request_of(keys: np.ndarray) -> bytes:
    asked = _Request(model_name=MODEL, raw_input_contents=[keys.tobytes()])
    asked.inputs.add(name=FEATURE, datatype="INT64", shape=[len(keys)])
    asked.outputs.add(name=FEATURE)
    made: bytes = asked.SerializeToString()
    return made


_ready: dict[int, bytes] = {}


def _echo(received: bytes, _: Any = None) -> bytes:
    """Parse a request, and answer as many ready bytes as its rows would take."""
    asked = _Request.FromString(received)
    count = len(np.frombuffer(asked.raw_input_contents[0], np.int64))
    if count not in _ready:
        made = _Response(model_name=MODEL, model_version="1", raw_output_contents=[bytes(count * ROW_BYTES)])
        made.outputs.add(name=FEATURE, datatype="FP32", shape=[count, DIM])
        _ready[count] = made.SerializeToString()
    return _ready[count]


def echo_server() -> tuple[grpc.Server, int]:
    """grpcio's server answering with `_echo`; and its port."""
    service, name = METHOD[1:].split("/")
    handler = grpc.method_handlers_generic_handler(service, {name: grpc.unary_unary_rpc_method_handler(_echo)})
    server = grpc.server(
        ThreadPoolExecutor(2), handlers=[handler], options=[("grpc.max_receive_message_length", BOUND)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


class GrpcServer:
    """A server process as `wire_lookup` measures it."""

    def __init__(self, name: str, pid: int, port: int, *, checked: bool) -> None:
        self.name, self.pid, self._port, self._checked = name, pid, port, checked
        self._requests: dict[int, list[bytes]] = {}

    def turn(self, batches: list[np.ndarray], connections: int, requests: int, cpu_s: Any) -> tuple[float, float]:
        """(CPU µs of the server, µs of wall time) a request; `cpu_s` reads the clock of a process."""
        n = len(batches[0])
        with ExitStack() as stack:
            calls = [
                stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{self._port}", options=OPTIONS)).unary_unary(
                    METHOD
                )
                for _ in range(connections)
            ]
            if n not in self._requests:
                self._requests[n] = [request_of(keys) for keys in batches]
                if self._checked:
                    for keys, request in zip(batches, self._requests[n], strict=True):
                        rows = _Response.FromString(calls[0](request)).raw_output_contents[0]
                        np.testing.assert_array_equal(
                            np.frombuffer(rows, np.float32).reshape(-1, DIM), vectors_of(keys)
                        )
            mine = self._requests[n]
            rounds = max(1, requests // connections)
            for i in range(-2, rounds):  # two to warm up
                if i == 0:
                    cpu, began = cpu_s(self.pid), time.perf_counter()
                if connections == 1:
                    calls[0](mine[i % len(mine)])
                else:
                    for future in [call.future(mine[i % len(mine)]) for call in calls]:
                        future.result()
            elapsed, used = time.perf_counter() - began, cpu_s(self.pid) - cpu
        total = rounds * connections
        return used / total * 1e6, elapsed / total * 1e6


class FramesServer(GrpcServer):
    """The same server, asked by a client that is as quick as one over HTTP."""

    def turn(self, batches: list[np.ndarray], connections: int, requests: int, cpu_s: Any) -> tuple[float, float]:
        messages = [request_of(keys) for keys in batches]
        with ExitStack() as stack:
            links = [stack.enter_context(closing(Frames(self._port))) for _ in range(connections)]
            for link in links:
                for _ in range(2):
                    link.send(messages[0])
                    link.measure()
            rounds = max(1, requests // connections)
            cpu, began = cpu_s(self.pid), time.perf_counter()
            for i in range(rounds):
                for link in links:
                    link.send(messages[i % len(messages)])
                for link in links:
                    link.read()
            elapsed, used = time.perf_counter() - began, cpu_s(self.pid) - cpu
        return used / rounds / connections * 1e6, elapsed / rounds / connections * 1e6


def measure(servers: list[Server | GrpcServer], rows: int, sizes: list[int], rounds: int, requests: int) -> list[Any]:
    rng = np.random.default_rng(1)
    results = []
    for n in sizes:
        batches = [keys_of(rng.integers(0, rows, n)) for _ in range(VARIANTS)]
        for connections in CONNECTIONS:
            cpu: dict[str, list[float]] = {server.name: [] for server in servers}
            for _ in range(rounds):
                for server in servers:
                    if isinstance(server, GrpcServer):
                        used_us, _ = server.turn(batches, connections, requests, cpu_s)
                    else:
                        used_us, _ = turn(server, batches, connections, requests)
                    cpu[server.name].append(used_us)
            row: dict[str, Any] = {"keys": n, "connections": connections}
            row |= {f"{name}_us": statistics.median(figures) for name, figures in cpu.items()}
            for ours, other in (("grpc", "grpc echo"), ("grpc", "http"), ("frames", "http")):
                ratios = (one / theirs for one, theirs in zip(cpu[ours], cpu[other], strict=True))
                row[f"{ours} over {other}"] = statistics.median(ratios)
            results.append(row)
            print(
                "| {keys:,} | {connections} | {http_us:.0f} | {frames_us:.0f} | {grpc_us:.0f} | {grpc echo_us:.0f} "
                "| {grpc over grpc echo:.2f} | {grpc over http:.2f} | {frames over http:.2f} |".format(**row),
                flush=True,
            )
    return results


def main() -> None:
    options = parser_of(__file__, __doc__, "quick", rows=0, keys=[64, 1024, 4096]).parse_args()
    rows = options.rows or (200_000 if options.quick else 1_000_000)
    rounds, requests = (7, 160) if options.quick else (15, 400)
    python = [sys.executable, "-m", "benchmarks.wire_servers"]
    with ExitStack() as stack:
        where = stack.enter_context(tempfile.TemporaryDirectory(prefix="wire-"))
        pid, (http, rpc) = stack.enter_context(child(*python, "store", "--where", where, "--rows", str(rows)))
        wait_until_warm(http)
        servers: list[Server | GrpcServer] = [Server("http", pid, http, over_http(http, checked=True))]
        servers += [GrpcServer("grpc", pid, rpc, checked=True), FramesServer("frames", pid, rpc, checked=False)]
        pid, (port,) = stack.enter_context(child(*python, "grpc-echo"))
        servers.append(GrpcServer("grpc echo", pid, port, checked=False))
        print(f"{describe()}; {rows:,} rows of {ROW_BYTES} bytes, all in memory; medians of {rounds} rounds\n")
        print(
            "Server CPU a request, µs:\n\n"
            "| keys | connections | http | frames | grpc | grpc echo | grpc over grpc echo | grpc over http | frames over http |\n"
            "|---|---|---|---|---|---|---|---|---|"
        )
        results = measure(servers, rows, options.keys, rounds, requests)
    headlines = [
        report.headline(f"server CPU of {row['keys']:,} keys, {row['connections']} at a time, as frames", "the same over HTTP",
                        row["frames over http"], at_most=1.3)
        for row in results
    ]  # fmt: skip
    document = {
        "benchmark": "wire_grpc",
        "machine": describe(),
        "rows": rows,
        "rounds": rounds,
        "headlines": headlines,
        "results": results,
    }
    report.write(options.json, document)


if __name__ == "__main__":
    main()
