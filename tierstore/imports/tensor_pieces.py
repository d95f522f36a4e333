"""Tensors that torch.distributed.checkpoint has cut over `.safetensors` files, put together.

Its `HuggingFaceStorageWriter(save_distributed=True)` lets each rank write what it has, by rows or by columns, under
the name of the whole. Where a piece begins stands in the file's metadata (`DCP_SHARDING_INFO`); the shape of the whole
stands nowhere, and is how far the pieces reach. Layout: torch/distributed/checkpoint/_hf_utils.py, PyTorch 2.13. One
thread at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from tierstore.errors import SnapshotError
from tierstore.formats.snapshot.tensor_shards import read_tensors
from tierstore.imports.named_tensors import NamedTensors, Piece, TensorKind
from tierstore.imports.raw_pairs import BATCH_ROWS

_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


def put_together(files: Sequence[NamedTensors]) -> list[NamedTensors]:
    """Files with pieces as one for each folder, the others as they are. SnapshotError for pieces that leave a hole, or
    that lie over each other; and where a shard beside those that are named is left out."""
    whole = [file for file in files if file.pieces is None]
    cut = sorted((file for file in files if file.pieces is not None), key=lambda file: file.place.parent)
    for folder, group in groupby(cut, key=lambda file: file.place.parent):
        shards = list(group)
        _refuse_a_few(folder, {file.place for file in shards})
        whole.append(_together(folder, shards))
    return whole


def _refuse_a_few(folder: Path, named: set[Path]) -> None:
    others = sorted(file.name for file in folder.iterdir() if _SHARD.fullmatch(file.name) and file not in named)
    if others:
        raise SnapshotError(
            f"holds a part of each tensor, and so does {others[0]} beside it: name their directory, {folder}",
            file=str(min(named)),
        )


def _together(folder: Path, shards: Sequence[NamedTensors]) -> NamedTensors:
    pieces: dict[str, list[Piece]] = {}
    for file in shards:
        for name, piece in (file.pieces or {}).items():
            pieces.setdefault(name, []).append(piece)
    kinds = {name: _whole(folder, name, parts) for name, parts in pieces.items()}

    def read(names: list[str], begin: int) -> Iterator[tuple[np.ndarray, ...]]:
        return zip(*(_batches(pieces[name], kinds[name].shape, begin) for name in names), strict=True)

    unreadable = {name: why for file in shards for name, why in file.unreadable.items()}
    return NamedTensors(folder if len(shards) > 1 else shards[0].place, kinds, read, unreadable)


def _whole(folder: Path, name: str, parts: Sequence[Piece]) -> TensorKind:
    """The kind of the tensor that these pieces are."""
    first = parts[0].tensor
    if any(len(one.tensor.shape) != len(first.shape) or one.tensor.dtype_name != first.dtype_name for one in parts):
        raise SnapshotError(
            f"tensor {name!r}: expected pieces of one dtype and of as many dimensions", file=str(folder)
        )
    edges = [
        sorted({0, *(one.offsets[i] for one in parts), *(one.offsets[i] + one.tensor.shape[i] for one in parts)})
        for i in range(len(first.shape))
    ]
    covered = np.zeros([len(of_one) - 1 for of_one in edges], np.int64)  # how often, between these edges
    for one in parts:
        covered[
            tuple(
                slice(of_one.index(begin), of_one.index(begin + size))
                for of_one, begin, size in zip(edges, one.offsets, one.tensor.shape, strict=True)
            )
        ] += 1
    if (covered != 1).any():
        where = [edges[i][at] for i, at in enumerate(np.argwhere(covered != 1)[0])]
        what = "is missing" if covered[tuple(np.argwhere(covered != 1)[0])] == 0 else "is there more than once"
        raise SnapshotError(
            f"tensor {name!r}: the piece at {where} {what}, of those that its shards hold: name the directory of all "
            "shards of one checkpoint",
            file=str(folder),
        )
    return TensorKind(tuple(of_one[-1] for of_one in edges), first.dtype_name)


def _batches(parts: Sequence[Piece], shape: tuple[int, ...], begin: int) -> Iterator[np.ndarray]:
    """The whole by batches of rows, each from the pieces that have some of them."""
    for first in range(begin, shape[0], BATCH_ROWS):
        last = min(first + BATCH_ROWS, shape[0])
        rows: np.ndarray | None = None
        for tensor, offsets in parts:
            low, high = max(first, offsets[0]), min(last, offsets[0] + tensor.shape[0])
            if low < high and all(tensor.shape):
                (block,) = next(read_tensors([tensor], high - low, low - offsets[0]))
                rows = np.empty((last - first, *shape[1:]), block.dtype) if rows is None else rows
                others = (slice(at, at + n) for at, n in zip(offsets[1:], tensor.shape[1:], strict=True))
                rows[(slice(low - first, high - first), *others)] = block
        yield np.empty((last - first, *shape[1:])) if rows is None else rows
