"""Writing a snapshot: what a trainer calls when a day's model is ready. (`DeltaWriter` is here too, by name.)

A `SnapshotWriter` and its tables belong to one thread at a time. Rows go to disk batch by batch. Every
file is published whole and durable, and `snapshot.json` last: a crash, or an error in the block, leaves
a directory that no reader takes for a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from tierstore.errors import InvalidInput, SnapshotError
from tierstore.formats import files
from tierstore.formats.columns import as_vectors, first_not_finite
from tierstore.formats.delta_writer import DeltaWriter, read_dense
from tierstore.formats.given import as_rows, guessed_key_type
from tierstore.formats.keys import as_arrow_strings, as_codes, from_codes
from tierstore.formats.manifest import Manifest
from tierstore.formats.names import DENSE, KEYS_SUFFIX, REQUEST_SUFFIX, REQUESTS, SNAPSHOT_MANIFEST, WARMUP
from tierstore.formats.requests import write_request
from tierstore.formats.shard_files import ArrowShard, HugeCtrShard, ShardFile, TensorShard
from tierstore.formats.times import Moment, as_moment
from tierstore.types import Combiner, KeyType, StorageDtype, check_name

__all__ = ["DeltaWriter", "ShardFormat", "SnapshotWriter", "TableWriter"]

ShardFormat = Literal["arrow", "parquet", "safetensors", "npz", "hugectr"]
_FORMATS = {"arrow": ".arrow", "parquet": ".parquet", "safetensors": ".safetensors", "npz": ".npz", "hugectr": ""}
_SHARD_BYTES = 256 << 20
_BATCH_BYTES = 64 << 20


class SnapshotWriter:
    """Write a snapshot directory.

    >>> with SnapshotWriter("snapshots/20261120", model="ctr", version=20261120, delta_seq=41820) as snapshot:
    ...     item = snapshot.table("item", dim=32, dtype="float16", default="mean")
    ...     for keys, vectors in batches:
    ...         item.write(keys, vectors)
    ...     snapshot.feature("clicked", table="item", combiner="mean")
    ...     snapshot.dense("model.onnx")

    delta_seq: deltas up to this one are in the rows already. created_at: a datetime with a zone, seconds since 1970 or
    ISO 8601; default now. The directory may exist, but not hold a snapshot. What is wrong with the arguments is SnapshotError, at once where it
    can be seen at once, and at the end of the block otherwise.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        model: str,
        version: int,
        delta_seq: int = 0,
        created_at: Moment | None = None,
    ) -> None:
        self.directory = Path(directory)
        try:
            moment = datetime.now(UTC).replace(microsecond=0) if created_at is None else as_moment(created_at)
        except ValueError as error:
            raise SnapshotError(f"created_at: {error}") from error
        self._head = {"model": model, "version": version, "delta_seq": delta_seq, "created_at": moment}
        Manifest.create(**self._head, tables=())
        if (self.directory / SNAPSHOT_MANIFEST).exists():
            raise SnapshotError(
                f"{self.directory} holds a snapshot already: write to a directory of its own", file=SNAPSHOT_MANIFEST
            )
        files.make_dir(self.directory)
        self._tables: dict[str, TableWriter] = {}
        self._features: list[dict[str, Any]] = []
        self._warmup: dict[str, str] = {}
        self._requests: list[str] = []
        self._dense: dict[str, str] | None = None
        self._closed = False

    def table(
        self,
        name: str,
        *,
        dim: int,
        dtype: str = "float32",
        key: str = "int64",
        default: str | Sequence[float] = "zeros",
        format: ShardFormat = "arrow",
        rows_per_shard: int | None = None,
    ) -> TableWriter:
        """A new table, to be filled by `write`.

        key: `int64`, `uint64`, or `string` for keys that are text. dtype: how rows are stored once loaded (float32,
        float16, bfloat16, int8). default: the answer for
        keys it does not hold: "zeros", "mean", or `dim` numbers. format: of its shards; `arrow` loads
        fastest. rows_per_shard: default as many as make 256 MiB.
        """
        self._open()
        if name in self._tables:
            raise SnapshotError(f"table {name!r} was begun already", file=SNAPSHOT_MANIFEST)
        if rows_per_shard is not None and rows_per_shard < 1:
            raise SnapshotError(f"rows_per_shard: expected at least 1, came {rows_per_shard}")
        if format not in _FORMATS:
            raise SnapshotError(f"format: expected one of {', '.join(_FORMATS)}, came {format!r}")
        chosen = default if isinstance(default, str) else [float(x) for x in default]
        entry = {"name": name, "key": key, "dim": dim, "dtype": dtype, "default": chosen}
        Manifest.create(**self._head, tables=({**entry, "rows": 0, "shards": ()},))
        table = TableWriter(self.directory, entry, format, rows_per_shard)
        self._tables[name] = table
        return table

    def feature(
        self,
        name: str,
        *,
        table: str,
        combiner: str | Combiner | None = None,
        padding_key: int | np.integer | str | None = None,
    ) -> None:
        """A named input of the model that reads `table`; several may read one table."""
        self._open()
        padding = int(padding_key) if isinstance(padding_key, np.integer) else padding_key
        self._features.append({"name": name, "table": table, "combiner": combiner, "padding_key": padding})

    def dense(self, model: str | Path | bytes) -> None:
        """The dense part: an ONNX file, or its bytes. Weights that lie in files beside the file are taken in."""
        self._open()
        content = model if isinstance(model, bytes) else read_dense(model, SnapshotError)
        files.publish_bytes(self.directory / DENSE, content)
        self._dense = {"path": DENSE}

    def warmup(self, table: str, keys: Any) -> None:
        """Keys to have in memory before the version serves, the most wanted first."""
        self._open()
        if table not in self._tables:
            raise SnapshotError(f"warmup: {table!r} is not a table of this snapshot; begin it first")
        key_type = self._tables[table].key_type
        path = f"{WARMUP}/{check_name('table', table)}{KEYS_SUFFIX}"
        column: np.ndarray
        if key_type is KeyType.STRING:
            column = np.array([text.encode() for text in as_arrow_strings(keys).to_pylist()], dtype=np.bytes_)
        else:
            column = from_codes(as_codes(keys, key_type), key_type)
        files.make_dir(self.directory / WARMUP)
        with files.publish(self.directory / path) as file:
            np.lib.format.write_array(file, column, allow_pickle=False)
        self._warmup[table] = path

    def request(self, inputs: Mapping[str, Any]) -> None:
        """Record a request, inputs as `Model.predict` takes them: each is run with the dense part before it serves."""
        self._open()
        path = f"{WARMUP}/{REQUESTS}/{len(self._requests):05d}{REQUEST_SUFFIX}"
        files.make_dir((self.directory / path).parent)
        write_request(self.directory / path, inputs)
        self._requests.append(path)

    def close(self) -> Manifest:
        """Finish the tables and publish `snapshot.json`."""
        self._open()
        self._closed = True
        try:
            tables = tuple(table.finish() for table in self._tables.values())
            manifest = Manifest.create(
                **self._head,
                tables=tables,
                features=tuple(self._features),
                warmup=self._warmup,
                requests=tuple(self._requests),
                dense=self._dense,
            )
            manifest.write(self.directory / SNAPSHOT_MANIFEST)
        except BaseException:
            self._discard()
            raise
        return manifest

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._closed = True
            self._discard()
        elif not self._closed:
            self.close()

    def _discard(self) -> None:
        for table in self._tables.values():
            table.discard()

    def _open(self) -> None:
        if self._closed:
            raise SnapshotError(f"{self.directory} is finished: begin another snapshot")


