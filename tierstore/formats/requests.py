"""Recorded requests in a snapshot: what a dense part is run with before it serves.

A `.npz` file a request, one array an input, named as in an inference request: `<feature>` for keys, [n] or [batch, k],
`<feature>.offsets` and `<feature>.weights` beside them, and the dense part's own inputs. Strings are NumPy unicode or
bytes arrays. Never unpickled. Free functions; any thread may call them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import SnapshotError
from tierstore.formats import files

MAX_REQUEST_BYTES = 64 << 20  # of the arrays of one
_PARTS = ("offsets", "weights")  # of a feature's value, in this order after its keys


def flatten(inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """The arrays to record of what `Model.predict` takes: ragged bags, (keys, offsets[, weights]), become arrays of their own."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, value in inputs.items():
        if not isinstance(value, tuple):
            arrays[name] = _plain(name, value)
            continue
        arrays[name] = _plain(name, value[0])
        for part, array in zip(_PARTS, value[1:], strict=False):
            if array is not None:
                arrays[f"{name}.{part}"] = _plain(f"{name}.{part}", array)
    return arrays


def ragged(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """What `flatten` was given."""
    inputs: dict[str, Any] = {}
    for name, array in arrays.items():
        owner, _, part = name.rpartition(".")
        if part in _PARTS and owner in arrays:
            continue
        parts = [arrays.get(f"{name}.{part}") for part in _PARTS]
        inputs[name] = (array, *parts) if any(part is not None for part in parts) else array
    return inputs


def write_request(path: Path, inputs: Mapping[str, Any]) -> None:
    """Publish a request. Raises SnapshotError for a value that is no array of numbers or strings."""
    with files.publish(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in flatten(inputs).items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def read_request(path: Path, *, file: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a request. Raises SnapshotError naming `file`."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
            if size > MAX_REQUEST_BYTES:
                raise SnapshotError(f"holds {size} bytes of arrays, at most {MAX_REQUEST_BYTES} are allowed", file=file)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except SnapshotError:
        raise
    except Exception as error:  # NumPy and zipfile raise whatever they come upon in a damaged file
        raise SnapshotError(f"cannot be read as a recorded request: {error}", file=file) from error


def _plain(name: str, value: Any) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.hasobject:
        array = np.array(array.tolist())
    if array.dtype.kind not in "biufUS":
        raise SnapshotError(f"request: input {name!r} is an array of {array.dtype}; expected numbers or strings")
    return array
