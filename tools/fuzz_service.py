"""Targets of `tools/fuzz.py` that ask a service over its wires: JSON over HTTP, and messages over gRPC."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import random
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

import tierstore
from tests.predict import onnx_models
from tierstore.config import load_settings
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread
from tools.fuzz_files import Delta
from tools.fuzz_target import Failure, Target, spoil_bytes, spoil_json

MODEL = "ctr"
ARROW = "application/vnd.apache.arrow.stream"


class _Tracebacks(logging.Handler):
    """The last record of the log that has a traceback."""

    seen: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or "Traceback" in record.getMessage():
            self.seen = f"{record.getMessage()[:200]} {record.exc_info and record.exc_info[1]!r}"


class ServiceTarget(Target):
    """A service with one model; each input is one request."""

    grpc_port: int | str = "off"

    def __enter__(self) -> ServiceTarget:
        self._stack = contextlib.ExitStack()
        root = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tierstore-fuzz-")))
        with tierstore.SnapshotWriter(root / "snapshot", model=MODEL, version=1, delta_seq=0) as writer:
            for table, kind in (("item", "int64"), ("word", "string")):
                keys = np.arange(50) if kind == "int64" else [f"w{number}" for number in range(50)]
                writer.table(table, dim=4, key=kind).write(keys, np.ones((50, 4), np.float32))
            writer.feature("item_id", table="item")
            writer.feature("clicked", table="item", combiner="mean")
            writer.feature("word", table="word")
            writer.dense(onnx_models.linear({"item_id": np.ones(4)}))
        options: dict[str, Any] = {
            "data": root / "data", "port": 0, "grpc_port": self.grpc_port, "drain_s": 0.0, "host_budget": "2MiB", "max_request": "1MiB",
            "max_delta": "1MiB", "lookup_threads": 2, "disk_threads": 1, "load_workers": 1, "source_root": [root],
        }  # fmt: skip
        self._store = self._stack.enter_context(Store(load_settings(None, **options)))
        self._store.load_snapshot(root / "snapshot")
        self.server = self._stack.enter_context(ServerThread(self._store))
        self._log = _Tracebacks(logging.WARNING)
        names = ("tierstore", "grpc", "asyncio")
        for logger in (logging.getLogger(name) for name in names):
            logger.addHandler(self._log)
            self._stack.callback(logger.removeHandler, self._log)
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def connect(self) -> None:
        raise NotImplementedError

    def check(self, *, fault: str | None) -> None:
        """Raise Failure for a fault, or a traceback in the log."""
        seen, self._log.seen = self._log.seen, None
        if fault or seen:
            raise Failure(f"{fault or ''} {seen or ''}")
        if self._store.model(MODEL).active_version is None:  # an input unloaded it
            self._store.activate(MODEL, 1)


# --- HTTP: the input is a line `METHOD path`, and the body


class Http(ServiceTarget):
    name = "http"

    def connect(self) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)

    def seeds(self) -> list[bytes]:
        tensor = {"name": "item_id", "datatype": "INT64", "shape": [3], "data": [1, 2, 99]}
        bags = [
            {"name": "clicked", "datatype": "INT64", "shape": [3], "data": [1, 2, 3]},
            {"name": "clicked.offsets", "datatype": "INT64", "shape": [2], "data": [0, 1]},
            {"name": "clicked.weights", "datatype": "FP32", "shape": [3], "data": [1, 0.5, 2]},
        ]
        words = {"name": "word", "datatype": "BYTES", "shape": [1, 2], "data": [["w1", "x"]]}
        found = [{"name": "item_id", "parameters": {"dtype": "FP16"}}, {"name": "item_id.found"}]
        bodies: list[tuple[str, Any]] = [
            (f"/v2/models/{MODEL}/infer", {"inputs": [tensor], "outputs": found, "id": "a", "parameters": {"timeout": 1000000}}),
            (f"/v2/models/{MODEL}/infer", {"inputs": bags, "outputs": [{"name": "clicked"}], "parameters": {"combiner": "sum"}}),
            (f"/v2/models/{MODEL}/infer", {"inputs": [words], "outputs": [{"name": "word", "parameters": {"binary_data": True}}]}),
            (f"/v2/models/{MODEL}/versions/1/infer", {"inputs": [tensor]}),
            (f"/v1/models/{MODEL}:predict", {"instances": [1, 2], "signature_name": "serving_default"}),
            (f"/v1/models/{MODEL}:predict", {"instances": [{"item_id": 1}, {"item_id": 2}]}),
            (f"/v1/models/{MODEL}/versions/1:predict", {"inputs": {"item_id": [1, 2]}}),
            (f"/v1/models/{MODEL}/labels/stable:predict", {"inputs": {"item_id": [{"b64": "AA=="}]}}),
            ("/v2/repository/index", {"ready": True}),
            (f"/v2/repository/models/{MODEL}/load", {"parameters": {"config": "{}", "file:1/x": "AA=="}}),
            (f"/v2/repository/models/{MODEL}/unload", {"parameters": {"unload_dependents": False}}),
            ("/v2/systemsharedmemory/region/r/register", {"key": "/x", "offset": 0, "byte_size": 16}),
            ("/v2/cudasharedmemory/region/r/register", {"raw_handle": {"b64": "AA=="}, "device_id": 0, "byte_size": 16}),
            ("/v2/systemsharedmemory/unregister", {}),
            (f"/admin/models/{MODEL}/activate", {"version": 1, "force": False}),
            (f"/admin/models/{MODEL}/rollback", {"force": False}),
            (f"/admin/models/{MODEL}/canary", {"version": 1, "share": 0.5}),
            (f"/admin/models/{MODEL}/labels", {"name": "best", "version": 1}),
            (f"/admin/models/{MODEL}/snapshots", {"source": "/nowhere/snapshot", "activate": True}),
            (f"/v2/models/{MODEL}/trace/setting", {"trace_level": ["OFF"]}),
            ("/v2/logging", {"log_verbose_level": 1}),
        ]  # fmt: skip
        seeds = [f"POST {path}\n".encode() + json.dumps(body).encode() for path, body in bodies]
        reads = ["/v2", f"/v2/models/{MODEL}", f"/v2/models/{MODEL}/versions/1/stats", f"/v1/models/{MODEL}/metadata", "/admin/models",
                 f"/admin/models/{MODEL}?x=1", "/admin/jobs/1", "/metrics", "/openapi.json", f"/v2/models/{MODEL}/config"]  # fmt: skip
        seeds += [f"GET {path}\n".encode() for path in reads]
        writer = tierstore.DeltaWriter(io.BytesIO(), model=MODEL, seq=1, event_time=0.0)
        writer.upsert("item", [1, 2], np.ones((2, 4)))
        deltas = [writer.to_bytes(), *Delta().seeds()]
        seeds += [f"POST /admin/models/{MODEL}/deltas\n".encode() + data for data in deltas]
        return [*seeds, f"DELETE /admin/models/{MODEL}/versions/7\n".encode()]

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        line, _, body = data.partition(b"\n")
        if rng.random() < 0.15:
            return spoil_bytes(line, rng).replace(b"\n", b"") + b"\n" + body
        return line + b"\n" + spoil_json(body, rng)

    def run(self, data: bytes) -> str:
        line, _, body = data.partition(b"\n")
        method, _, path = line.decode("latin-1").partition(" ")
        method = method if method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH") else "POST"
        path = "/" + quote(path.lstrip("/"), safe="/?&=:%+~@!$'()*,;")
        kind = ARROW if "/deltas" in path else "application/json"
        try:
            self._connection.request(method, path, body or None, {"Content-Type": kind})
            response = self._connection.getresponse()
            content = response.read()
        except (http.client.HTTPException, OSError) as error:
            self._connection.close()
            raise Failure(f"no answer to {method} {path}: {type(error).__name__}: {error}") from error
        self.check(fault=f"500 to {method} {path}: {content[:300]!r}" if response.status == 500 else None)
        words = content[:200].decode(errors="replace") if response.status >= 400 else ""
        return f"{method} {path.split('?')[0]}: {response.status} {words}"


# --- gRPC: the input is a line with the method, and the message


class Grpc(ServiceTarget):
    name = "grpc"
    grpc_port = 0

    def connect(self) -> None:
        import grpc

        self._channel = self._stack.enter_context(grpc.insecure_channel(self.server.grpc_target))
        self._error, self._faults = grpc.RpcError, {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
        self._faults.add(grpc.StatusCode.DATA_LOSS)

    def seeds(self) -> list[bytes]:
        from tritonclient.grpc import service_pb2 as oip

        tensor = oip.ModelInferRequest.InferInputTensor(name="item_id", datatype="INT64", shape=[2])
        tensor.contents.int64_contents.extend([1, 2])
        raw = oip.ModelInferRequest.InferInputTensor(name="item_id", datatype="INT64", shape=[2])
        wanted = oip.ModelInferRequest.InferRequestedOutputTensor(name="item_id")
        wanted.parameters["dtype"].string_param = "FP16"
        messages = {
            "ModelInfer": [
                oip.ModelInferRequest(model_name=MODEL, inputs=[tensor], outputs=[wanted]),
                oip.ModelInferRequest(model_name=MODEL, inputs=[raw], raw_input_contents=[bytes(16)]),
            ],
            "ModelMetadata": [oip.ModelMetadataRequest(name=MODEL, version="1")],
            "ModelReady": [oip.ModelReadyRequest(name=MODEL)],
            "ModelConfig": [oip.ModelConfigRequest(name=MODEL)],
            "ModelStatistics": [oip.ModelStatisticsRequest(name=MODEL)],
            "RepositoryIndex": [oip.RepositoryIndexRequest(ready=True)],
            "RepositoryModelLoad": [oip.RepositoryModelLoadRequest(model_name=MODEL)],
            "SystemSharedMemoryRegister": [oip.SystemSharedMemoryRegisterRequest(name="r", key="/x", byte_size=8)],
            "SystemSharedMemoryStatus": [oip.SystemSharedMemoryStatusRequest(name="r")],
            "TraceSetting": [oip.TraceSettingRequest(model_name=MODEL)],
            "LogSettings": [oip.LogSettingsRequest()],
        }
        seeds = [
            f"/inference.GRPCInferenceService/{method}\n".encode() + message.SerializeToString()
            for method, variants in messages.items()
            for message in variants
        ]
        # PredictRequest: model_spec {name}, inputs {"item_id": {dtype INT64, tensor_shape [2], tensor_content}}
        value = b"\x08\x09\x12\x04\x12\x02\x08\x02" + b"\x22\x10" + bytes(16)
        entry = b"\x0a\x07item_id\x12" + bytes([len(value)]) + value
        predict = b"\x0a\x05\x0a\x03ctr" + b"\x12" + bytes([len(entry)]) + entry
        seeds.append(b"/tensorflow.serving.PredictionService/Predict\n" + predict)
        seeds.append(
            b"/tensorflow.serving.PredictionService/GetModelMetadata\n\x0a\x05\x0a\x03ctr\x12\x0dsignature_def"
        )
        return [*seeds, b"/tensorflow.serving.ModelService/GetModelStatus\n\x0a\x05\x0a\x03ctr"]

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        method, _, message = data.partition(b"\n")
        return method + b"\n" + spoil_bytes(message, rng)

    def run(self, data: bytes) -> str:
        method, _, message = data.partition(b"\n")
        call = self._channel.unary_unary(method.decode("latin-1"))
        try:
            call(message, timeout=60)
        except self._error as error:
            code, words = error.code(), error.details()
            self.check(fault=f"{code} from {method.decode()}: {words}" if code in self._faults else None)
            return f"{method.decode()}: {code} {words[:100]}"
        self.check(fault=None)
        return f"{method.decode()}: OK"
