"""Targets of `tools/fuzz.py` that read files and deltas: in this process, through what loads and starts read them with."""

from __future__ import annotations

import io
import json
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tierstore
from tests.predict import onnx_models
from tierstore.access.tokens import TokenFile, Tokens
from tierstore.errors import DeltaError, SnapshotError, TierstoreError
from tierstore.formats import files
from tierstore.formats.delta.reader import read_delta
from tierstore.formats.onnx_file import read_dense
from tierstore.formats.snapshot.built import open_source
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.formats.snapshot.requests import read_request
from tools.fuzz_target import Target, spoil_bytes, spoil_json

KEYS, VECTORS = np.arange(12), np.arange(48, dtype=np.float32).reshape(12, 4)


class FileTarget(Target):
    """Inputs are the content of `self.path`, below the temporary directory `self.root`."""

    path: Path
    document = False  # JSON

    def __enter__(self) -> FileTarget:
        self._temporary = tempfile.TemporaryDirectory(prefix="tierstore-fuzz-")
        self.root = Path(self._temporary.name)
        self.prepare()
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    def prepare(self) -> None:
        """Make what is around the file, and set `path`."""
        self.path = self.root / "file"

    def run(self, data: bytes) -> str:
        self.path.write_bytes(data)
        try:
            return self.read() or "read"
        except TierstoreError as error:
            return f"{type(error).__name__}: {error}"

    def read(self) -> str | None:
        raise NotImplementedError

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        return spoil_json(data, rng) if self.document else spoil_bytes(data, rng)


class Delta(Target):
    name = "delta"

    def __exit__(self, *_: object) -> None:
        pass

    def seeds(self) -> list[bytes]:
        writer = tierstore.DeltaWriter(io.BytesIO(), model="ctr", seq=5, event_time=0.0, base_version=3)
        writer.upsert("item", KEYS, VECTORS)
        writer.delete("item", [3, 77])
        writer.upsert("word", ["a", "b"], VECTORS[:2].astype(np.float16))
        writer.dense(b"onnx")
        schema = pa.schema(
            [("key", pa.dictionary(pa.int32(), pa.string())), ("vector", pa.list_(pa.float32()))],
            metadata={"model": "ctr", "seq": "5", "event_time": "2026-11-20"},
        )
        seeds = [writer.to_bytes()]
        for codec in ("zstd", "lz4"):
            sink = io.BytesIO()
            vectors = pa.array([[1.0, 2.0], None], pa.list_(pa.float32()))
            batch = pa.record_batch([pa.array(["a", "b"]).dictionary_encode(), vectors], schema=schema)
            with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream:
                stream.write_batch(batch, custom_metadata={"table": "item"})
            seeds.append(sink.getvalue())
        return seeds

    def run(self, data: bytes) -> str:
        try:
            return f"delta of {len(read_delta(data).tables)} tables"
        except DeltaError as error:
            return f"refused: {error}"


class SnapshotFile(FileTarget):
    """A file of a snapshot; `read` goes through all of the snapshot, as a load does."""

    file = "snapshot.json"
    shard = "item/part-00000.arrow"  # what the manifest names

    def prepare(self) -> None:
        snapshot = self.root / "snapshot"
        with tierstore.SnapshotWriter(snapshot, model="m", version=1, delta_seq=0) as writer:
            table = writer.table("item", dim=4, default="mean")
            table.write(KEYS, VECTORS)
            writer.feature("item", table="item", combiner="mean", padding_key=0)
            writer.warmup("item", KEYS[:3])
            writer.request({"item": (KEYS[:2], np.array([0, 1]))})
            writer.dense(onnx_models.linear({"item": np.ones(4)}))
        manifest = json.loads((snapshot / "snapshot.json").read_text())
        manifest["tables"][0]["shards"] = [{"path": self.shard, "rows": len(KEYS)}]
        (snapshot / "snapshot.json").write_text(json.dumps(manifest))
        self.path = snapshot / self.file

    def seeds(self) -> list[bytes]:
        return [self.path.read_bytes()]

    def read(self) -> str:
        snapshot = open_snapshot(self.root / "snapshot")
        rows = 0
        for table in snapshot.manifest.tables:
            for shard in range(min(2, len(table.shards))):
                rows += sum(len(batch.keys) for batch in snapshot.batches(table.name, shard))
            snapshot.warmup_keys(table.name)
        for name, path in snapshot.request_paths():
            read_request(path, file=name)
        snapshot.dense_model()
        return f"snapshot of {rows} rows"


class ManifestOfSnapshot(SnapshotFile):
    name, document = "manifest", True


class ManifestOfBuild(SnapshotFile):
    name, document, file = "built", True, "built.json"

    def seeds(self) -> list[bytes]:
        manifest = json.loads((self.root / "snapshot/snapshot.json").read_text())
        file = {"path": "base-item-0000.sealed", "xxh3": "0" * 16, "bytes": 4096, "entries": 12}
        table = {"rows": 12, "mean": [0.0] * 4, "digest": "0" * 16, "files": [file]}
        build = {"format": 1, "manifest": manifest, "base": "sealed", "tables": {"item": table}, "files": [file]}
        return [json.dumps(build).encode()]

    def read(self) -> str:
        return type(open_source(self.root / "snapshot")).__name__


