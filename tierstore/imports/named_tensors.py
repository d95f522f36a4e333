"""Tensors by their names, as files have them, and read by batches.

`.safetensors`, `.npz` and `.npy` here; PyTorch's own files in `torch_tensors.py`. Tensors that
torch.distributed.checkpoint has cut over several `.safetensors` are put together. One thread at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from tierstore.imports.raw_pairs import BATCH_ROWS

SHARDING = "DCP_SHARDING_INFO"  # metadata of torch.distributed.checkpoint: what a file has is a part of each tensor


class TensorKind(NamedTuple):
    """Shape and dtype of a tensor, as NumPy or PyTorch names it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_text(self) -> bool:
        return self.dtype.startswith(("<U", ">U", "|S"))


class Piece(NamedTuple):
    """What a file has of a tensor that others have other parts of, and where in the whole it begins."""

    tensor: ShardTensor
    offsets: tuple[int, ...]


class NamedTensors(NamedTuple):
    """The tensors of a file, of a folder's `.npy` files, or of the pieces that several files hold.

    `read(names, first)` gives some of them, of one length, by batches, from row `first` on.
    """

    place: Path
    kinds: Mapping[str, TensorKind]
    read: Callable[[list[str], int], Iterator[tuple[np.ndarray, ...]]]
    unreadable: Mapping[str, str] = {}
    are_arrays: bool = False  # saved by themselves, and not as the weights of a module
    pieces: Mapping[str, Piece] | None = None  # of a shard: `tensor_pieces.put_together` gives what can be read


def read_safetensors_file(path: Path) -> NamedTensors:
    """The tensors of a `.safetensors` file. Raises Malformed."""
    tensors, unreadable, metadata = safetensors_header(path)
    sharding = metadata.get(SHARDING)
    pieces = None if sharding is None else _pieces(tensors, sharding)
    return _named(path, tensors)._replace(unreadable=unreadable, pieces=pieces)


def _pieces(tensors: Mapping[str, ShardTensor], sharding: Any) -> dict[str, Piece]:
    """Each tensor of a shard with where it begins in the whole, which the file's metadata says. Raises Malformed."""
    pieces = {}
    try:
        entries = dict(json.loads(sharding).items())
        for name, tensor in tensors.items():
            offsets = entries[name]["saved_offsets"] if name in entries else [0] * len(tensor.shape)
            if len(offsets) != len(tensor.shape) or any(type(one) is not int or one < 0 for one in offsets):
                raise ValueError(f"{name!r} of shape {list(tensor.shape)} begins at {offsets}")
            pieces[name] = Piece(tensor, tuple(offsets))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Malformed(f"its metadata {SHARDING} is not as PyTorch writes it: {error!r}") from error
    return pieces


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
        lambda names, first: read_tensors([tensors[name] for name in names], BATCH_ROWS, first),
    )