class TableWriter:
    """A table of a snapshot that is being written. Made by `SnapshotWriter.table`."""

    def __init__(self, directory: Path, entry: dict[str, Any], format: ShardFormat, rows_per_shard: int | None) -> None:
        self._directory, self._entry, self._format = directory, entry, format
        self.name: str = entry["name"]
        self.dim: int = entry["dim"]
        self.key_type = KeyType(entry["key"])
        self.rows = 0
        self._shards: list[dict[str, Any]] = []
        self._shard: ShardFile | None = None
        self._shard_rows = 0
        half = entry["dtype"] == StorageDtype.FLOAT16 and format != "hugectr"
        self._value_dtype = np.dtype(np.float16 if half else np.float32)
        row_bytes = 8 + self.dim * self._value_dtype.itemsize
        self._rows_per_shard = rows_per_shard or max(1, _SHARD_BYTES // row_bytes)
        self._rows_per_batch = max(1, _BATCH_BYTES // row_bytes)
        if self.key_type is KeyType.STRING and format not in ("arrow", "parquet"):
            raise SnapshotError(f"table {self.name!r}: string keys need format arrow or parquet, came {format}")
        if self.key_type is KeyType.UINT64 and format == "hugectr":
            raise SnapshotError(f"table {self.name!r}: a HugeCTR folder holds int64 keys, not uint64")

    def write(self, keys: Any, vectors: Any) -> None:
        """Append rows: keys [n] of the table's key type, vectors float [n, dim], finite, no key twice in the table.

        Both may be NumPy arrays, sequences, Arrow columns, pandas columns or tensors; vectors also columns of lists or
        arrays. Raises InvalidInput for keys of another type, SnapshotError for vectors of another shape or that
        hold NaN or Inf (in the shard's dtype, which is float16 for a float16 table and else float32).
        Duplicate keys are found when the snapshot is loaded.
        """
        column = self._column(keys)
        try:
            values = as_rows(vectors)
        except InvalidInput as error:
            raise SnapshotError(f"table {self.name!r}: {error}") from error
        if values.shape != (len(column), self.dim) and len(values) + len(column):
            raise SnapshotError(
                f"table {self.name!r}: expected vectors of shape [{len(column)}, {self.dim}] (keys, dim), came {list(values.shape)}"
            )
        for start in range(0, len(column), self._rows_per_batch):
            stop = start + self._rows_per_batch
            self._append(column[start:stop], self._narrowed(values[start:stop]))

    def finish(self) -> dict[str, Any]:
        """Publish the last shard and return the table's manifest entry. Called by the snapshot's end."""
        self._finish_shard()
        return {**self._entry, "rows": self.rows, "shards": tuple(self._shards)}

    def discard(self) -> None:
        """Leave no shard half-written."""
        if self._shard is not None:
            self._shard.discard()
            self._shard = None

    def _column(self, keys: Any) -> Any:
        try:
            if self.key_type is KeyType.STRING:
                return as_arrow_strings(keys)
            return from_codes(as_codes(keys, self.key_type), self.key_type)
        except InvalidInput as error:
            hint, came = "", guessed_key_type(keys)
            if (came is KeyType.STRING) is not (self.key_type is KeyType.STRING):
                hint = f'; a table for such keys is begun as table({self.name!r}, key="{came}", …)'
            raise InvalidInput(f"table {self.name!r}: {error}{hint}") from error

    def _narrowed(self, values: np.ndarray) -> Any:
        with np.errstate(over="ignore"):
            vectors = np.ascontiguousarray(
                as_vectors(values) if values.dtype.kind == "f" else values, self._value_dtype
            )
        row = first_not_finite(vectors)
        if row is not None:
            raise SnapshotError(
                f"table {self.name!r}: the vector holds NaN or Inf, or overflows {self._value_dtype}",
                file=self._path(),
                row=self._shard_rows + row,
            )
        return vectors

    def _append(self, column: Any, vectors: Any) -> None:
        while len(column):
            if self._shard is None:
                self._shard = self._new_shard()
            n = min(len(column), self._rows_per_shard - self._shard_rows)
            self._shard.write(column[:n], vectors[:n])
            self.rows += n
            self._shard_rows += n
            if self._shard_rows == self._rows_per_shard:
                self._finish_shard()
            column, vectors = column[n:], vectors[n:]

    def _path(self) -> str:
        return f"{self.name}/part-{len(self._shards):05d}{_FORMATS[self._format]}"

    def _new_shard(self) -> ShardFile:
        path = self._directory / self._path()
        files.make_dir(path.parent)
        if self._format == "hugectr":
            return HugeCtrShard(path)
        if self._format in ("safetensors", "npz"):
            return TensorShard(path, self.key_type.value, self._value_dtype.name, self.dim)
        key_type = pa.large_string() if self.key_type is KeyType.STRING else pa.type_for_alias(self.key_type.value)
        return ArrowShard(path, key_type, pa.from_numpy_dtype(self._value_dtype), self.dim)

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self._shards.append({"path": self._path(), "rows": self._shard_rows, "xxh3": self._shard.finish()})
            self._shard, self._shard_rows = None, 0