class Npz(SnapshotFile):
    name, file, shard = "npz", "item/shard.npz", "item/shard.npz"

    def seeds(self) -> list[bytes]:
        plain, packed = io.BytesIO(), io.BytesIO()
        np.savez(plain, keys=KEYS, vectors=VECTORS)
        np.savez_compressed(packed, keys=KEYS, vectors=VECTORS.astype(np.float16))
        return [plain.getvalue(), packed.getvalue()]

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        """Also within a member, with checksums that fit."""
        if rng.random() < 0.4:
            return spoil_bytes(data, rng)
        out = io.BytesIO()
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
                for member in old.namelist():
                    content = old.read(member)
                    new.writestr(member, spoil_bytes(content, rng) if rng.random() < 0.6 else content)
        except Exception:  # noqa: BLE001 - it is spoiled already
            return spoil_bytes(data, rng)
        return out.getvalue()


class RecordedRequest(Npz):
    name, file, shard = "request", "warmup/requests/00000.npz", SnapshotFile.shard

    def seeds(self) -> list[bytes]:
        return [self.path.read_bytes()]


class WarmUp(SnapshotFile):
    name, file = "warmup", "warmup/item.npy"


class Safetensors(SnapshotFile):
    name, file, shard = "safetensors", "item/shard.safetensors", "item/shard.safetensors"

    def seeds(self) -> list[bytes]:
        header = {
            "keys": {"dtype": "I64", "shape": [12], "data_offsets": [0, 96]},
            "vectors": {"dtype": "F32", "shape": [12, 4], "data_offsets": [96, 288]},
            "__metadata__": {"format": "pt"},
        }
        return [_with_head(json.dumps(header).encode(), KEYS.tobytes() + VECTORS.tobytes())]

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        """Also within the header, with a length that fits."""
        size = int.from_bytes(data[:8], "little")
        if rng.random() < 0.4 or size > len(data):
            return spoil_bytes(data, rng)
        return _with_head(spoil_json(data[8 : 8 + size], rng), data[8 + size :])


def _with_head(head: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(head)) + head + body


class Arrow(SnapshotFile):
    name, file = "arrow", SnapshotFile.shard


class Parquet(SnapshotFile):
    name, file, shard = "parquet", "item/shard.parquet", "item/shard.parquet"

    def seeds(self) -> list[bytes]:
        table = pa.table({"key": KEYS, "vector": pa.FixedSizeListArray.from_arrays(VECTORS.ravel(), 4)})
        seeds = []
        for codec in ("none", "snappy"):
            sink = io.BytesIO()
            pq.write_table(table, sink, compression=codec)
            seeds.append(sink.getvalue())
        return seeds


class Onnx(FileTarget):
    name = "onnx"

    def seeds(self) -> list[bytes]:
        whole = onnx_models.linear({"item": np.ones(4)})
        import onnx

        outside = onnx.ModelProto.FromString(whole)
        tensor = outside.graph.initializer[0]
        onnx.external_data_helper.set_external_data(tensor, "weights", 0, 16)
        tensor.ClearField("raw_data")
        (self.root / "weights").write_bytes(bytes(64))
        return [whole, outside.SerializeToString()]

    def read(self) -> str:
        return f"graph of {len(read_dense(self.path, SnapshotError))} bytes"


class Record(FileTarget):
    """What a start reads back: with a checksum that fits."""

    name, document = "record", True

    def seeds(self) -> list[bytes]:
        return [b'{"start": 3}', b'{"canary": {"version": 2, "share": 0.5}, "labels": {"best": 2}}', b'{"format": 2}']

    def read(self) -> str:
        return f"record of {len(files.read_json(self.path))} fields"


class TokensFile(FileTarget):
    name, document = "tokens", True

    def prepare(self) -> None:
        self.path = self.root / "tokens.json"
        TokenFile(self.path).create("reader", ["ctr"])  # type: ignore[arg-type]

    def seeds(self) -> list[bytes]:
        return [self.path.read_bytes()]

    def read(self) -> str:
        document: Any = json.loads(self.path.read_bytes()) if self.document else {}
        if isinstance(document, dict) and "xxh3" in document:  # else its checksum would hide everything else
            del document["xxh3"]
            self.path.write_text(json.dumps(document))
        tokens = TokenFile(self.path).tokens()
        Tokens(self.path).principal("Bearer tierstore_a_b")
        return f"{len(tokens)} tokens"

    def run(self, data: bytes) -> str:
        try:
            return super().run(data)
        except (ValueError, RecursionError):  # of the json that this target itself reads, or writes
            return "no JSON"


TARGETS: list[Callable[[], Target]] = [
    Delta, ManifestOfSnapshot, ManifestOfBuild, Npz, RecordedRequest, WarmUp, Safetensors, Arrow, Parquet, Onnx, Record, TokensFile,
]  # fmt: skip
