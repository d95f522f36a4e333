"""Recorded requests of a snapshot: the dense part is run with them before it serves.

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

from tierstore.arguments import as_bags
from tierstore.errors import SnapshotError, StorageError
from tierstore.formats import files
from tierstore.formats.objects import Location
from tierstore.formats.regular import open_regular

MAX_REQUEST_BYTES = 64 << 20  # of the arrays of one
_PARTS = ("offsets", "weights")  # of a ragged value, in this order after its keys


def request_arrays(inputs: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """The arrays to record of the inputs of `Model.predict`: (keys, offsets[, weights]) of ragged
    bags become separate arrays.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, value in inputs.items():
        value = as_bags(name, value)
        if not isinstance(value, tuple):
            arrays[name] = _plain(name, value)
            continue
        arrays[name] = _plain(name, value[0])
        for part, array in zip(_PARTS, value[1:], strict=False):
            if array is not None:
                arrays[f"{name}.{part}"] = _plain(f"{name}.{part}", array)
    return arrays


def ragged(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """The inverse of `request_arrays`."""
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
    write_arrays(path, request_arrays(inputs))


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Publish a `.npz` file of these arrays."""
    with files.publish(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def read_request(path: Location, *, file: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a request. Raises SnapshotError naming `file`."""
    try:
        with open_regular(path) as source:
            with zipfile.ZipFile(source) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > MAX_REQUEST_BYTES:
                raise SnapshotError(f"holds {size} bytes of arrays, at most {MAX_REQUEST_BYTES} are allowed", file=file)
            source.seek(0)
            with np.load(source, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
    except (SnapshotError, StorageError):
        raise
    except Exception as error:  # on damaged files NumPy and zipfile raise anything
        raise SnapshotError(f"cannot be read as a recorded request: {error}", file=file) from error


def _plain(name: str, value: Any) -> npt.NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.hasobject:
        array = np.array(array.tolist())
    if array.dtype.kind not in "biufUS":
        raise SnapshotError(f"request: input {name!r} is an array of {array.dtype}; expected numbers or strings")
    return array
