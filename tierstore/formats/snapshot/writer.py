"""Writing a snapshot: what a trainer calls when a day's model is ready.

A `SnapshotWriter` and its tables belong to one thread at a time. Rows go to disk batch by batch. Every
file is published whole and durable, and `snapshot.json` last: a crash, or an error in the block, leaves
a directory that readers do not accept as a snapshot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from tierstore.arguments import check_name
from tierstore.errors import InvalidInput, SnapshotError, shown
from tierstore.formats import files
from tierstore.formats.columns import as_vectors, first_not_finite
from tierstore.formats.keys import as_codes, from_codes
from tierstore.formats.names import (
    GOLDEN_INDEX,
    KEYS_SUFFIX,
    REQUEST_SUFFIX,
    REQUESTS,
    SNAPSHOT_MANIFEST,
    WARMUP,
    dense_file,
)
from tierstore.formats.normalize import guessed_key_type, vector_rows
from tierstore.formats.objects import is_url
from tierstore.formats.onnx_file import read_dense
from tierstore.formats.rounding import Rounding
from tierstore.formats.row_times import TIME_BYTES, Times, given_times
from tierstore.formats.snapshot.golden import (
    MAX_BYTES,
    RTOL,
    GoldenEntry,
    GoldenIndex,
    checked_tolerance,
    too_many,
    write_example,
)
from tierstore.formats.snapshot.manifest import MAX_REQUESTS, Manifest
from tierstore.formats.snapshot.recorded_requests import write_request
from tierstore.formats.snapshot.shard_writers import ArrowShard, HugeCtrShard, ShardFile, TensorShard
from tierstore.formats.strings import as_arrow_strings
from tierstore.formats.times import TimeLike, as_utc
from tierstore.formats.uploads import Uploads, scratch_directory
from tierstore.types import Combiner, KeyType, StorageDtype

ShardFormat = Literal["arrow", "parquet", "safetensors", "npz", "hugectr"]
_FORMATS = {"arrow": ".arrow", "parquet": ".parquet", "safetensors": ".safetensors", "npz": ".npz", "hugectr": ""}
_SHARD_BYTES = 256 << 20
_BATCH_BYTES = 64 << 20


class SnapshotWriter:
    """Write a snapshot to a directory, or to a URL of an object storage.

    >>> with SnapshotWriter("snapshots/20261120", model="ctr", version=20261120, delta_seq=41820) as snapshot:
    ...     item = snapshot.table("item", dim=32, dtype="float16", default="mean")
    ...     for keys, vectors in batches:
    ...         item.write(keys, vectors)
    ...     snapshot.feature("clicked", table="item", combiner="mean")
    ...     snapshot.dense("model.onnx")

    delta_seq: deltas up to this one are in the rows already. created_at: a datetime with a zone, seconds since 1970 or
    ISO 8601 with an offset; default now. The directory may exist, but not hold a snapshot. On the way to a URL files
    are in `scratch`, by default where temporary files are: four shards and what is being written at most. There an
    error in the block removes what was uploaded. What is wrong with the arguments is SnapshotError, at once where it
    can be seen at once, and at the end of the block otherwise.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        model: str,
        version: int,
        delta_seq: int = 0,
        created_at: TimeLike | None = None,
        scratch: str | Path | None = None,
    ) -> None:
        try:
            moment = datetime.now(UTC).replace(microsecond=0) if created_at is None else as_utc(created_at)
        except ValueError as error:
            raise SnapshotError(f"created_at: {error}") from error
        self._head = {"model": model, "version": version, "delta_seq": delta_seq, "created_at": moment}
        Manifest.create(**self._head, tables=())
        if not isinstance(directory, (str, Path)) or not str(directory):
            raise SnapshotError(f"directory: expected a path or a URL, got {shown(directory)}")
        self.target = str(directory)
        self._scratch = contextlib.ExitStack()
        self._uploads: Uploads | None = None
        if is_url(self.target):
            self.directory = self._scratch.enter_context(scratch_directory(scratch, "tierstore-snapshot-"))
        else:
            self.directory = Path(directory)
        self._begin()
        self._tables: dict[str, TableWriter] = {}
        self._features: list[dict[str, Any]] = []
        self._warmup: dict[str, str] = {}
        self._requests: dict[str, list[str]] = {}  # by head, as the graphs are
        self._graphs: dict[str, str] = {}
        self._golden: list[GoldenEntry] = []
        self._golden_bytes = 0
        self._closed = False

    def _begin(self) -> None:
        if is_url(self.target):
            try:
                self._uploads = Uploads(self.target, self.directory)
                there = self._uploads.exists(SNAPSHOT_MANIFEST)
            except BaseException:
                self._scratch.close()
                raise
        else:
            there = (self.directory / SNAPSHOT_MANIFEST).exists()
        if there:
            self._scratch.close()
            raise SnapshotError(
                f"{self.target} holds a snapshot already: write to a place of its own", file=SNAPSHOT_MANIFEST
            )
        files.make_dir(self.directory)

    def _written(self, path: Path) -> None:
        """A file is complete."""
        if self._uploads is not None:
            self._uploads.add(path)

    def table(
        self,
        name: str,
        *,
        dim: int,
        dtype: str = "float32",
        key: str = "int64",
        default: str | Sequence[float] = "zeros",
        ttl_s: int | str | None = None,
        time_column: str | None = None,
        format: ShardFormat = "arrow",
        rows_per_shard: int | None = None,
    ) -> TableWriter:
        """A new table, to be filled by `write`.

        key: `int64`, `uint64`, or `string` for keys that are text. dtype: how rows are stored once loaded (float32,
        float16, bfloat16, int8, int4). default: the answer for
        keys it does not hold: "zeros", "mean", or `dim` numbers. ttl_s: rows that were not written for so long expire:
        seconds, or a time such as `30d`. time_column: the name for the times that `write` is given; without it all
        rows have `created_at`. format: of its shards; `arrow` loads
        fastest. rows_per_shard: default as many as make 256 MiB.
        """
        self._open()
        if name in self._tables:
            raise SnapshotError(f"table {name!r} was begun already", file=SNAPSHOT_MANIFEST)
        if rows_per_shard is not None and rows_per_shard < 1:
            raise SnapshotError(f"rows_per_shard: expected at least 1, got {rows_per_shard}")
        if format not in _FORMATS:
            raise SnapshotError(f"format: expected one of {', '.join(_FORMATS)}, got {format!r}")
        try:
            chosen = default if isinstance(default, str) else [float(x) for x in default]
        except (TypeError, ValueError) as error:
            raise SnapshotError(
                f"table {name!r}: default: expected 'zeros', 'mean' or {dim} numbers, got {shown(default)}"
            ) from error
        entry = {"name": name, "key": key, "dim": dim, "dtype": dtype, "default": chosen}
        entry |= {"ttl_s": ttl_s, "time_column": time_column}
        Manifest.create(**self._head, tables=({**entry, "rows": 0, "shards": ()},))
        table = TableWriter(self.directory, entry, format, rows_per_shard, self._written)
        self._tables[name] = table
        return table

    def feature(
        self,
        name: str,
        *,
        table: str,
        combiner: str | Combiner | None = None,
        padding_key: int | np.integer | str | None = None,
        hash: Mapping[str, Any] | None = None,
    ) -> None:
        """A named input of the model that reads `table`; several may read one table.

        hash: the table's keys are row numbers, and requests have keys that are hashed to them: `{"mod": rows}`,
        with `"seed"` by XXH3-64 and not by the remainder alone, and with `"key"` (`int64`, `uint64`, `string`)
        for keys of another type than int64; with `"function"` as a trainer hashes (docs/formats.md), also by
        `tierstore.hash_like`.
        """
        self._open()
        if hash is not None and not isinstance(hash, Mapping):
            raise SnapshotError(f"feature {name!r}: hash: expected a mapping, such as {{'mod': 9}}, got {shown(hash)}")
        padding = int(padding_key) if isinstance(padding_key, np.integer) else padding_key
        self._features.append({"name": name, "table": table, "combiner": combiner, "padding_key": padding})
        if hash is not None:
            self._features[-1]["hash"] = dict(hash)

    def dense(self, model: str | Path | bytes | bytearray | memoryview, *, head: str = "") -> None:
        """The dense part: an ONNX file, or its bytes. Weights in other files next to the file are included.

        head: the name of a further one over the same tables, which is served as `<model>.<head>`.
        """
        self._open()
        path = dense_file(head and check_name("head", head))
        content = read_dense(model, SnapshotError)
        files.publish_bytes(self.directory / path, content)
        self._written(self.directory / path)
        self._graphs[head] = path

    def warmup(self, table: str, keys: Any) -> None:
        """Keys to have in memory before the version serves, the most important first."""
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
        self._written(self.directory / path)
        self._warmup[table] = path

    def request(self, inputs: Mapping[str, Any], *, head: str = "") -> None:
        """Record a request, inputs as for `Model.predict`: the dense part, or that of a head, is run with
        each before it serves.
        """
        self._open()
        requests = self._requests.setdefault(head and check_name("head", head), [])
        folder = f"{WARMUP}/{REQUESTS}/{head}" if head else f"{WARMUP}/{REQUESTS}"
        path = f"{folder}/{len(requests):05d}{REQUEST_SUFFIX}"
        files.make_dir((self.directory / path).parent)
        write_request(self.directory / path, inputs)
        self._written(self.directory / path)
        requests.append(path)

    def golden(
        self,
        inputs: Mapping[str, Any],
        expected: Mapping[str, Any],
        *,
        rtol: float = RTOL,
        atol: float | None = None,
        head: str | None = None,
    ) -> None:
        """An example of what the version must answer: a load that gets another answer refuses the snapshot.

        >>> snapshot.golden({"user_id": users, "item_id": items}, {"score": ranker.predict(rows)})

        inputs: as for `Model.predict`. expected: the scores by output, or rows by feature (pooled ones for bags), as
        the trainer has them. rtol and atol: how far a number may be off, `atol + rtol * abs(expected)`; atol defaults
        to 1e-5 of the largest expected number. Labels, ids and strings must be equal, and NaN equals NaN. head: whose
        scores they are, for a further dense part.

        Keys that the table holds, one that it does not, an empty bag, and outputs that are not all equal make an
        example that notices something. At most 1,000 a head, and 256 MiB in all. An earlier release passes them over.
        """
        self._open()
        of = check_name("head", head) if head else ""
        if sum(entry.head == of for entry in self._golden) >= MAX_REQUESTS:
            raise too_many(of)
        rtol, atol = checked_tolerance("rtol", rtol), None if atol is None else checked_tolerance("atol", atol)
        folder = self.directory / Path(GOLDEN_INDEX).parent
        entry = GoldenEntry(path=f"{len(self._golden):05d}{REQUEST_SUFFIX}", head=of, rtol=rtol, atol=atol)
        files.make_dir(folder)
        self._golden_bytes += write_example(folder / entry.path, inputs, expected)
        if self._golden_bytes > MAX_BYTES:
            raise SnapshotError(f"golden examples: expected at most {MAX_BYTES >> 20} MiB of arrays in all")
        self._written(folder / entry.path)
        self._golden.append(entry)

    def _write_golden(self) -> None:
        if not self._golden:
            return
        if unknown := {entry.head for entry in self._golden} - {"", *self._graphs}:
            raise SnapshotError(f"a golden example is of head {min(unknown)!r}, which has no graph: call `dense`")
        incomplete = tuple(name for name, table in self._tables.items() if table.is_incomplete)
        path = self.directory / GOLDEN_INDEX
        GoldenIndex(examples=tuple(self._golden), incomplete=incomplete).write(path)
        self._written(path)

    def close(self) -> Manifest:
        """Finish the tables and publish `snapshot.json`."""
        self._open()
        self._closed = True
        try:
            tables = tuple(table.finish() for table in self._tables.values())
            if unknown := self._requests.keys() - {"", *self._graphs}:
                raise SnapshotError(
                    f"a request is recorded for head {min(unknown)!r}, which has no graph: call `dense`"
                )
            self._write_golden()
            dense = self._graphs.pop("", None)
            manifest = Manifest.create(
                **self._head,
                tables=tables,
                features=tuple(self._features),
                warmup=self._warmup,
                requests=tuple(self._requests.get("", ())),
                dense=None if dense is None else {"path": dense},
                heads={
                    head: {"path": path, "requests": tuple(self._requests.get(head, ()))}
                    for head, path in self._graphs.items()
                },
            )
            manifest.write(self.directory / SNAPSHOT_MANIFEST)
            if self._uploads is not None:
                self._uploads.finish_with(self.directory / SNAPSHOT_MANIFEST)
        except BaseException:
            self._discard()
            raise
        if self._uploads is not None:
            self._uploads.close()
        self._scratch.close()
        return manifest

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._closed = True
            self._discard()
        elif not self._closed:
            self.close()

    def _discard(self) -> None:
        for table in self._tables.values():
            table.discard()
        if self._uploads is not None:
            self._uploads.abort()
        self._scratch.close()

    def _open(self) -> None:
        if self._closed:
            raise SnapshotError(f"{self.target} is finished: begin another snapshot")


