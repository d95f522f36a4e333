"""Rows from messages, one a message: what a message says, which of them fit their tables, and the delta that they make.

A row has a key, a vector (None deletes it) and the moment of its event. Pure functions and values, but for `RowReader`,
which belongs to one thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.config.sources import Envelope
from tierstore.errors import ConfigError, DeltaError, InvalidInput, TierstoreError
from tierstore.formats.delta.writer import DeltaWriter
from tierstore.formats.keys import as_codes
from tierstore.formats.times import parse_time
from tierstore.kafka import envelopes
from tierstore.kafka.messages import KafkaMessage
from tierstore.kafka.row_formats import Decode, text_decoder
from tierstore.kernels import codec
from tierstore.types import KeyType, TableSpec, Vectors

ROW_BYTES = 200  # about what a row takes in memory beside the bytes of its message
_DECIMAL = re.compile("-?[0-9]{1,20}")
_SHOWN = 60  # characters of a key in a message
_FIELDS = ("key", "vector", "event_time")
# a number from so much on is in the next smaller unit: seconds (up to the year 5138), milliseconds, microseconds
_UNITS = ((1e11, 1e3), (1e14, 1.0), (1e17, 1e-3), (1e20, 1e-6))
_LATEST_MS = 253_402_300_799_000  # the year 9999


class Row(NamedTuple):
    """What a message says. vector: float64 [·]; None deletes. event_ms: since 1970."""

    table: str
    key: Any
    vector: Any
    event_ms: int
    message: KafkaMessage


class RowReader:
    """Reads rows off messages. names: the fields that are called otherwise, by `key`, `vector`, `event_time`.
    envelope: what lies around them.
    """

    def __init__(self, value: Decode, key: Decode, names: Mapping[str, str], envelope: Envelope = "none") -> None:
        self._value, self._key = value, key
        self._unwrap, self._unwrap_key = envelopes.unwrapper(envelope), envelopes.key_unwrapper(envelope)
        self._key_name, self._vector_name, self._event_name = field_names(names)

    def read(self, table: str, message: KafkaMessage) -> Row:
        """DeltaError for a message that is no row; Unreachable where its schema cannot be had now."""
        try:
            return self._read(table, message)
        except (TierstoreError, MemoryError):
            raise
        except Exception as error:  # what its decoder, or its schema, makes of it is that row's alone
            raise DeltaError(f"it cannot be read: {type(error).__name__}: {str(error)[:_SHOWN]}") from error

    def _read(self, table: str, message: KafkaMessage) -> Row:
        found, is_deleted = (None, True) if message.is_null else self._unwrap(self._value(message.value))
        if found is None and is_deleted:
            return Row(table, self._own_key(message), None, message.timestamp_ms, message)
        if not isinstance(found, dict):
            raise DeltaError(f"expected an object with a field {self._vector_name!r}, got {type(found).__name__}")
        try:
            vector = None if is_deleted else found[self._vector_name]
        except KeyError:
            names = ", ".join(map(repr, list(found)[:10])) or "none"
            raise DeltaError(
                f"expected a field {self._vector_name!r} (null deletes the row), got {names}{envelopes.hint(found)}"
            ) from None
        key, event = found.get(self._key_name), found.get(self._event_name)
        if key is None:
            key = self._own_key(message)
        moment_ms = message.timestamp_ms if event is None else event_ms(event)
        return Row(table, key, None if vector is None else _numbers(vector), moment_ms, message)

    def _own_key(self, message: KafkaMessage) -> Any:
        if message.key is None:
            raise DeltaError(
                f"expected a key, in the field {self._key_name!r} or as the message's own; there is neither"
            )
        found = self._unwrap_key(self._key(message.key))
        if not isinstance(found, dict):
            return found
        if len(found) != 1 and self._key_name not in found:
            raise DeltaError(
                f"the message's key: expected a field {self._key_name!r}, got {', '.join(map(repr, found))}"
                f"{envelopes.hint(found)}"
            )
        return found.get(self._key_name, next(iter(found.values())))


def field_names(names: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the fields for key, vector and event time. ConfigError for a name of something else."""
    if unknown := names.keys() - set(_FIELDS):
        raise ConfigError(
            f"kafka_rows_fields: expected names for {', '.join(_FIELDS)}, got {', '.join(sorted(unknown))}"
        )
    return tuple(names.get(name, name) for name in _FIELDS)


