"""`snapshot.json`: what a snapshot holds, checked.

A `Manifest` is immutable; any thread may use it. It has passed every check that does not need the files
that it names (`reader.py` checks those). `schema/snapshot.schema.json`
describes the same document for others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from tierstore.arguments import check_name
from tierstore.errors import SnapshotError, StorageError, shown
from tierstore.formats.columns import KEY, MAX_DIM, VECTOR
from tierstore.formats.files import publish_json
from tierstore.formats.names import KEYS_SUFFIX, MAX_ORDINAL, REQUEST_SUFFIX, SNAPSHOT_MANIFEST
from tierstore.formats.objects import Location
from tierstore.formats.regular import MAX_DOCUMENT_BYTES, read_regular
from tierstore.formats.row_times import MAX_TTL_S, ttl_seconds
from tierstore.formats.times import format_time, parse_time
from tierstore.formats.trainer_hash import FUNCTIONS
from tierstore.types import MOST_HEADS, Combiner, FeatureSpec, KeyHash, KeyType, StorageDtype, TableSpec, TrainerHash

MAX_ROWS = 1 << 62
MAX_REQUESTS = 1000  # to warm the dense part with
MAX_PREFIX = 256  # characters of a text that is hashed before each key
MAX_TABLES_WITH_TTL = (1 << 15) - 1  # the highest bit of a table's id is for its times
# the first magnitude that rounds to infinity, and in bfloat16's case the float32 bit pattern of it
_OVERFLOW_FLOAT32 = 2.0**128 - 2.0**103
_OVERFLOW_FLOAT16 = 65520.0
_OVERFLOW_BFLOAT16 = 2.0**128 - 2.0**119

Default = Literal["zeros", "mean"] | tuple[float, ...]


def overflows(value: float, dtype: StorageDtype) -> bool:
    """Whether `value` would become infinite in `dtype` (an `int8` row has a float32 offset, an `int4` one float16)."""
    limit = {
        StorageDtype.FLOAT16: _OVERFLOW_FLOAT16,
        StorageDtype.INT4: _OVERFLOW_FLOAT16,
        StorageDtype.BFLOAT16: _OVERFLOW_BFLOAT16,
    }
    return abs(value) >= limit.get(dtype, _OVERFLOW_FLOAT32)


def _default(value: object) -> Default:
    if value == "zeros" or value == "mean":
        return value
    numbers = list(value) if isinstance(value, (list, tuple)) else [None]
    if any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in numbers):
        raise ValueError('expected "zeros", "mean" or a list of dim numbers')
    try:
        return tuple(map(float, numbers))  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError("a number is too large for any storage dtype") from None


def _default_document(value: Default) -> object:
    return value if isinstance(value, str) else list(value)


def _padding_key(value: object) -> int | str | None:
    if value is None or (isinstance(value, (int, str)) and not isinstance(value, bool)):
        return value
    raise ValueError("expected a key: an integer, or a string where the table's keys are strings")


def _moment(value: object) -> datetime:
    if isinstance(value, datetime):
        return parse_time(format_time(value))
    if isinstance(value, str):
        return parse_time(value)
    raise ValueError("expected an ISO 8601 time such as 2026-11-20T02:00:00Z")


def check_path(path: str) -> str:
    """Return `path` if its text is a relative path that stays within its directory. Raises ValueError."""
    pure = PurePosixPath(path)
    if not path or "\0" in path or "\\" in path or pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ValueError(f"expected a path relative to the snapshot and within it, got {path!r}")
    return path


def _keys_path(path: str) -> str:
    if not path.endswith(KEYS_SUFFIX):
        raise ValueError(f"expected a {KEYS_SUFFIX} file, got {path!r}")
    return check_path(path)


def _request_path(path: str) -> str:
    if not path.endswith(REQUEST_SUFFIX):
        raise ValueError(f"expected a {REQUEST_SUFFIX} file, got {path!r}")
    return check_path(path)


def _named(kind: str) -> AfterValidator:
    return AfterValidator(lambda name: check_name(kind, name))


RelativePath = Annotated[str, AfterValidator(check_path)]
Rows = Annotated[int, Field(ge=0, le=MAX_ROWS)]


class _Entry(BaseModel):
    # strict: 1 is no string, "1" and true are no numbers, and 1.0 is no integer
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ShardEntry(_Entry):
    """One file (or HugeCTR folder) of a table's rows."""

    path: RelativePath
    rows: Rows
    xxh3: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None


class ColumnsEntry(_Entry):
    """The columns of a table's Parquet and Arrow shards, where they are not `key` and `vector`."""

    key: Annotated[str, Field(min_length=1)] = KEY
    vector: Annotated[str, Field(min_length=1)] = VECTOR