class TableWriter:
    """A table of a snapshot that is being written. Made by `SnapshotWriter.table`.

    Attributes: `rows`, how many were written, and `rounding`, how far their numbers are off once they are stored in the
    table's dtype: `rounding.largest` and `rounding.mean`. Set `is_incomplete` where rows were left out on purpose: a
    golden example that needs one of these is then passed over.
    """

    def __init__(
        self,
        directory: Path,
        entry: dict[str, Any],
        format: ShardFormat,
        rows_per_shard: int | None,
        written: Callable[[Path], None],
    ) -> None:
        self._directory, self._entry, self._format, self._written = directory, entry, format, written
        self.name: str = entry["name"]
        self.dim: int = entry["dim"]
        self.key_type = KeyType(entry["key"])
        self.rows = 0
        self.is_incomplete = False
        self._shards: list[dict[str, Any]] = []
        self._shard: ShardFile | None = None
        self._shard_rows = 0
        self.dtype = StorageDtype(entry["dtype"])
        self.rounding = Rounding(self.dtype)
        half = self.dtype is StorageDtype.FLOAT16 and format != "hugectr"
        self._value_dtype = np.dtype(np.float16 if half else np.float32)
        self._time_column: str | None = entry["time_column"]
        row_bytes = 8 + self.dim * self._value_dtype.itemsize + (TIME_BYTES if self._time_column else 0)
        self._rows_per_shard = rows_per_shard or max(1, _SHARD_BYTES // row_bytes)
        self._rows_per_batch = max(1, _BATCH_BYTES // row_bytes)
        if self.key_type is KeyType.STRING and format not in ("arrow", "parquet"):
            raise SnapshotError(f"table {self.name!r}: string keys need format arrow or parquet, got {format}")
        if self.key_type is KeyType.UINT64 and format == "hugectr":
            raise SnapshotError(f"table {self.name!r}: a HugeCTR folder holds int64 keys, not uint64")
        if self._time_column and format == "hugectr":
            raise SnapshotError(f"table {self.name!r}: a HugeCTR folder holds no times; write another format")

    def write(self, keys: Any, vectors: Any, times: Any = None) -> None:
        """Append rows: keys [n] of the table's key type, vectors float [n, dim], finite, no key twice in the table.

        Both may be NumPy arrays, sequences, Arrow columns, pandas columns or tensors; vectors also columns of lists or
        arrays. times: when each row was written, for a table with a `time_column`: seconds since 1970, or timestamps.
        Raises InvalidInput for keys of another type, SnapshotError for vectors of another shape or that
        hold NaN or Inf or a number that the table's dtype cannot hold.
        Duplicate keys are found when the snapshot is loaded.
        """
        column = self._column(keys)
        try:
            values = vector_rows(vectors)
        except InvalidInput as error:
            raise SnapshotError(f"table {self.name!r}: {error}") from error
        if values.shape != (len(column), self.dim) and len(values) + len(column):
            raise SnapshotError(
                f"table {self.name!r}: expected vectors of shape [{len(column)}, {self.dim}] (keys, dim), got "
                f"{list(values.shape)}"
            )
        written = self._times(times, len(column))
        for start in range(0, len(column), self._rows_per_batch):
            part = slice(start, start + self._rows_per_batch)
            self._append(column[part], self._narrowed(values[part]), None if written is None else written[part])

    def finish(self) -> dict[str, Any]:
        """Publish the last shard and return the table's manifest entry. Called when the snapshot is closed."""
        self._finish_shard()
        return {**self._entry, "rows": self.rows, "shards": tuple(self._shards)}

    def discard(self) -> None:
        """Remove shards that are not finished."""
        if self._shard is not None:
            self._shard.discard()
            self._shard = None

    def _column(self, keys: Any) -> Any:
        try:
            if self.key_type is KeyType.STRING:
                return as_arrow_strings(keys)
            return from_codes(as_codes(keys, self.key_type), self.key_type)
        except InvalidInput as error:
            hint, got = "", guessed_key_type(keys)
            if (got is KeyType.STRING) is not (self.key_type is KeyType.STRING):
                hint = f'; a table for such keys is begun as table({self.name!r}, key="{got}", …)'
            raise InvalidInput(f"table {self.name!r}: {error}{hint}") from error

    def _times(self, times: Any, rows: int) -> Times | None:
        if (times is None) is not (self._time_column is None):
            what = (
                "no times, as it has no time_column"
                if times is not None
                else f"times of its rows for {self._time_column!r}"
            )
            raise SnapshotError(f"table {self.name!r}: expected {what}")
        if times is None:
            return None
        try:
            written = given_times(times)
        except InvalidInput as error:
            raise SnapshotError(f"table {self.name!r}: {error}") from error
        if len(written) != rows:
            raise SnapshotError(f"table {self.name!r}: expected {rows} times, one for each key, got {len(written)}")
        return written

    def _narrowed(self, values: np.ndarray) -> Any:
        given = as_vectors(values)
        with np.errstate(over="ignore"):
            vectors = np.ascontiguousarray(given, self._value_dtype)
        row = first_not_finite(vectors)
        if row is None:
            row = self.rounding.add(given)
        if row is not None:
            raise SnapshotError(
                f"table {self.name!r}: the vector holds NaN or Inf, or overflows {self.dtype}",
                file=self._path(),
                row=self._shard_rows + row,
            )
        return vectors

    def _append(self, column: Any, vectors: Any, times: Times | None) -> None:
        while len(column):
            if self._shard is None:
                self._shard = self._new_shard()
            n = min(len(column), self._rows_per_shard - self._shard_rows)
            self._shard.write(column[:n], vectors[:n], None if times is None else times[:n])
            self.rows += n
            self._shard_rows += n
            if self._shard_rows == self._rows_per_shard:
                self._finish_shard()
            column, vectors, times = column[n:], vectors[n:], None if times is None else times[n:]

    def _path(self) -> str:
        return f"{self.name}/part-{len(self._shards):05d}{_FORMATS[self._format]}"

    def _new_shard(self) -> ShardFile:
        path = self._directory / self._path()
        files.make_dir(path.parent)
        if self._format == "hugectr":
            return HugeCtrShard(path)
        if self._format in ("safetensors", "npz"):
            return TensorShard(path, self.key_type.value, self._value_dtype.name, self.dim, self._time_column)
        key_type = pa.large_string() if self.key_type is KeyType.STRING else pa.type_for_alias(self.key_type.value)
        return ArrowShard(path, key_type, pa.from_numpy_dtype(self._value_dtype), self.dim, self._time_column)

    def _finish_shard(self) -> None:
        if self._shard is not None:
            path = self._path()
            self._shards.append({"path": path, "rows": self._shard_rows, "xxh3": self._shard.finish()})
            self._shard, self._shard_rows = None, 0
            self._written(self._directory / path)
