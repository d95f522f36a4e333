"""Golden examples from a table of inputs and expected outputs: Parquet, as a trainer's last batch is easily written.

A column with the name of a feature has its keys, with the name of an input of the dense part that input, and with the
name of an output what the trainer's model says. `expected.<feature>` has rows, or pooled rows. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from tierstore.errors import SnapshotError
from tierstore.formats.onnx_file import graph_ports, read_dense
from tierstore.formats.snapshot.golden import RTOL
from tierstore.formats.snapshot.writer import SnapshotWriter

BATCH_ROWS = 64  # of one example
_EXPECTED = "expected."
_INDEX = "__index_level_"  # of pandas


def write_golden_file(
    snapshot: SnapshotWriter,
    file: str | Path,
    *,
    pooled: Mapping[str, bool],
    dense: bytes | str | Path | None,
    rtol: float = RTOL,
    atol: float | None = None,
) -> int:
    """Write the rows of `file` as golden examples, 64 to an example, and return how many rows there are.

    pooled: the features, and whether each has a combiner. dense: the graph whose inputs and outputs columns may be.
    SnapshotError names the file, and the column.
    """
    try:
        table = ds.dataset(str(file)).to_table()
    except (OSError, pa.ArrowException) as error:
        raise SnapshotError(f"cannot be read as Parquet or Arrow: {error}", file=str(file)) from error
    inputs, outputs = ({}, []) if dense is None else graph_ports(read_dense(dense, SnapshotError))
    expected: dict[str, str] = {}  # by output or feature, the column
    given: list[str] = []
    for column in table.column_names:
        name = column.removeprefix(_EXPECTED)
        if column in pooled or column in inputs:
            given.append(column)
        elif column in outputs or (column != name and (name in pooled or name in outputs)):
            expected[name] = column
        elif not column.startswith(_INDEX):
            known = f"features {', '.join(pooled)}; inputs {_listed(inputs)}; outputs {_listed(outputs)}"
            raise SnapshotError(
                f"column {column!r} is no feature, input or output, nor {_EXPECTED}<feature>; there are {known}",
                file=str(file),
            )
    if not expected or not table.num_rows:
        raise SnapshotError(
            f"expected a column for an output ({_listed(outputs)}) or {_EXPECTED}<feature>, and at least one row; got "
            f"{_listed(table.column_names)} and {table.num_rows} rows",
            file=str(file),
        )
    for begin in range(0, table.num_rows, BATCH_ROWS):
        part = table.slice(begin, BATCH_ROWS)

        def array(column: str, rank: int = 0, part: pa.Table = part) -> npt.NDArray[Any]:
            return _matrix(part.column(column), column, str(file), rank)

        snapshot.golden(
            {
                column: _keys(part.column(column), column, str(file), pooled[column])
                if column in pooled
                else array(column, inputs[column])
                for column in given
            },
            {name: array(column) for name, column in expected.items()},
            rtol=rtol,
            atol=atol,
        )
    return int(table.num_rows)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _keys(column: pa.ChunkedArray, name: str, file: str, pooled: bool) -> Any:
    """Keys of a feature: flat, a matrix, or (keys, offsets) of ragged bags."""
    flat, lengths = _flat(column, name, file)
    if lengths is None:
        return flat
    if pooled:
        return flat, np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return _even(flat, lengths, name, file)


def _matrix(column: pa.ChunkedArray, name: str, file: str, rank: int) -> npt.NDArray[Any]:
    """Numbers or strings, [n] or [n, width]; [n, 1] where the graph's input has so many dimensions."""
    flat, lengths = _flat(column, name, file)
    if lengths is not None:
        return _even(flat, lengths, name, file)
    return flat[:, None] if rank == 2 else flat


def _even(flat: npt.NDArray[Any], lengths: npt.NDArray[Any], name: str, file: str) -> npt.NDArray[Any]:
    if len(set(lengths.tolist())) > 1:
        raise SnapshotError(
            f"column {name!r}: expected lists of one length, got {lengths.min()} to {lengths.max()}", file=file
        )
    return flat.reshape(len(lengths), -1)


def _flat(column: pa.ChunkedArray, name: str, file: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """The numbers or strings of a column, and of lists how many each has."""
    array, lengths = column.combine_chunks(), None
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        if array.null_count:
            raise SnapshotError(f"column {name!r}: expected lists, got {array.null_count} nulls", file=file)
        lengths, array = pc.list_value_length(array).to_numpy(zero_copy_only=False), pc.list_flatten(array)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count and not pa.types.is_floating(array.type):
        raise SnapshotError(f"column {name!r}: expected no nulls, got {array.null_count}", file=file)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return np.array(array.to_pylist(), np.str_), lengths
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type) or pa.types.is_boolean(array.type)):
        raise SnapshotError(f"column {name!r}: expected numbers, strings or lists of them, got {array.type}", file=file)
    return array.to_numpy(zero_copy_only=False), lengths
