"""What `tools/fuzz.py` aims at, by name: everything that reads what others wrote. Whole inputs to begin with are in `tests/corpus/<name>`.

A target is entered, and gives a function that runs an input and says in words what came of it. That function raises Failure, or anything else that
is no error of ours, for a fault.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

import tierstore
from tests.predict import onnx_models
from tests.service.conftest import eventually
from tierstore.access.tokens import TokenFile, Tokens
from tierstore.config import load_settings
from tierstore.engine.store import Store
from tierstore.errors import DeltaError, SnapshotError, TierstoreError
from tierstore.formats import files
from tierstore.formats.delta.reader import read_delta
from tierstore.formats.onnx_file import read_dense
from tierstore.formats.snapshot.built import open_source
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.formats.snapshot.recorded_requests import read_request
from tierstore.kafka.messages import KafkaMessage, check_digest, headers_of, read_checked
from tierstore.kafka.reorder_window import ReorderWindow
from tierstore.service.server import ServerThread
from tools import fuzz_answers
from tools.fuzz_answers import Failure, Run

MODEL, KEYS = "ctr", np.arange(12)


# --- files and messages, read in this process


def _named(run: Run) -> Run:
    """Its refusals are outcomes."""

    def named(data: bytes) -> str:
        try:
            return run(data)
        except TierstoreError as error:
            return f"{type(error).__name__}: {error}"

    return named


@contextlib.contextmanager
def _snapshot(file: str, shard: str = "item/part-00000.arrow", *, built: bool = False) -> Iterator[Run]:
    """Inputs are a file of a snapshot, all of which is read as a load does."""
    with tempfile.TemporaryDirectory(prefix="tierstore-fuzz-") as root:
        where = Path(root) / "snapshot"
        with tierstore.SnapshotWriter(where, model="m", version=1, delta_seq=0) as writer:
            writer.table("item", dim=4, default="mean").write(KEYS, np.arange(48, dtype=np.float32).reshape(12, 4))
            writer.feature("item", table="item", combiner="mean", padding_key=0)
            writer.warmup("item", KEYS[:3])
            writer.request({"item": (KEYS[:2], np.array([0, 1]))})
            writer.dense(onnx_models.linear({"item": np.ones(4)}))
        manifest = json.loads((where / "snapshot.json").read_text())
        manifest["tables"][0]["shards"] = [{"path": shard, "rows": len(KEYS)}]
        (where / "snapshot.json").write_text(json.dumps(manifest))

        def run(data: bytes) -> str:
            (where / file).write_bytes(data)
            if built:
                return type(open_source(where)).__name__
            snapshot, rows = open_snapshot(where), 0
            for table in snapshot.manifest.tables:
                for number in range(min(2, len(table.shards))):
                    rows += sum(len(batch.keys) for batch in snapshot.batches(table.name, number))
                snapshot.warmup_keys(table.name)
            for name, path in snapshot.request_paths():
                read_request(path, file=name)
            snapshot.dense_model()
            return f"snapshot of {rows} rows"

        yield _named(run)


@contextlib.contextmanager
def _file(read: Callable[[Path], str]) -> Iterator[Run]:
    """Inputs are the content of a file."""
    with tempfile.TemporaryDirectory(prefix="tierstore-fuzz-") as root:
        path = Path(root) / "file"
        (path.parent / "weights").write_bytes(bytes(64))  # of a graph whose weights are in a file of their own

        def run(data: bytes) -> str:
            path.write_bytes(data)
            return read(path)

        yield _named(run)


def _tokens(path: Path) -> str:
    try:
        document: Any = json.loads(path.read_bytes())
        if isinstance(document, dict) and "xxh3" in document:  # else its checksum would hide everything else
            del document["xxh3"]
            path.write_text(json.dumps(document))
    except (ValueError, RecursionError):
        return "no JSON"
    Tokens(path).principal("Bearer tierstore_a_b")
    return f"{len(TokenFile(path).tokens())} tokens"


def _kafka(data: bytes) -> str:
    """A line of JSON, the headers of each message as [[name, value], …] and its length, and then their contents."""
    window, outcomes = ReorderWindow(1 << 20), []
    for message in _messages(data):
        try:
            held = window.add(message, headers_of(message))
            if held is not None and held.complete:
                content = held.data()
                check_digest(content, held.digest)
                delta = read_checked(content, held.model, held.seq)
                window.remove(held)
                outcomes.append(f"delta of {len(delta.tables)} tables")
        except DeltaError as error:
            outcomes.append(f"refused: {error}")
    for model in window.models():
        window.remove_model(model)
    if window.nbytes:
        raise Failure(f"{window.nbytes} bytes are counted for nothing")
    return "; ".join(sorted(set(outcomes))) or "nothing"


def _messages(data: bytes) -> Iterator[KafkaMessage]:
    """Those of an input; what is no header is left out."""
    line, _, content = data.partition(b"\n")
    try:
        heads = json.loads(line)
    except (ValueError, RecursionError):
        return
    for offset, entry in enumerate(heads if isinstance(heads, list) else []):
        headers, length = entry if isinstance(entry, list) and len(entry) == 2 else (entry, 0)
        size = length if isinstance(length, int) and 0 <= length <= len(content) else len(content)
        pairs = [
            (str(pair[0]), None if pair[1] is None else str(pair[1]).encode(errors="surrogatepass"))
            for pair in (headers if isinstance(headers, list) else [])
            if isinstance(pair, list) and len(pair) == 2
        ]
        yield KafkaMessage(offset % 3, offset, content[:size], pairs, 0)
        content = content[size:]


# --- a service with one model; each input is one request


class _Tracebacks(logging.Handler):
    """The last record of the log that has a traceback."""

    seen: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or "Traceback" in record.getMessage():
            self.seen = f"{record.getMessage()[:200]} {record.exc_info and record.exc_info[1]!r}"


@contextlib.contextmanager
def _served(ask: Callable[[ServerThread, contextlib.ExitStack], Callable[[bytes], tuple[str, bool]]]) -> Iterator[Run]:
    """`ask` returns what asks: an input → (outcome, whether it is a fault)."""
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierstore-fuzz-")))
        with tierstore.SnapshotWriter(root / "snapshot", model=MODEL, version=1, delta_seq=0) as writer:
            writer.table("item", dim=4).write(np.arange(50), np.ones((50, 4), np.float32))
            writer.table("word", dim=4, key="string").write([f"w{i}" for i in range(50)], np.ones((50, 4), np.float32))
            writer.feature("item_id", table="item")
            writer.feature("clicked", table="item", combiner="mean")
            writer.feature("word", table="word")
            writer.dense(onnx_models.linear({"item_id": np.ones(4)}))
        options: dict[str, Any] = {
            "data": root / "data", "port": 0, "grpc_port": 0, "drain_s": 0.0, "host_budget": "2MiB", "max_request": "1MiB",
            "max_delta": "1MiB", "lookup_threads": 2, "disk_threads": 1, "load_workers": 1, "source_root": [root],
        }  # fmt: skip
        store = stack.enter_context(Store(load_settings(None, **options)))
        store.load_snapshot(root / "snapshot")
        server, log = stack.enter_context(ServerThread(store)), _Tracebacks(logging.WARNING)
        request = ask(server, stack)
        for logger in map(logging.getLogger, ("tierstore", "grpc", "asyncio")):
            logger.addHandler(log)
            stack.callback(logger.removeHandler, log)

        def run(data: bytes) -> str:
            log.seen = None
            outcome, failed = request(data)
            if failed or log.seen:
                raise Failure(f"{outcome} {log.seen or ''}")
            if store.model(MODEL).active_version is None:  # an input unloaded it
                store.activate(MODEL, 1)
            return outcome

        yield run
        eventually(lambda: server.service.inflight.used_bytes == 0, "the bytes of all requests are given back")


def _http(server: ServerThread, stack: contextlib.ExitStack) -> Callable[[bytes], tuple[str, bool]]:
    """An input is a line `METHOD path`, and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    stack.callback(connection.close)

    def ask(data: bytes) -> tuple[str, bool]:
        line, _, body = data.partition(b"\n")
        method, _, path = line.decode("latin-1").partition(" ")
        method = method if method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH") else "POST"
        path = "/" + quote(path.lstrip("/"), safe="/?&=:%+~@!$'()*,;")
        kind = "application/vnd.apache.arrow.stream" if "/deltas" in path else "application/json"
        try:
            connection.request(method, path, body or None, {"Content-Type": kind})
            response = connection.getresponse()
            content = response.read()
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            return f"no answer to {method} {path}: {type(error).__name__}: {error}", True
        words = content[:200].decode(errors="replace") if response.status >= 400 else ""
        return f"{method} {path.split('?')[0]}: {response.status} {words}", response.status == 500

    return ask


