"""Rows as trainers leave them in checkpoints.

    raw pairs       TFRA's `FileSystemSaver` (`<table>-keys`, `<table>-values`), dynamicemb's dump
                    (`<table>_emb_keys.rank_0.world_size_1`, `…_emb_values…`), HugeCTR's folder (`key`, `emb_vector`):
                    int64 keys and float32 rows, little-endian
    state dicts     `.safetensors`, and with PyTorch `.pt`, `.pth`, `.bin` and directories of
                    torch.distributed.checkpoint: a tensor [rows, dim]; its keys are the numbers
                    of its rows, or another tensor

Nothing is unpickled but by `torch.load(weights_only=True)`. One thread at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tierstore.errors import MissingExtra, SnapshotError
from tierstore.formats.columns import Malformed
from tierstore.formats.names import HUGECTR_KEYS, HUGECTR_VECTORS
from tierstore.formats.snapshot.tensor_shards import raw_pair, read_tensors, safetensors_header

TORCH_FILES = (".pt", ".pth", ".bin")
SAFETENSORS = ".safetensors"
_DISTRIBUTED = ".metadata"  # of torch.distributed.checkpoint, in its directory
_BATCH_ROWS = 1 << 15
_KEY, _VECTOR = "key", "vector"  # the defaults of `import_table`: no tensor was named

_TFRA = re.compile(
    r"(?P<table>.+?)(?:_mht_(?P<shard>\d+)of(?P<shards>\d+))?(?:_rank(?P<rank>\d+)_size(?P<ranks>\d+))?-keys"
)
_DYNAMICEMB = re.compile(r"(?P<table>.+)_emb_keys\.rank_(?P<rank>\d+)\.world_size_(?P<ranks>\d+)")


class RowsPart(NamedTuple):
    """Rows from row `first` on of `place`: keys int64[n], vectors [n, dim]."""

    place: str
    first: int
    keys: np.ndarray
    vectors: np.ndarray


# --- raw pairs


class Pair(NamedTuple):
    """A file of keys and the file of their rows; `part` of `parts` that a table has."""

    keys: Path
    values: Path
    part: int
    parts: int


def pairs_in(path: Path) -> dict[str, list[Pair]]:
    """The tables that `path` holds as pairs of files: those of a directory, or of one table where `path` is
    `<directory>/<table>`. Empty where there are none."""
    folder, only = (path, None) if path.is_dir() else (path.parent, path.name)
    tables: dict[str, list[Pair]] = {}
    if folder.is_dir():
        for file in sorted(folder.iterdir()):
            found = _pair(file)
            if found is not None and only in (None, found[0]):
                tables.setdefault(found[0], []).append(found[1])
    return tables


def _pair(file: Path) -> tuple[str, Pair] | None:
    if match := _DYNAMICEMB.fullmatch(file.name):
        values = file.with_name(file.name.replace("_emb_keys.rank_", "_emb_values.rank_"))
        return match["table"], Pair(file, values, int(match["rank"]), int(match["ranks"]))
    if match := _TFRA.fullmatch(file.name):
        values = file.with_name(file.name.removesuffix("-keys") + "-values")
        shards, ranks = int(match["shards"] or 1), int(match["ranks"] or 1)
        shard = max(0, int(match["shard"] or 1) - 1)
        return match["table"], Pair(file, values, int(match["rank"] or 0) * shards + shard, shards * ranks)
    return None


def read_pairs(path: Path) -> Iterator[RowsPart]:
    """The rows of the one table that `path` holds. Raises SnapshotError."""
    tables = pairs_in(path)
    if len(tables) != 1:
        names = ", ".join(sorted(tables))
        raise SnapshotError(f"holds the tables {names}: name one, as {path / next(iter(tables))}", file=str(path))
    ((table, pairs),) = tables.items()
    expected = set(range(pairs[0].parts))
    held = {pair.part for pair in pairs}
    if held != expected or any(pair.parts != pairs[0].parts for pair in pairs):
        raise SnapshotError(
            f"table {table!r}: expected {len(expected)} parts, as the names of the files say, got {len(pairs)}",
            file=str(path),
        )
    for pair in pairs:
        yield from _read_pair(pair)


def read_hugectr(path: Path) -> Iterator[RowsPart]:
    """The rows of a HugeCTR/HPS folder, which is one pair. Raises SnapshotError."""
    pair = Pair(path / HUGECTR_KEYS, path / HUGECTR_VECTORS, 0, 1)
    for file in (pair.keys, pair.values):
        if not file.is_file():
            raise SnapshotError(
                f"expected the files {HUGECTR_KEYS!r} and {HUGECTR_VECTORS!r}; {file.name!r} is missing", file=str(path)
            )
    yield from _read_pair(pair)


def _read_pair(pair: Pair) -> Iterator[RowsPart]:
    if not pair.values.is_file():
        raise SnapshotError(f"is missing: it holds the rows of {pair.keys.name}", file=str(pair.values))
    try:
        keys, rows = raw_pair(pair.keys, pair.values)
    except Malformed as error:
        raise SnapshotError(error.reason, file=str(pair.keys)) from error
    yield from _parts(str(pair.keys), read_tensors((rows, keys), _BATCH_ROWS))


def _parts(place: str, batches: Iterator[tuple[np.ndarray, ...]]) -> Iterator[RowsPart]:
    """`batches`: rows and their keys, or rows alone, whose numbers are the keys."""
    first = 0
    for rows, *keys in batches:
        yield RowsPart(place, first, keys[0] if keys else np.arange(first, first + len(rows), dtype=np.int64), rows)
        first += len(rows)


# --- state dicts


def is_state_dict(path: Path) -> bool:
    """Whether `path` is a file or directory of named tensors."""
    if path.is_dir():
        return (path / _DISTRIBUTED).is_file()
    return path.suffix in (*TORCH_FILES, SAFETENSORS)


def read_state_dict(path: Path, key: str, vector: str) -> Iterator[RowsPart]:
    """The rows of the tensor `vector`, by batches; keys are the tensor `key`, or the rows' numbers where none is named.

    Raises SnapshotError, which names the tensors that there are; MissingExtra where PyTorch is needed.
    """
    if path.is_dir():
        tensors = _distributed(path)
    else:
        tensors = _safetensors(path) if path.suffix == SAFETENSORS else _saved(path)
    names = _columns(path, tensors.shapes, key, vector)
    yield from _parts(str(path), tensors.read(names))


class _Tensors(NamedTuple):
    """Named tensors: their shapes, and a reader of some of them, of one length, by batches."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[list[str]], Iterator[tuple[np.ndarray, ...]]]


