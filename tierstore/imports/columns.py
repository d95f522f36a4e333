"""Keys and vectors in the columns of other tools' tables: choosing the columns, and reading them as arrays.

A column is named as it is, or by the path of a field within a structure, such as `features.embedding`. What the names
of hive's folders say (`day=2026-11-20/`) are columns too. Pure functions; any thread may call them. InvalidInput says
what was expected, what was there, and which columns there are; UnfitRow names the row as well.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tierstore.errors import InvalidInput
from tierstore.formats.columns import key_type_of
from tierstore.formats.normalize import UnfitRow, is_list, list_rows, number_kind, refused_integers
from tierstore.formats.strings import without_dictionary
from tierstore.imports.codes import companions
from tierstore.types import KeyType

ARROW_KEYS = {KeyType.INT64: pa.int64(), KeyType.UINT64: pa.uint64(), KeyType.STRING: pa.large_string()}
SKIP_NULLS = "--on-null skip (on_null='skip') leaves such rows out"
TAKE_INTEGERS = "--integers (integers=True) takes them as the numbers themselves"
_SHOWN = 12  # columns in an error


class NullColumn(InvalidInput):
    """A column without a type, as all of its rows are null."""


class _Column(NamedTuple):
    """A column, or a field of one: its type, and its name in each structure on the way; no names of a folder's."""

    kind: pa.DataType
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The columns that are read: the key's, the vector's or those of its numbers in order, and
    the time's, if there is one.

    `steps` says for each where it is; those without are `folders`, the same for all rows of a file.
    """

    key: str
    vectors: tuple[str, ...]
    key_type: KeyType
    time: str | None
    steps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    folders: Mapping[str, pa.Scalar] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([self.key, *self.vectors, *([] if self.time is None else [self.time])]))

    @property
    def to_read(self) -> list[str]:
        """The columns of the file that hold them."""
        return list(dict.fromkeys(steps[0] for steps in map(self.steps.__getitem__, self.names) if steps))


def choose_columns(
    schema: pa.Schema,
    key: str,
    vector: str | Sequence[str],
    key_type: KeyType | None,
    time: str | None = None,
    *,
    dim: int | None = None,
    integers: bool = False,
    folders: Mapping[str, pa.Scalar] | None = None,
) -> Chosen:
    """The columns named `key` and `vector`: a column of lists, a pattern such as `f*`, or the
    names of one column per number.

    key_type: None for the type of the key's column; else its keys are converted to this type. `time`: the column
    of times. `folders`: columns by the names of the file's folders. `dim`: numbers of a vector, where that is said.
    `integers`: vectors of integers are meant. Raises InvalidInput.
    """
    folders = dict(folders or {})
    if key in folders and key not in schema.names and pa.types.is_date(folders[key].type):
        folders[key] = pa.scalar(str(folders[key]))  # as a key it is text, as in the folder's name
    if time in folders and time not in schema.names and pa.types.is_string(folders[time].type):
        folders[time] = _moment(time, folders[time])
    columns = _columns_in(schema, folders)
    listed = _listed(schema, folders)
    if time is not None and time not in columns:
        raise InvalidInput(f"expected one column {time!r} for times; {listed}")
    if key not in columns:
        raise InvalidInput(_no_key(key, schema, folders))
    own = _key_type(key, columns[key].kind)
    names = _vectors(columns, vector, listed, dim)
    _refuse_integers(names, columns, integers)
    chosen = Chosen(key, names, key_type or own, time, folders=folders)
    return replace(chosen, steps={name: columns[name].steps for name in chosen.names})


def choose_key(schema: pa.Schema, key: str, folders: Mapping[str, pa.Scalar]) -> Chosen:
    """The column of keys alone, of rows that have no vectors. Raises InvalidInput."""
    columns = _columns_in(schema, folders)
    if key not in columns:
        raise InvalidInput(_no_key(key, schema, folders))
    return Chosen(key, (), _key_type(key, columns[key].kind), None, {key: columns[key].steps}, folders)


def _no_key(key: str, schema: pa.Schema, folders: Mapping[str, pa.Scalar]) -> str:
    return f"expected one column {key!r} for keys; {_listed(schema, folders)}; name it with --key (key=)"


def _moment(name: str, value: pa.Scalar) -> pa.Scalar:
    """A time that a folder's name says as text, as Spark writes timestamps: `2026-11-20 10:00:00`, without a zone in
    UTC.
    """
    text = value.as_py()
    if text is None:
        return value
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(
            f"column {name!r} of folders: expected a time for each row, such as {name}=2026-11-20, "
            f"{name}=2026-11-20 10%3A00%3A00 or seconds since 1970, got {text!r}"
        ) from None
    return pa.scalar(moment, pa.timestamp("us", None if moment.tzinfo is None else "UTC"))


def _key_type(name: str, kind: pa.DataType) -> KeyType:
    if pa.types.is_null(kind):
        raise NullColumn(f"column {name!r}: expected a key, got null in every row; {SKIP_NULLS}")
    own = KeyType.INT64 if pa.types.is_decimal(kind) and kind.scale == 0 else key_type_of(kind)
    if own is None:
        floats = " (integers beside nulls in pandas, and HUGEINT in DuckDB, become such)"
        raise InvalidInput(
            f"column {name!r}: expected keys that are integers or strings, got {kind}"
            f"{floats if pa.types.is_floating(kind) else ''}; cast them first, where they are made"
        )
    return own


def _vectors(
    columns: Mapping[str, _Column], vector: str | Sequence[str], listed: str, dim: int | None
) -> tuple[str, ...]:
    """The columns of the vectors: one of lists, or those of their numbers."""
    if isinstance(vector, str) and vector in columns and _is_vector(columns[vector].kind):
        return (vector,)
    names = _matching(columns, vector) if isinstance(vector, str) else list(vector)
    if not names:
        raise InvalidInput(f"expected one column {vector!r} for vectors; {listed}; name it with --vector (vector=)")
    for name in names:
        if name not in columns:
            raise InvalidInput(f"expected one column {name!r} for vectors; {listed}")
        kind = columns[name].kind
        if pa.types.is_null(kind):
            raise NullColumn(f"column {name!r}: expected numbers, got null in every row; {SKIP_NULLS}")
        if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
            what = "lists of numbers" if len(names) == 1 else "numbers"
            raise InvalidInput(f"column {name!r}: expected {what}, got {kind}{_cast(name, kind)}")
    if names == [vector] and dim != 1:
        _refuse_one_of_many(names[0], columns)
    elif isinstance(vector, str):
        _refuse_unlike(vector, names)
    return tuple(names)


def _cast(name: str, kind: pa.DataType) -> str:
    """How what stands for lists of floats is made such where it comes from; empty for what does not."""
    decimals = pa.types.is_list(kind) and pa.types.is_decimal(kind.value_type)
    if decimals or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return f"; in DuckDB {name}::FLOAT[] makes such of it"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return "; of the bytes of float32 numbers numpy.frombuffer(…, 'float32') makes such"
    return ""


def _refuse_unlike(pattern: str, names: Sequence[str]) -> None:
    """Raise InvalidInput for columns that a pattern takes in beside numbered ones: `event_time` with `e0`, `e1`."""
    stems = Counter(name.rstrip("0123456789") for name in names if name[-1:].isdecimal())
    stem, count = max(stems.items(), key=lambda one: one[1], default=("", 0))
    others = [name for name in names if not (name.startswith(stem) and name[len(stem) :].isdecimal())]
    if count > 1 and others:
        raise InvalidInput(
            f"--vector {pattern!r} names numbered columns and also {', '.join(map(repr, others[:3]))}: "
            f"'{stem}[0-9]*' reads {count} numbered ones as one vector; or name each column (vector=[…])"
        )


def _refuse_one_of_many(name: str, columns: Mapping[str, _Column]) -> None:
    """Raise InvalidInput for one column of numbers beside others of its kind: `e0` where `e*` is meant."""
    stem = name.rstrip("0123456789")
    if not stem or stem == name:
        return
    numbers = (pa.types.is_floating, pa.types.is_integer)
    alike = [
        one
        for one, column in columns.items()
        if one.startswith(stem) and one[len(stem) :].isdecimal() and any(is_kind(column.kind) for is_kind in numbers)
    ]
    if len(alike) > 1:
        raise InvalidInput(
            f"column {name!r} is one number a row, and one of {len(alike)} such columns: --vector '{stem}[0-9]*' reads "
            "them all as one vector, --dim 1 this one alone"
        )


def _refuse_integers(names: Sequence[str], columns: Mapping[str, _Column], integers: bool) -> None:
    """Raise InvalidInput for vectors of integers, unless they are meant and nothing says that they are codes.

    Of one column a number all have to be such: a float that is whole in every row becomes an integer here and there.
    """
    kinds = [columns[name].kind for name in names]
    values = [number_kind(_lists_in(kind)) if _is_vector(kind) else kind for kind in kinds]
    if not all(map(pa.types.is_integer, values)):
        return
    beside = companions(names[0], columns) if len(names) == 1 else []
    if beside:
        raise InvalidInput(
            f"column {names[0]!r}: expected rows of floats, got {kinds[0]} with {', '.join(map(repr, beside))} beside "
            "it: these are codes of a quantized table; write the numbers that they stand for"
        )
    if not integers:
        of = f"column {names[0]!r}" if len(names) == 1 else f"columns {names[0]!r} to {names[-1]!r}"
        raise InvalidInput(f"{of}: {refused_integers(kinds[0])}. {TAKE_INTEGERS}")


def _columns_in(schema: pa.Schema, folders: Mapping[str, pa.Scalar]) -> dict[str, _Column]:
    """Columns, those of folders, and the fields of structures by their paths; none of a name that is there twice."""
    columns = {one.name: _Column(one.type, (one.name,)) for one in schema if schema.names.count(one.name) == 1}
    for name, value in folders.items():
        columns.setdefault(name, _Column(value.type, ()))
    for column in list(columns.values()):
        for path, inner in _fields(column):
            columns.setdefault(path, inner)
    return columns


def _fields(column: _Column) -> Iterator[tuple[str, _Column]]:
    if pa.types.is_struct(column.kind):
        for i in range(column.kind.num_fields):
            one = column.kind.field(i)
            inner = _Column(one.type, (*column.steps, one.name))
            yield ".".join(inner.steps), inner
            yield from _fields(inner)


def _matching(columns: Mapping[str, _Column], pattern: str) -> list[str]:
    """The columns that match a name or pattern, `f2` before `f10`; fields of structures where it has a dot."""
    names = [
        name
        for name, column in columns.items()
        if fnmatch.fnmatchcase(name, pattern) and (len(column.steps) == 1 or "." in pattern)
    ]
    return sorted(names, key=lambda name: [int(x) if x.isdecimal() else x for x in re.split(r"([0-9]+)", name)])


def _listed(schema: pa.Schema, folders: Mapping[str, pa.Scalar]) -> str:
    there = [f"{one.name} ({one.type})" for one in schema]
    there += [f"{name} ({value.type}, of folders)" for name, value in folders.items() if name not in schema.names]
    others = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
    return f"there are {', '.join(there[:_SHOWN]) or 'none'}{others}"


# --- lists, and what stands for them


def _is_spark_vector(kind: pa.DataType) -> bool:
    """Whether this is how Spark stores an `ml.linalg.Vector`, sparse or dense by its field `type`."""
    return bool(pa.types.is_struct(kind) and {"type", "values"} <= {kind.field(i).name for i in range(kind.num_fields)})


def _only_field(kind: pa.DataType) -> pa.DataType | None:
    return kind.field(0).type if pa.types.is_struct(kind) and kind.num_fields == 1 else None


def _lists_in(kind: pa.DataType) -> pa.DataType:
    """The lists that a column holds: BigQuery wraps them, and each number in them, in structures of one field."""
    if _is_spark_vector(kind):
        return kind.field("values").type
    inner = _only_field(kind)
    kind = kind if inner is None else inner
    if pa.types.is_list(kind) and (number := _only_field(kind.value_type)) is not None:
        return pa.list_(number)
    return kind


def _is_vector(kind: pa.DataType) -> bool:
    return is_list(_lists_in(kind))


def _unwrapped(column: pa.Array) -> pa.Array:
    """The lists of BigQuery and list views as plain ones; other columns as they are."""
    if pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type):
        column = _in_order(column)
    if _is_spark_vector(column.type) or not _is_vector(column.type):
        return column
    if pa.types.is_struct(column.type):
        column = pc.struct_field(column, [0])
    if pa.types.is_list(column.type) and _only_field(column.type.value_type) is not None:
        numbers = pc.struct_field(column.values, [0])
        kind, buffers = pa.list_(numbers.type), column.buffers()[:2]
        column = pa.Array.from_buffers(kind, len(column), buffers, -1, column.offset, [numbers])
    return column


def _in_order(views: pa.Array) -> pa.Array:
    """List views as lists.

    Views may lie in any order over their numbers: Arrow's flattening follows it, its parent indices and its casts to
    lists do not.
    """
    lengths = pc.fill_null(pc.list_value_length(views), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    mask = views.is_null() if views.null_count else None
    return pa.LargeListArray.from_arrays(pa.array(offsets), pc.list_flatten(views), mask=mask)


# --- batches


def picked(batch: pa.RecordBatch, chosen: Chosen) -> pa.RecordBatch:
    """The chosen columns under their names: fields out of their structures, keys as plain values of `chosen.key_type`.

    InvalidInput for a key that is not of this type.
    """
    columns = {name: _unwrapped(_column(batch, name, chosen)) for name in chosen.names}
    columns[chosen.key] = converted(columns[chosen.key], chosen.key_type, chosen.key)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _column(batch: pa.RecordBatch, name: str, chosen: Chosen) -> pa.Array:
    steps = chosen.steps[name]
    if not steps:
        return pa.repeat(chosen.folders[name], len(batch))
    column = batch.column(steps[0])
    return column if len(steps) == 1 else pc.struct_field(column, list(steps[1:]))


def converted(keys: pa.Array, key_type: KeyType, name: str) -> pa.Array:
    """Keys as the Arrow type of `key_type`, nulls kept. UnfitRow for one that is none, InvalidInput where all are."""
    keys = without_dictionary(keys)
    try:
        return keys.cast(ARROW_KEYS[key_type])
    except pa.ArrowException as error:
        own = key_type_of(keys.type)
        hint = "" if own in (None, key_type) else f"; --key-type {own} (key_type=) reads them as they are"
        reason = f"column {name!r}: expected {key_type} keys: {error}{hint}"
        row = _first_that_fails(keys, key_type)
        if row is None:
            raise InvalidInput(reason) from error
        raise UnfitRow(row, reason) from error


def _first_that_fails(keys: pa.Array, key_type: KeyType) -> int | None:
    """The first key that cannot be converted; None where none can. Halves until one remains."""

    def fails(low: int, high: int) -> bool:
        try:
            keys.slice(low, high - low).cast(ARROW_KEYS[key_type])
        except pa.ArrowException:
            return True
        return False

    low, high = 0, len(keys)
    if fails(0, 0):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(low, middle) else (middle, high)
    return low


def keys_of(batch: pa.RecordBatch, chosen: Chosen) -> pa.Array:
    """The keys of a batch that was `picked`. UnfitRow for a null."""
    column = batch.column(chosen.key)
    if column.null_count:
        raise UnfitRow(_first_null(column), f"expected a key in column {chosen.key!r}, got null; {SKIP_NULLS}")
    return column


def vectors_of(batch: pa.RecordBatch, chosen: Chosen) -> npt.NDArray[Any]:
    """The vectors, numbers [n, dim], of a batch that was `picked`. UnfitRow for one that does not fit."""
    if len(chosen.vectors) > 1 or not _is_vector(batch.column(chosen.vectors[0]).type):
        parts = []
        for name in chosen.vectors:
            column = batch.column(name)
            if column.null_count:
                raise UnfitRow(_first_null(column), f"column {name!r} is null; {SKIP_NULLS}")
            parts.append(column.to_numpy(zero_copy_only=False))
        return np.stack(parts, axis=1)
    name = chosen.vectors[0]
    column = batch.column(name)
    if _is_spark_vector(column.type):
        return _spark_rows(column, name)
    return _rows(column, name)


def _rows(column: pa.Array, name: str) -> npt.NDArray[Any]:
    try:
        return list_rows(column)
    except UnfitRow as error:
        hint = f"; {SKIP_NULLS}" if "null" in error.reason else ""
        raise UnfitRow(error.row, f"column {name!r}: {error.reason}{hint}") from error


def without_nulls(batch: pa.RecordBatch, chosen: Chosen) -> tuple[pa.RecordBatch, npt.NDArray[np.int64] | None]:
    """The rows of a batch that was `picked` with no null, nor within a list, and their numbers; None for all."""
    valid = np.ones(len(batch), bool)
    for name in chosen.names:
        column = batch.column(name)
        if column.null_count:
            valid &= column.is_valid().to_numpy(zero_copy_only=False)
        if _is_vector(column.type):
            lists = pc.struct_field(column, "values") if _is_spark_vector(column.type) else column
            if pc.list_flatten(lists).null_count:
                nulls = pc.list_flatten(lists).is_null().to_numpy(zero_copy_only=False)
                valid[pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)[nulls]] = False
    if valid.all():
        return batch, None
    return batch.filter(pa.array(valid)), np.flatnonzero(valid)


def _spark_rows(column: pa.StructArray, name: str) -> npt.NDArray[Any]:
    """Vectors of `ml.linalg`, of which Spark's VectorAssembler stores each in the form that takes fewer bytes."""
    if column.null_count:
        raise UnfitRow(_first_null(column), f"column {name!r} is null; {SKIP_NULLS}")
    sparse = pc.not_equal(pc.struct_field(column, "type"), 1).to_numpy(zero_copy_only=False)
    values = pc.struct_field(column, "values")
    if not sparse.any():
        return _rows(values, name)
    row = int(np.argmax(sparse))
    parts = {one: pc.struct_field(column, one) for one in ("size", "indices") if column.type.get_field_index(one) >= 0}
    sizes, places, numbers = (one.filter(pa.array(sparse)) for one in (parts["size"], parts["indices"], values))
    if sizes.null_count or places.null_count or numbers.null_count or pc.list_flatten(numbers).null_count:
        raise UnfitRow(
            row, f"column {name!r}: expected dense vectors, got a sparse one; convert it with vector_to_array"
        )
    unlike = pc.not_equal(pc.list_value_length(places), pc.list_value_length(numbers)).to_numpy(zero_copy_only=False)
    if unlike.any():
        row = int(np.flatnonzero(sparse)[np.argmax(unlike)])
        raise UnfitRow(row, f"column {name!r}: expected as many numbers as indices of a sparse vector")
    dim = sizes[0].as_py() if sparse.all() else len(values[int(np.argmin(sparse))])
    other = np.flatnonzero(sizes.to_numpy(zero_copy_only=False) != dim)
    at = pc.list_flatten(places).to_numpy(zero_copy_only=False)
    if len(other) or (len(at) and not 0 <= at.min() <= at.max() < dim):
        row = int(np.flatnonzero(sparse)[other[0] if len(other) else 0])
        raise UnfitRow(row, f"column {name!r}: expected {dim} numbers, as the vectors before it have, got {sizes[0]}")
    rows = np.zeros((len(column), dim))
    rows[np.flatnonzero(sparse)[pc.list_parent_indices(places).to_numpy(zero_copy_only=False)], at] = pc.list_flatten(
        numbers
    )
    if not sparse.all():
        rows[~sparse] = _rows(values.filter(pa.array(~sparse)), name)
    return rows


def _first_null(column: pa.Array) -> int:
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
