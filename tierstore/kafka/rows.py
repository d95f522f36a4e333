"""Rows from messages, one a message: what a message says, which of them fit their tables, and the delta that they make.

A row has a key, a vector (None deletes it) and the moment of its event. Pure functions and values, but for `RowReader`, which
belongs to one thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from tierstore.errors import ConfigError, DeltaError, InvalidInput
from tierstore.formats.delta.writer import DeltaWriter
from tierstore.formats.keys import as_codes
from tierstore.formats.times import parse_time
from tierstore.kafka.messages import Message
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
    """What a message says. vector: numbers, or their bytes as little-endian float32; None deletes. event_ms: since 1970."""

    table: str
    key: Any
    vector: Any
    event_ms: int
    message: Message


class RowReader:
    """Reads rows off messages. names: the fields that are called otherwise, by `key`, `vector`, `event_time`."""

    def __init__(self, value: Decode, key: Decode, names: Mapping[str, str]) -> None:
        self._value, self._key = value, key
        self._key_name, self._vector_name, self._event_name = field_names(names)

    def read(self, table: str, message: Message) -> Row:
        """DeltaError for a message that is no row; Unreachable where its schema cannot be had now."""
        if message.is_null:
            return Row(table, self._own_key(message), None, message.timestamp_ms, message)
        found = self._value(message.value)
        if not isinstance(found, dict):
            raise DeltaError(f"expected an object with a field {self._vector_name!r}, got {type(found).__name__}")
        try:
            vector = found[self._vector_name]
        except KeyError:
            names = ", ".join(map(repr, list(found)[:10])) or "none"
            raise DeltaError(f"expected a field {self._vector_name!r} (null deletes the row), got {names}") from None
        key, event = found.get(self._key_name), found.get(self._event_name)
        if key is None:
            key = self._own_key(message)
        return Row(table, key, vector, message.timestamp_ms if event is None else event_ms(event), message)

    def _own_key(self, message: Message) -> Any:
        if message.key is None:
            raise DeltaError(
                f"expected a key, in the field {self._key_name!r} or as the message's own; there is neither"
            )
        found = self._key(message.key)
        if not isinstance(found, dict):
            return found
        if len(found) != 1 and self._key_name not in found:
            raise DeltaError(
                f"the message's key: expected a field {self._key_name!r}, got {', '.join(map(repr, found))}"
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
    """Milliseconds since 1970 of an event time: ISO 8601 (UTC where it names no zone), or a number of which the size tells the unit. DeltaError."""
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
    """Rows that fit a table. keys [n]; vectors float32 [k, dim] of those k that are not deleted, in their order."""

    spec: TableSpec
    keys: Sequence[Any]
    vectors: Vectors
    deleted: Sequence[bool]


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
    return TableRows(spec, keys, _vectors(vectors, spec), [row.vector is None for row in rows])


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
    if not vectors:
        return np.empty((0, spec.dim), np.float32)
    if bytes in set(map(type, vectors)):
        vectors = [_numbers_in(vector) if isinstance(vector, bytes) else vector for vector in vectors]
    for vector in vectors:
        if not isinstance(vector, (list, np.ndarray)):
            raise DeltaError(f"expected a vector of {spec.dim} numbers, got {type(vector).__name__}")
        if len(vector) != spec.dim:
            raise DeltaError(f"expected a vector of {spec.dim} numbers, got {len(vector)}")
        if isinstance(vector, list) and not set(map(type, vector)) <= {float, int}:
            kinds = ", ".join(sorted({kind.__name__ for kind in map(type, vector)} - {"float", "int"}))
            raise DeltaError(f"expected a vector of {spec.dim} numbers, got {kinds} in it")
    try:
        with np.errstate(over="ignore"):
            narrow = np.array(vectors, np.float64).astype(np.float32)
    except OverflowError as error:
        raise DeltaError(f"a number of the vector is too large: {error}") from error
    try:
        codec.encode(narrow, spec.dtype)
    except codec.BadRow as error:
        raise DeltaError(f"number {error.column} of the vector is {error.reason}") from error
    return narrow


def _numbers_in(data: bytes) -> Any:
    if len(data) % 4:
        raise DeltaError(f"expected a vector as float32, 4 bytes a number, got {len(data)} bytes")
    return np.frombuffer(data, "<f4")


def make_delta(model: str, seq: int, tables: Iterable[TableRows], newest_ms: int) -> bytes:
    """The delta of rows that fit: of each key the last row, upserts and deletions apart."""
    writer = DeltaWriter("", model=model, seq=seq, event_time=datetime.fromtimestamp(newest_ms / 1000, UTC))
    for rows in tables:
        last = sorted(dict(zip(rows.keys, range(len(rows.keys)), strict=True)).values())
        kept = np.array(last)
        deleted = np.array(rows.deleted)
        places = np.cumsum(~deleted) - 1  # of each row's vector
        name, key = rows.spec.name, rows.spec.key.value
        if len(set_ := kept[~deleted[kept]]):
            writer.upsert(name, [rows.keys[one] for one in set_.tolist()], rows.vectors[places[set_]], key=key)
        if len(gone := kept[deleted[kept]]):
            writer.delete(name, [rows.keys[one] for one in gone.tolist()], key=key)
    return writer.to_bytes()
