"""Vectors as text, a line each: word2vec's text form, fastText's `.vec`, GloVe's `.txt`.

    400000 300                      the number of lines and of their numbers; GloVe has no such line
    the 0.0047 0.021 …              a key and its numbers, between blanks or tabs

Read line by line, by batches. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tierstore.formats.columns import Malformed
from tierstore.formats.regular import open_regular
from tierstore.imports.raw_pairs import BATCH_ROWS, RowsPart

_BATCH_NUMBERS = 1 << 21
_LONGEST_LINE = 4 << 20  # bytes


class _Form(NamedTuple):
    """What the first line says: numbers of a row, and how many rows follow it, where it is said."""

    dim: int
    rows: int | None


def read_text(path: Path, dim: int | None) -> Iterator[RowsPart]:
    """The rows of a file, their keys as strings. Malformed, before they are read, where the first line does not fit."""
    with open_regular(path) as file:
        form = _form(_line(file, 0), dim)
    return _rows(path, form)


def _form(first: bytes, dim: int | None) -> _Form:
    fields = first.split()
    if len(fields) == 2 and dim != 1 and all(field.isdigit() for field in fields):
        rows, numbers = map(int, fields)
        if dim not in (None, numbers):
            raise Malformed(f"expected vectors of {dim} numbers, as --dim says; the first line says {numbers}")
        return _Form(numbers, rows)
    if len(fields) < 2:
        raise Malformed(
            f"expected lines of a key and numbers, as word2vec, fastText and GloVe write them, got {first[:60]!r}", 0
        )
    return _Form(dim or len(fields) - 1, None)


def _rows(path: Path, form: _Form) -> Iterator[RowsPart]:
    rows_per_batch = max(1, min(BATCH_ROWS, _BATCH_NUMBERS // form.dim))
    with open_regular(path) as file:
        if form.rows is not None:
            _line(file, 0)
        first = 0
        while lines := _lines(file, first, rows_per_batch):
            parts = [line.rsplit(None, form.dim) for line in lines]
            for row, part in enumerate(parts):
                if len(part) != form.dim + 1:
                    raise Malformed(f"expected a key and {form.dim} numbers, got {lines[row][:60]!r}", first + row)
            vectors = _numbers([part[1:] for part in parts], first)
            keys = pa.array([part[0] for part in parts], pa.large_binary())
            yield RowsPart(str(path), first, keys, vectors)
            first += len(lines)
    if form.rows not in (None, first):
        raise Malformed(f"expected {form.rows} rows, as its first line says, got {first}: the file was cut")


def _lines(file: BinaryIO, first: int, count: int) -> list[bytes]:
    lines: list[bytes] = []
    while len(lines) < count and (line := _line(file, first + len(lines))):
        lines.append(line)
    return lines


def _line(file: BinaryIO, row: int) -> bytes:
    line = file.readline(_LONGEST_LINE)
    if len(line) == _LONGEST_LINE:
        raise Malformed(f"expected a line of less than {_LONGEST_LINE} bytes", row)
    return line


def _numbers(rows: list[list[bytes]], first: int) -> npt.NDArray[np.float32]:
    try:
        return np.array(rows, dtype=np.bytes_).astype(np.float32)
    except ValueError:
        for row, numbers in enumerate(rows):
            for number in numbers:
                if not _is_number(number):
                    raise Malformed(f"expected a number, got {number[:40]!r}", first + row) from None
        raise


def _is_number(text: bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