class TableEntry(_Entry):
    """A table and the shards of its rows. `default` is a word, or a tuple of `dim` numbers.

    `time_column`: the column, or tensor, that says when each row was written; without it all have
    the snapshot's `created_at`.
    """

    name: Annotated[str, _named("table")]
    key: Annotated[KeyType, BeforeValidator(lambda v: KeyType(v) if v in list(KeyType) else v)] = KeyType.INT64
    dim: Annotated[int, Field(ge=1, le=MAX_DIM)]
    dtype: Annotated[StorageDtype, BeforeValidator(lambda v: StorageDtype(v) if v in list(StorageDtype) else v)]
    default: Annotated[Default, PlainValidator(_default), PlainSerializer(_default_document)] = "zeros"
    columns: ColumnsEntry = ColumnsEntry()
    ttl_s: Annotated[int, BeforeValidator(ttl_seconds), Field(ge=1, le=MAX_TTL_S)] | None = None
    time_column: Annotated[str, Field(min_length=1)] | None = None
    rows: Rows
    shards: tuple[ShardEntry, ...]

    @model_validator(mode="after")
    def _check(self) -> TableEntry:
        total = sum(shard.rows for shard in self.shards)
        if total != self.rows:
            raise ValueError(f"rows: expected the sum of its shards' rows, {total}, got {self.rows}")
        twice = _first_repeated(shard.path for shard in self.shards)
        if twice is not None:
            raise ValueError(f"shards: {twice!r} is listed twice")
        if not isinstance(self.default, str):
            self._check_default(self.default)
        self._check_time_column()
        return self

    def _check_time_column(self) -> None:
        if self.time_column is None:
            return
        if self.ttl_s is None:
            raise ValueError("time_column: of no use without ttl_s; give both, or neither")
        if self.time_column in (self.columns.key, self.columns.vector):
            raise ValueError(f"time_column: {self.time_column!r} is the column of the keys or of the vectors")

    def _check_default(self, default: tuple[float, ...]) -> None:
        if len(default) != self.dim:
            raise ValueError(f"default: expected {self.dim} numbers, as dim says, got {len(default)}")
        for i, value in enumerate(default):
            if not math.isfinite(value) or overflows(value, self.dtype):
                raise ValueError(f"default[{i}]: {value} is not a finite {self.dtype} number")

    def spec(self) -> TableSpec:
        return TableSpec(self.name, self.key, self.dim, self.dtype, self.default, self.ttl_s)


_OPTIONS = ("seed", "salt", "mask", "prefix", "namespace", "bits", "absolute", "alternate_sign")
_NAMES = ", ".join(sorted(FUNCTIONS))
_Seed = Annotated[int, Field(ge=0, lt=1 << 64)]


class HashEntry(_Entry):
    """How keys of requests become row numbers of the table: `formats/key_hash.py`, or with a `function`
    `formats/trainer_hash.py`.
    """

    mod: Annotated[int, Field(ge=1, le=MAX_ROWS)]
    seed: _Seed | None = None
    key: Annotated[KeyType, BeforeValidator(lambda v: KeyType(v) if v in list(KeyType) else v)] = KeyType.INT64
    function: str | None = None
    salt: Annotated[tuple[_Seed, _Seed], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)] | None = (
        None
    )
    mask: int | str | None = None
    prefix: Annotated[str, Field(max_length=MAX_PREFIX)] | None = None
    namespace: Annotated[str, Field(max_length=MAX_PREFIX)] | None = None
    bits: Literal[32, 64] | None = None
    absolute: bool | None = None
    alternate_sign: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> HashEntry:
        options = {name for name in _OPTIONS if getattr(self, name) is not None}
        if self.function is None:
            if options - {"seed"}:
                raise ValueError(f"{min(options - {'seed'})}: of no use without a function; expected one of {_NAMES}")
            return self
        if (of := FUNCTIONS.get(self.function)) is None:
            raise ValueError(f"function: expected one of {_NAMES}, got {shown(self.function)}")
        if unknown := options - of.options:
            takes = ", ".join(sorted(of.options)) or "none"
            raise ValueError(f"{min(unknown)}: not an option of {self.function}, which takes {takes}")
        if self.key not in of.keys:
            raise ValueError(f"key: {self.function} hashes {' or '.join(sorted(of.keys))} keys, got {self.key}")
        self._check_options()
        return self

    def _check_options(self) -> None:
        if self.mask is not None:
            if (problem := _padding_problem(self.mask, self.key)) is not None:
                raise ValueError(f"mask: {problem}")
            if self.mod < 2:
                raise ValueError("mod: expected 2 or more with a mask, whose key has row 0 for itself")
        if self.bits is not None and self.key is KeyType.STRING:
            raise ValueError("bits: strings have none; leave it out, or give the key that requests have")
        if self.function == "vowpal_wabbit" and self.mod & (self.mod - 1):
            raise ValueError(f"mod: expected 2^b, as Vowpal Wabbit's -b says, got {self.mod}")
        if self.alternate_sign is not False and self.function == "sklearn" and 2 * self.mod > MAX_ROWS:
            raise ValueError("mod: expected at most 2^61, as hashes below 0 have rows of their own")

    def how(self) -> KeyHash | TrainerHash:
        if self.function is None:
            return KeyHash(self.mod, self.seed, self.key)
        return TrainerHash(self.function, self.mod, self.key, **{name: getattr(self, name) for name in _OPTIONS})


