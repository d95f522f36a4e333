"""The gRPC side of `wire_lookup`: the service over gRPC, and grpcio answering ready bytes.

The client is grpcio's, with a connection of its own a channel; messages are made and read as bytes, so that it costs
as little as it may. Only the server's CPU is compared: the wall time is mostly this client's.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np

from benchmarks.wire_table import DIM, FEATURE, MODEL, ROW_BYTES, vectors_of
from tierstore.service.rpc.messages import message

METHOD = "/inference.GRPCInferenceService/ModelInfer"
BOUND = 64 << 20
OPTIONS = [("grpc.max_receive_message_length", BOUND), ("grpc.use_local_subchannel_pool", 1)]
_Request = message("inference.ModelInferRequest")
_Response = message("inference.ModelInferResponse")


def request_of(keys: np.ndarray) -> bytes:
    asked = _Request(model_name=MODEL, raw_input_contents=[keys.tobytes()])
    asked.inputs.add(name=FEATURE, datatype="INT64", shape=[len(keys)])
    asked.outputs.add(name=FEATURE)
    made: bytes = asked.SerializeToString()
    return made


def echo_server() -> tuple[grpc.Server, int]:
    """A server that parses a request, and answers as many ready bytes as its rows would take; and its port."""
    ready: dict[int, bytes] = {}

    def answer(received: bytes, _: Any) -> bytes:
        asked = _Request.FromString(received)
        count = len(np.frombuffer(asked.raw_input_contents[0], np.int64))
        if count not in ready:
            made = _Response(model_name=MODEL, model_version="1", raw_output_contents=[bytes(count * ROW_BYTES)])
            made.outputs.add(name=FEATURE, datatype="FP32", shape=[count, DIM])
            ready[count] = made.SerializeToString()
        return ready[count]

    service, name = METHOD[1:].split("/")
    handler = grpc.method_handlers_generic_handler(service, {name: grpc.unary_unary_rpc_method_handler(answer)})
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
