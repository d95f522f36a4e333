"""Rows in named tensors: which tensor they are in, which has their keys, and both read by batches.

`.safetensors`, `.npz` and `.npy` here; PyTorch's own files in `torch_tensors.py`. The files of a source are one set, as
a large checkpoint is cut into several. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tierstore.errors import SnapshotError
from tierstore.formats.columns import Malformed
from tierstore.formats.snapshot.tensor_shards import (
    ShardTensor,
    npy_tensor,
    npz_header,
    read_tensors,
    safetensors_header,
)
from tierstore.imports.codes import companions
from tierstore.imports.raw_pairs import BATCH_ROWS, RowsPart, numbered

_KEY, _VECTOR = "key", "vector"  # the defaults of `import_table`: no tensor was named
_SHOWN = 20  # tensors in an error


class TensorKind(NamedTuple):
    """Shape and dtype of a tensor, as NumPy or PyTorch names it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_text(self) -> bool:
        return self.dtype.startswith(("<U", ">U", "|S"))


class NamedTensors(NamedTuple):
    """The tensors of a file, or of a folder's `.npy` files; `read` gives some of them, of one length, by batches."""

    place: Path
    kinds: Mapping[str, TensorKind]
    read: Callable[[list[str]], Iterator[tuple[np.ndarray, ...]]]
    unreadable: Mapping[str, str] = {}
    are_arrays: bool = False  # saved by themselves, and not as the weights of a module


def read_safetensors_file(path: Path) -> NamedTensors:
    """The tensors of a `.safetensors` file. Raises Malformed."""
    tensors, unreadable = safetensors_header(path)
    return _named(path, tensors)._replace(unreadable=unreadable)


def read_npz_file(path: Path) -> NamedTensors:
    """The arrays of a `.npz` file. Raises Malformed, and what zipfile raises for a file that is none."""
    tensors, unreadable = npz_header(path)
    return _named(path, tensors)._replace(unreadable=unreadable, are_arrays=True)


def read_npy_files(paths: Sequence[Path]) -> NamedTensors:
    """Arrays of `.npy` files in one folder, by the names of their files. Raises SnapshotError."""
    tensors = {}
    for path in paths:
        try:
            tensors[path.stem] = npy_tensor(path, path.stem)
        except Malformed as error:
            raise SnapshotError(error.reason, file=str(path)) from error
    place = paths[0] if len(paths) == 1 else paths[0].parent
    return _named(place, tensors)._replace(are_arrays=True)


def _named(place: Path, tensors: Mapping[str, ShardTensor]) -> NamedTensors:
    return NamedTensors(
        place,
        {name: TensorKind(tensor.shape, tensor.dtype_name) for name, tensor in tensors.items()},
        lambda names: read_tensors([tensors[name] for name in names], BATCH_ROWS),
    )


def rows_in_tensors(files: Sequence[NamedTensors], key: str, vector: str) -> Iterator[RowsPart]:
    """The rows of the tensor `vector`, by batches; keys are the tensor `key`, or the rows' numbers where none is named.

    Of several files those without it are passed over. SnapshotError, before anything is read, for a name that does not
    fit (it names the tensors that there are), and for rows that are codes.
    """
    kinds = {name: kind for file in reversed(files) for name, kind in file.kinds.items()}
    place = str(files[0].place) if len(files) == 1 else str(files[0].place.parent)
    for file in files:
        for name in {key, vector} & file.unreadable.keys():
            raise SnapshotError(f"{name!r}: {file.unreadable[name]}", file=str(file.place))
    if (key, vector) == (_KEY, _VECTOR) and {"keys", "vectors"} <= kinds.keys():  # a shard of a snapshot
        key, vector = "keys", "vectors"
    rows = _choose(place, kinds, vector, 2)
    holding = [file for file in files if rows in file.kinds]
    chosen = [(file, _with_keys(file, rows, key)) for file in holding]
    for file in holding:
        _refuse_codes(str(file.place), rows, file.kinds[rows].dtype, kinds)
    numbered_files = [str(file.place) for file, names in chosen if len(names) == 1]
    if len(numbered_files) > 1:
        raise SnapshotError(
            f"tensor {rows!r} is in {', '.join(numbered_files[:3])} too: as the keys of its rows are their numbers, "
            "name one of the files; or a tensor of keys by --key (key=)",
            file=place,
        )
    return (part for file, names in chosen for part in numbered(str(file.place), file.read(names)))


def _with_keys(file: NamedTensors, rows: str, key: str) -> list[str]:
    """The tensor of the rows, and that of their keys unless these are the rows' numbers."""
    place, kinds = str(file.place), file.kinds
    if key == _KEY and key not in kinds:
        fitting = [name for name, kind in kinds.items() if _may_be_keys(kind, kinds[rows])]
        if not file.are_arrays or not fitting:
            return [rows]
        if len(fitting) > 1:
            raise SnapshotError(f"name the array of keys by --key (key=): {_shown(kinds, fitting)}", file=place)
        key = fitting[0]
    keys = _choose(place, kinds, key, 1)
    if not _are_keys(kinds[keys]):
        raise SnapshotError(
            f"tensor {keys!r}: expected integers or strings for keys, got {kinds[keys].dtype}", file=place
        )
    if kinds[keys].shape[0] != kinds[rows].shape[0]:
        raise SnapshotError(
            f"expected a key for each row, got {kinds[keys].shape[0]} keys and {kinds[rows].shape[0]} rows", file=place
        )
    return [rows, keys]


def _may_be_keys(kind: TensorKind, rows: TensorKind) -> bool:
    return kind.shape == rows.shape[:1] and _are_keys(kind)


def _are_keys(kind: TensorKind) -> bool:
    return kind.is_text or kind.dtype.startswith(("int", "uint"))


def _choose(place: str, kinds: Mapping[str, TensorKind], name: str, dimensions: int) -> str:
    """The tensor of that name; or the only one of so many dimensions, where none was named."""
    fitting = [one for one, kind in kinds.items() if len(kind.shape) == dimensions]
    if name in fitting:
        return name
    if name == _VECTOR and len(fitting) == 1:
        return fitting[0]
    what = "--vector (vector=)" if dimensions == 2 else "--key (key=)"
    if name in kinds:
        raise SnapshotError(
            f"tensor {name!r} has {len(kinds[name].shape)} dimensions, expected {dimensions}: {_shown(kinds, [name])}",
            file=place,
        )
    raise SnapshotError(
        f"no tensor {name!r} of {dimensions} dimensions; name one by {what}: {_shown(kinds, fitting)}", file=place
    )


def _shown(kinds: Mapping[str, TensorKind], names: Sequence[str]) -> str:
    return ", ".join(f"{one} {list(kinds[one].shape)}" for one in names[:_SHOWN]) or "none"


def _refuse_codes(place: str, rows: str, dtype: str, kinds: Mapping[str, TensorKind]) -> None:
    """Raise SnapshotError for a tensor of codes: integers, or floats of 8 bits with a scale beside them."""
    beside = companions(rows, kinds)
    if dtype.startswith(("float", "bfloat")) and not (dtype.startswith("float8") and beside):
        return
    if not beside:
        raise SnapshotError(
            f"tensor {rows!r}: expected rows of floats, got {dtype}; save the numbers that it stands for, as float32",
            file=place,
        )
    raise SnapshotError(
        f"tensor {rows!r}: expected rows of floats, got {dtype}: the codes of a quantized table, whose numbers follow "
        f"from {_shown(kinds, beside)} beside it. Save the table as it was before it was quantized, or these codes "
        "turned into float32",
        file=place,
    )