class FeatureEntry(_Entry):
    """A named input that reads a table."""

    name: Annotated[str, _named("feature")]
    table: str
    combiner: Annotated[Combiner, BeforeValidator(lambda v: Combiner(v) if v in list(Combiner) else v)] | None = None
    padding_key: Annotated[int | str | None, PlainValidator(_padding_key)] = None
    hash: HashEntry | None = None

    def spec(self) -> FeatureSpec:
        how = None if self.hash is None else self.hash.how()
        return FeatureSpec(self.name, self.table, self.combiner, self.padding_key, how)


Requests = Annotated[tuple[Annotated[str, AfterValidator(_request_path)], ...], Field(max_length=MAX_REQUESTS)]


class DenseEntry(_Entry):
    """The dense part: an ONNX file."""

    path: RelativePath


class HeadEntry(DenseEntry):
    """The graph of a head, and the recorded requests for it."""

    requests: Requests = ()


class Manifest(_Entry):
    """The content of `snapshot.json`. Construct with `Manifest.create`, `read` or `parse`: they raise SnapshotError."""

    format: Literal[1] = 1
    model: Annotated[str, _named("model")]
    version: Annotated[int, Field(ge=1, le=MAX_ORDINAL)]
    created_at: (
        Annotated[datetime, PlainValidator(_moment), PlainSerializer(format_time, return_type=str, when_used="json")]
        | None
    ) = None
    delta_seq: Annotated[int, Field(ge=0, lt=MAX_ORDINAL)] = 0
    tables: tuple[TableEntry, ...]
    features: tuple[FeatureEntry, ...] = ()
    dense: DenseEntry | None = None
    heads: Annotated[Mapping[Annotated[str, _named("head")], HeadEntry], Field(max_length=MOST_HEADS)] = Field(
        default_factory=dict
    )
    warmup: Mapping[str, Annotated[str, AfterValidator(_keys_path)]] = Field(default_factory=dict)
    requests: Requests = ()

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        twice = _first_repeated(table.name for table in self.tables)
        if twice is not None:
            raise ValueError(f"tables: two are named {twice!r}")
        twice = _first_repeated(feature.name for feature in self.features)
        if twice is not None:
            raise ValueError(f"features: two are named {twice!r}")
        for i, entry in enumerate(self.tables):
            if entry.ttl_s is not None and entry.time_column is None and self.created_at is None:
                raise ValueError(f"tables[{i}].ttl_s: needs time_column, or else created_at of the snapshot")
            if entry.ttl_s is not None and len(self.tables) > MAX_TABLES_WITH_TTL:
                raise ValueError(f"tables[{i}].ttl_s: expected at most {MAX_TABLES_WITH_TTL} tables beside it")
        tables = {table.name: table for table in self.tables}
        for i, feature in enumerate(self.features):
            if feature.table not in tables:
                raise ValueError(f"features[{i}].table: {feature.table!r} is not a table of this snapshot")
            problem = _padding_problem(feature.padding_key, tables[feature.table].key)
            if problem:
                raise ValueError(f"features[{i}].padding_key: {problem}")
            if feature.hash is not None and tables[feature.table].key is KeyType.STRING:
                raise ValueError(
                    f"features[{i}].hash: expected a table whose keys are integers, row numbers; {feature.table!r} "
                    "has string keys"
                )
        for table in self.warmup:
            if table not in tables:
                raise ValueError(f"warmup.{table}: not a table of this snapshot")
        return self

    @classmethod
    def create(cls, **fields: Any) -> Manifest:
        """A manifest of the given fields, checked. Raises SnapshotError naming the field."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise _translated(error, SNAPSHOT_MANIFEST) from error

    @classmethod
    def parse(cls, document: bytes | str, *, file: str = SNAPSHOT_MANIFEST) -> Manifest:
        """Parse and check JSON. Raises SnapshotError naming `file` and the field."""
        try:
            return cls.model_validate_json(document)
        except ValidationError as error:
            raise _translated(error, file) from error

    @classmethod
    def read(cls, path: str | Location) -> Manifest:
        """Read and check a `snapshot.json`. Raises SnapshotError."""
        path = Path(path) if isinstance(path, str) else path
        try:
            document = read_regular(path, MAX_DOCUMENT_BYTES)
        except FileNotFoundError:
            raise SnapshotError(
                f"not found in {path.parent}: not a snapshot, or one that was not finished; `tierstore import` takes "
                "files of rows as they are, Parquet and others",
                file=path.name,
            ) from None
        except StorageError:
            raise
        except OSError as error:
            raise SnapshotError(f"cannot be read: {error.strerror or error}", file=path.name) from error
        return cls.parse(document, file=path.name)

    def to_document(self) -> dict[str, Any]:
        """The document as plain JSON values, without optional fields that are at their defaults."""
        document = self.model_dump(mode="json", exclude_none=True)
        for name in ("requests", "heads"):
            if not document[name]:  # earlier releases refuse these fields
                del document[name]
        for table, entry in zip(self.tables, document["tables"], strict=True):
            if table.columns == ColumnsEntry():
                del entry["columns"]
        return document

    def write(self, path: str | Path) -> None:
        """Publish the document at `path`, whole and durable."""
        publish_json(path, self.to_document())

    @property
    def graphs(self) -> dict[str, str]:
        """The paths of the graphs, by head; that of the one without a name is `dense`."""
        return ({} if self.dense is None else {"": self.dense.path}) | {
            head: entry.path for head, entry in self.heads.items()
        }

    @property
    def recorded(self) -> dict[str, tuple[str, ...]]:
        """The paths of the recorded requests, by head."""
        return {"": self.requests} | {head: entry.requests for head, entry in self.heads.items()}

    @property
    def side_files(self) -> list[str]:
        """The paths of all graphs, warm-up keys and recorded requests, in the order of `Snapshot.identity`."""
        return [*self.graphs.values(), *self.warmup.values(), *chain.from_iterable(self.recorded.values())]

    def with_side_files(self, name_of: Callable[[str], str]) -> Manifest:
        """The same, with `name_of` its path for the path of each graph, warm-up keys and recorded request."""
        document = self.to_document()
        heads = document.get("heads", {}).values()
        for entry in (document, *heads):
            entry["requests"] = [name_of(path) for path in entry.get("requests", ())]
        for entry in filter(None, (document.get("dense"), *heads)):
            entry["path"] = name_of(entry["path"])
        document["warmup"] = {table: name_of(path) for table, path in self.warmup.items()}
        return Manifest.parse(json.dumps(document))

    def table(self, name: str) -> TableEntry:
        """The entry of table `name`; KeyError if there is none."""
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(name)

    def table_specs(self) -> dict[str, TableSpec]:
        return {table.name: table.spec() for table in self.tables}

    def feature_specs(self) -> dict[str, FeatureSpec]:
        """The features; if there are none, one for each table, with its name."""
        if not self.features:
            return {table.name: FeatureSpec(table.name, table.name) for table in self.tables}
        return {feature.name: feature.spec() for feature in self.features}


def _first_repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _padding_problem(key: int | str | None, key_type: KeyType) -> str | None:
    if key is None:
        return None
    if key_type is KeyType.STRING:
        return None if isinstance(key, str) else f"expected a string, as the table's keys are, got {key}"
    limits = np.iinfo(np.uint64 if key_type is KeyType.UINT64 else np.int64)
    if isinstance(key, str) or not int(limits.min) <= key <= int(limits.max):
        return f"expected an {key_type} key, got {key!r}"
    return None


def _translated(error: ValidationError, file: str) -> SnapshotError:
    problems = error.errors(include_url=False, include_context=False)
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return SnapshotError("; ".join(map(_shown, problems[:3])) + more, file=file)


def _shown(problem: ErrorDetails) -> str:
    """One problem as `field: reason, got value`."""
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
    reason = problem["msg"].removeprefix("Value error, ")
    got = problem["input"]
    if isinstance(got, (str, int, float)) and problem["type"] != "json_invalid" and repr(got) not in reason:
        reason += f", got {repr(got)[:80]}"
    if not where:
        return reason
    names_its_field = isinstance(got, dict) and problem["type"] == "value_error"  # a check over several fields
    return f"{where}.{reason}" if names_its_field else f"{where}: {reason}"
