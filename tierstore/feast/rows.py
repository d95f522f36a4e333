"""Rows as Feast gives and takes them, and as arrays. Pure functions; any thread.

Feast hands over one message a row, so these loops run per row, and nothing after them does.

A time is microseconds since 1970 (UTC), as Feast's own messages have it. Its 64 bits are in three numbers, which
float32 has exactly: the highest 20 bits, the next 22 and the lowest 22.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import DoubleList, FloatList, Value

from tierstore.errors import InvalidInput
from tierstore.feast.views import HeldView
from tierstore.types import KeyType

Keys = npt.NDArray[Any]  # int64, or str as objects
Row = tuple[EntityKey, Mapping[str, Value], datetime, datetime | None]
Answer = tuple[datetime | None, dict[str, Value] | None]

_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_BITS = 22
_MASK = (1 << _BITS) - 1
_SHIFTS = np.array([2 * _BITS, _BITS, 0], np.uint64)
_NEVER = np.iinfo(np.int64).min
_INTEGERS = ("int64_val", "int32_val")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows to write, with one a key: the newest. `vectors` has zeros where `is_null`."""

    keys: Keys
    vectors: npt.NDArray[np.float32]
    is_null: npt.NDArray[np.bool_]
    times: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, which: Any) -> Rows:
        return Rows(self.keys[which], self.vectors[which], self.is_null[which], self.times[which])


def rows_to_write(view: HeldView, data: Sequence[Row], *, round_float64: bool) -> Rows:
    """The newest row of each key: by its event time, then the time of its creation, then its place.

    Rows that do not name the field are left out. InvalidInput for a vector that cannot be held as it is.
    """
    data = [row for row in data if view.field in row[1]]
    keys = entity_keys_of(view, [row[0] for row in data])
    values = [row[1][view.field] for row in data]
    vectors, is_null = _vectors(view, keys, values, round_float64)
    times = np.array([_micros(row[2]) for row in data], np.int64)
    created = np.array([_NEVER if row[3] is None else _micros(row[3]) for row in data], np.int64)
    _, groups = np.unique(keys, return_inverse=True)
    order = np.lexsort((np.arange(len(data)), created, times, groups))  # by key, the newest last
    newest = np.sort(order[np.append(groups[order][1:] != groups[order][:-1], True)]) if len(data) else order
    return Rows(keys, vectors, is_null, times)[newest]


def entity_keys_of(view: HeldView, entity_keys: Sequence[EntityKey]) -> Keys:
    """The keys of a view's rows. InvalidInput for one of another type."""
    kinds = ("string_val",) if view.key is KeyType.STRING else _INTEGERS
    keys = []
    for entity_key in entity_keys:
        names, values = entity_key.join_keys, entity_key.entity_values
        kind = str(values[0].WhichOneof("val")) if len(values) == 1 else f"{len(values)} values"
        if kind not in kinds:
            raise InvalidInput(
                f"feature view {view.name!r}, entity {', '.join(names)}: expected {' or '.join(kinds)}, got {kind}"
            )
        keys.append(getattr(values[0], kind))
    return np.array(keys, object if view.key is KeyType.STRING else np.int64)


def encode_times(micros: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """float32 [n, 3]."""
    return ((micros.view(np.uint64)[:, None] >> _SHIFTS) & np.uint64(_MASK)).astype(np.float32)


def decode_times(numbers: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.int64]:
    """Microseconds since 1970, int64 [n]."""
    bits: npt.NDArray[np.uint64] = np.bitwise_or.reduce(numbers.astype(np.uint64) << _SHIFTS, axis=1)
    return bits.view(np.int64)


def event_time_of(micros: int) -> datetime:
    return _EPOCH.replace(tzinfo=UTC) + micros * _MICROSECOND


def answers(
    view: HeldView,
    vectors: npt.NDArray[np.floating[Any]],
    has_vector: npt.NDArray[np.bool_],
    times: npt.NDArray[np.int64],
    has_time: npt.NDArray[np.bool_],
    now: datetime,
) -> list[Answer]:
    """What `online_read` answers.

    A key that was never written has neither time nor value. One whose value is null or too old has the time of its row,
    and no value: Feast then says NOT_FOUND, where for a value that is null it would say PRESENT.
    """
    too_old = np.zeros(len(times), np.bool_) if view.ttl is None else times < _micros(now) - view.ttl // _MICROSECOND
    make = _double_value if view.is_double else _float_value
    found: list[Answer] = []
    for row, time, there, valued in zip(vectors, times.tolist(), has_time, has_vector & ~too_old, strict=True):
        if not there:
            found.append((None, None))
        else:
            found.append((event_time_of(time), {view.field: make(row.tolist())} if valued else {}))
    return found


def _float_value(numbers: list[float]) -> Value:
    return Value(float_list_val=FloatList(val=numbers))


def _double_value(numbers: list[float]) -> Value:
    return Value(double_list_val=DoubleList(val=numbers))


def _vectors(
    view: HeldView, keys: Keys, values: Sequence[Value], round_float64: bool
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    given = np.zeros((len(values), view.dim), np.float64 if view.is_double else np.float32)
    is_null = np.zeros(len(values), np.bool_)
    wanted = "double_list_val" if view.is_double else "float_list_val"
    for row, value in enumerate(values):
        kind = value.WhichOneof("val")
        if kind is None:
            is_null[row] = True
            continue
        if kind != wanted:
            raise _refused(view, keys, row, f"expected {wanted}, got {kind}")
        numbers = getattr(value, kind).val
        if len(numbers) != view.dim:
            raise _refused(view, keys, row, f"expected {view.dim} numbers, got {len(numbers)}")
        given[row] = numbers
    with np.errstate(over="ignore", under="ignore"):
        vectors = given.astype(np.float32)
    for row in np.flatnonzero(~np.isfinite(vectors).all(axis=1))[:1]:
        raise _refused(view, keys, row, "expected finite numbers within the range of float32, got others")
    if not round_float64:
        for row in np.flatnonzero((vectors != given).any(axis=1))[:1]:
            raise _refused(
                view,
                keys,
                row,
                "rows are held as float32, which does not have these float64 numbers exactly; set round_float64: true "
                "in the online_store section of feature_store.yaml to have them rounded, or declare Array(Float32)",
            )
    return vectors, is_null


def _refused(view: HeldView, keys: Keys, row: int, why: str) -> InvalidInput:
    return InvalidInput(f"feature view {view.name!r}, field {view.field!r}, key {keys.tolist()[row]!r}: {why}")


def _micros(moment: datetime) -> int:
    """Without a zone a time is one of UTC, as Feast has it."""
    naive = moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)
    return (naive - _EPOCH) // _MICROSECOND