def event_ms(value: Any) -> int:
    """Milliseconds since 1970 of an event time: ISO 8601 (UTC where it names no zone), or a number of which the
    size tells the unit. DeltaError.
    """
    if type(value) in (int, float):
        for limit, factor in _UNITS:
            if 0 <= value < limit:
                return int(value * factor)
    elif isinstance(value, (str, datetime)):
        try:
            moment = parse_time(value) if isinstance(value, str) else value
            found = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
        except (ValueError, OverflowError):
            found = -1
        if 0 <= found <= _LATEST_MS:
            return found
    raise DeltaError(f"event time: expected a number since 1970 or ISO 8601 text, got {str(value)[:_SHOWN]!r}")


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows that fit a table. keys [n]; deleted bool [n]; vectors float32 [k, dim] of those k that are
    not deleted, in their order.
    """

    spec: TableSpec
    keys: Sequence[Any]
    vectors: Vectors
    deleted: npt.NDArray[np.bool_]


def fit(rows: Sequence[Row], specs: Mapping[str, TableSpec]) -> tuple[list[TableRows], list[tuple[Row, str]]]:
    """(what fits the tables, what does not with its reason). The order of rows of one table stays."""
    by_table: dict[str, list[Row]] = {}
    for row in rows:
        by_table.setdefault(row.table, []).append(row)
    fitting, bad = [], list[tuple[Row, str]]()
    for table, found in by_table.items():
        spec = specs.get(table)
        if spec is None:
            tables = ", ".join(sorted(specs))
            bad += [
                (row, f"no table {table!r} in the version that is served; its tables are {tables}") for row in found
            ]
            continue
        try:
            fitting.append(_columns(found, spec))
        except InvalidInput:
            wrong = _misfits(found, spec)
            bad += wrong
            refused = {id(row) for row, _ in wrong}
            if kept := [row for row in found if id(row) not in refused]:
                fitting.append(_columns(kept, spec))
    return fitting, bad


def _misfits(rows: Sequence[Row], spec: TableSpec) -> list[tuple[Row, str]]:
    """Rows that do not fit, with the reason, found by halves: mostly they are few."""
    try:
        _columns(rows, spec)
    except InvalidInput as error:
        if len(rows) == 1:
            return [(rows[0], f"key {str(rows[0].key)[:_SHOWN]!r}: {error}")]
        half = len(rows) // 2
        return _misfits(rows[:half], spec) + _misfits(rows[half:], spec)
    return []


def _columns(rows: Sequence[Row], spec: TableSpec) -> TableRows:
    keys = _keys([row.key for row in rows], spec.key)
    vectors = [row.vector for row in rows if row.vector is not None]
    return TableRows(spec, keys, _vectors(vectors, spec), np.array([row.vector is None for row in rows]))


def _keys(keys: list[Any], kind: KeyType) -> list[Any]:
    """Keys of a table's type. Decimal text counts as a number: that is how a message's own key is mostly written."""
    if kind is not KeyType.STRING and not set(map(type, keys)) <= {int}:
        keys = [int(key) if isinstance(key, str) and _DECIMAL.fullmatch(key) else key for key in keys]
    elif kind is KeyType.STRING and bytes in set(map(type, keys)):
        keys = [text_decoder(key) if isinstance(key, bytes) else key for key in keys]
    as_codes(keys, kind)
    return keys


def _vectors(vectors: list[Any], spec: TableSpec) -> Vectors:
    """float32 [n, dim] that the table's storage dtype can hold. DeltaError."""
    for vector in vectors:
        if len(vector) != spec.dim:
            raise DeltaError(f"expected a vector of {spec.dim} numbers, got {len(vector)}")
    with np.errstate(over="ignore"):
        narrow = np.array(vectors, np.float64).reshape(-1, spec.dim).astype(np.float32)
    try:
        codec.encode(narrow, spec.dtype)
    except codec.BadRow as error:
        raise DeltaError(f"number {error.column} of the vector is {error.reason}") from error
    return narrow


def _numbers(vector: Any) -> npt.NDArray[np.float64]:
    """The numbers of a list, an array, or bytes as little-endian float32: an object a row, and not one a number.

    DeltaError.
    """
    if isinstance(vector, bytes):
        if len(vector) % 4:
            raise DeltaError(f"expected a vector as float32, 4 bytes a number, got {len(vector)} bytes")
        vector = np.frombuffer(vector, "<f4")
    elif not isinstance(vector, (list, np.ndarray)):
        raise DeltaError(f"expected a vector of numbers, got {type(vector).__name__}")
    elif isinstance(vector, list) and not set(map(type, vector)) <= {float, int}:
        kinds = ", ".join(sorted({kind.__name__ for kind in map(type, vector)} - {"float", "int"}))
        raise DeltaError(f"expected a vector of numbers, got {kinds} in it")
    try:
        return np.array(vector, np.float64)
    except OverflowError as error:
        raise DeltaError(f"a number of the vector is too large: {error}") from error


def make_delta(model: str, seq: int, parts: Iterable[TableRows], newest_ms: int) -> bytes:
    """The delta of rows that fit, in parts, those of a table in their order: of each key the last row,
    upserts and deletions apart.
    """
    writer = DeltaWriter("", model=model, seq=seq, event_time=datetime.fromtimestamp(newest_ms / 1000, UTC))
    by_table: dict[TableSpec, list[TableRows]] = {}
    for part in parts:
        by_table.setdefault(part.spec, []).append(part)
    for spec, found in by_table.items():
        keys = [key for part in found for key in part.keys]
        vectors, deleted = (
            np.concatenate(arrays) for arrays in zip(*((part.vectors, part.deleted) for part in found), strict=True)
        )
        kept = np.array(sorted(dict(zip(keys, range(len(keys)), strict=True)).values()))
        places = np.cumsum(~deleted) - 1  # of each row's vector
        if len(set_ := kept[~deleted[kept]]):
            writer.upsert(spec.name, [keys[one] for one in set_.tolist()], vectors[places[set_]], key=spec.key.value)
        if len(gone := kept[deleted[kept]]):
            writer.delete(spec.name, [keys[one] for one in gone.tolist()], key=spec.key.value)
    return writer.to_bytes()