def _columns(path: Path, shapes: Mapping[str, tuple[int, ...]], key: str, vector: str) -> list[str]:
    """The tensor of the rows, and that of their keys unless these are the rows' numbers."""
    if (key, vector) == (_KEY, _VECTOR) and {"keys", "vectors"} <= shapes.keys():  # a shard of a snapshot
        key, vector = "keys", "vectors"
    rows = _choose(path, shapes, vector, 2)
    if key == _KEY and key not in shapes:
        return [rows]
    keys = _choose(path, shapes, key, 1)
    if shapes[keys][0] != shapes[rows][0]:
        raise SnapshotError(
            f"expected a key for each row, got {shapes[keys][0]} keys and {shapes[rows][0]} rows", file=str(path)
        )
    return [rows, keys]


def _choose(path: Path, shapes: Mapping[str, tuple[int, ...]], name: str, dimensions: int) -> str:
    """The tensor of that name; or the only one of so many dimensions, where none was named."""
    fitting = [one for one, shape in shapes.items() if len(shape) == dimensions]
    if name in fitting:
        return name
    if name == _VECTOR and len(fitting) == 1:
        return fitting[0]
    names = ", ".join(f"{one} {list(shapes[one])}" for one in fitting[:20]) or "none"
    what = "--vector (vector=)" if dimensions == 2 else "--key (key=)"
    raise SnapshotError(f"no tensor {name!r} of {dimensions} dimensions; name one by {what}: {names}", file=str(path))


def _safetensors(path: Path) -> _Tensors:
    tensors = safetensors_header(path)
    return _Tensors(
        {name: tensor.shape for name, tensor in tensors.items()},
        lambda names: read_tensors([tensors[name] for name in names], _BATCH_ROWS),
    )


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra(
            "PyTorch's checkpoints are read by PyTorch: pip install torch; or save as .safetensors"
        ) from error
    return torch


def _saved(path: Path) -> _Tensors:
    """Tensors of a file that `torch.save` wrote, by their names; those of nested dictionaries by dotted ones."""
    torch = _torch()
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError):
        content = _unmapped(torch, path)
    except Exception as error:
        raise SnapshotError(_unreadable(error), file=str(path)) from error
    tensors: dict[str, Any] = {}
    _collect(torch, "", content, tensors)
    return _Tensors(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        lambda names: _slices([tensors[name] for name in names]),
    )


def _slices(tensors: Sequence[Any]) -> Iterator[tuple[np.ndarray, ...]]:
    for first in range(0, len(tensors[0]), _BATCH_ROWS):
        yield tuple(_as_numpy(tensor[first : first + _BATCH_ROWS]) for tensor in tensors)


def _as_numpy(tensor: Any) -> np.ndarray:
    """NumPy lacks bfloat16 and narrower floats: they become float32."""
    narrow = tensor.is_floating_point() and tensor.dtype.itemsize < 4 and str(tensor.dtype) != "torch.float16"
    array: np.ndarray = (tensor.float() if narrow else tensor).numpy()
    return array


def _unmapped(torch: Any, path: Path) -> Any:
    """Read a file in PyTorch's format before 1.6, which cannot be mapped."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise SnapshotError(_unreadable(error), file=str(path)) from error


def _unreadable(error: Exception) -> str:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"cannot be read as a file of tensors alone (torch.load with weights_only): {first}; save model.state_dict()"


def _collect(torch: Any, prefix: str, content: Any, tensors: dict[str, Any]) -> None:
    if isinstance(content, torch.Tensor):
        tensors[prefix] = content.detach()
    elif isinstance(content, Mapping):
        for name, one in content.items():
            _collect(torch, f"{prefix}.{name}" if prefix else str(name), one, tensors)


def _distributed(path: Path) -> _Tensors:
    """The tensors of a torch.distributed.checkpoint directory, put together from all
    ranks' shards when they are read.
    """
    torch = _torch()
    from torch.distributed import checkpoint

    def failure(error: Exception) -> SnapshotError:
        return SnapshotError(f"cannot be read as a distributed checkpoint: {error}", file=str(path))

    try:
        entries = checkpoint.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:
        raise failure(error) from error
    shapes = {name: tuple(entry.size) for name, entry in entries.items() if hasattr(entry, "size")}

    def read(names: list[str]) -> Iterator[tuple[np.ndarray, ...]]:
        state = {name: torch.empty(shapes[name], dtype=entries[name].properties.dtype) for name in names}
        try:
            checkpoint.load(state, checkpoint_id=str(path), no_dist=True)
        except Exception as error:
            raise failure(error) from error
        return _slices([state[name] for name in names])

    return _Tensors(shapes, read)