def _grpc(server: ServerThread, stack: contextlib.ExitStack) -> Callable[[bytes], tuple[str, bool]]:
    """An input is a line with the method, and the message."""
    import grpc

    channel = stack.enter_context(grpc.insecure_channel(server.grpc_target))
    faults = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}

    def ask(data: bytes) -> tuple[str, bool]:
        line, _, message = data.partition(b"\n")
        method = "/" + re.sub(r"[^!-~]", "", line.decode("latin-1")).lstrip("/")  # HTTP/2 has no path without it
        try:
            channel.unary_unary(method)(message, timeout=60)
        except grpc.RpcError as error:
            return f"{method}: {error.code()} {error.details()[:100]}", error.code() in faults
        return f"{method}: OK", False

    return ask


TARGETS: dict[str, Callable[[], contextlib.AbstractContextManager[Run]]] = {
    "delta": lambda: contextlib.nullcontext(_named(lambda data: f"delta of {len(read_delta(data).tables)} tables")),
    "manifest": partial(_snapshot, "snapshot.json"),
    "built": partial(_snapshot, "built.json", built=True),
    "npz": partial(_snapshot, "item/shard.npz", "item/shard.npz"),
    "request": partial(_snapshot, "warmup/requests/00000.npz"),
    "warmup": partial(_snapshot, "warmup/item.npy"),
    "safetensors": partial(_snapshot, "item/shard.safetensors", "item/shard.safetensors"),
    "arrow": partial(_snapshot, "item/part-00000.arrow"),
    "parquet": partial(_snapshot, "item/shard.parquet", "item/shard.parquet"),
    "onnx": partial(_file, lambda path: f"graph of {len(read_dense(path, SnapshotError))} bytes"),
    "record": partial(_file, lambda path: f"record of {len(files.read_json(path))} fields"),  # what a start reads back
    "tokens": partial(_file, _tokens),
    "kafka": lambda: contextlib.nullcontext(_kafka),
    "http": partial(_served, _http),
    "grpc": partial(_served, _grpc),
    **fuzz_answers.TARGETS,
}
