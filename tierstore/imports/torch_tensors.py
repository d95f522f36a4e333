"""Tensors of PyTorch's files: what `torch.save` wrote, and directories of torch.distributed.checkpoint.

Nothing is unpickled but by `torch.load(weights_only=True)`. One thread at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.errors import MissingExtra, SnapshotError
from tierstore.imports.named_tensors import NamedTensors, TensorKind
from tierstore.imports.places import LIGHTNING
from tierstore.imports.raw_pairs import BATCH_ROWS

_WEIGHTS = "state_dict"  # in a checkpoint of Lightning
_UNPICKLED = re.compile(r"GLOBAL (\S+) was not an allowed global")  # as PyTorch says it
_WORD2VEC = re.compile(rb"[0-9]+ [0-9]+\n")


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra(
            "PyTorch's checkpoints are read by PyTorch: pip install torch; or save as .safetensors"
        ) from error
    return torch


def read_saved(path: Path) -> NamedTensors:
    """Tensors of a file that `torch.save` wrote, by their names; those of nested dictionaries by dotted ones.

    Of Lightning's checkpoints these are the weights alone, under the names that the module has for them.
    """
    with path.open("rb") as file:
        if _WORD2VEC.match(file.read(64)):
            raise SnapshotError(
                "is word2vec's binary form: save it as text, save_word2vec_format(…, binary=False)", file=str(path)
            )
    torch = _torch()
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError):
        content = _unmapped(torch, path)
    except Exception as error:
        raise SnapshotError(_unreadable(path, error), file=str(path)) from error
    if path.suffix.lower() == LIGHTNING and isinstance(content, Mapping):
        content = content.get(_WEIGHTS, content)
    tensors: dict[str, Any] = {}
    _collect(torch, "", content, tensors)
    return NamedTensors(
        path,
        {name: _kind(tensor.shape, tensor.dtype) for name, tensor in tensors.items()},
        lambda names, first: _slices([tensors[name] for name in names], first),
    )


def read_distributed(path: Path) -> NamedTensors:
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
    kinds = {
        name: _kind(entry.size, entry.properties.dtype) for name, entry in entries.items() if hasattr(entry, "size")
    }

    def read(names: list[str], first: int) -> Iterator[tuple[np.ndarray, ...]]:
        state = {name: torch.empty(kinds[name].shape, dtype=entries[name].properties.dtype) for name in names}
        try:
            checkpoint.load(state, checkpoint_id=str(path), no_dist=True)
        except Exception as error:
            raise failure(error) from error
        return _slices([state[name] for name in names], first)

    return NamedTensors(path, kinds, read)


def _kind(shape: Any, dtype: Any) -> TensorKind:
    return TensorKind(tuple(shape), str(dtype).removeprefix("torch."))


def _slices(tensors: Sequence[Any], begin: int) -> Iterator[tuple[np.ndarray, ...]]:
    for first in range(begin, len(tensors[0]), BATCH_ROWS):
        yield tuple(_as_numpy(tensor[first : first + BATCH_ROWS]) for tensor in tensors)


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
        raise SnapshotError(_unreadable(path, error), file=str(path)) from error


def _unreadable(path: Path, error: Exception) -> str:
    beside = _UNPICKLED.search(str(error))
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    reason = first if beside is None else f"it holds {beside[1]}, which only unpickling reads"
    what_to_do = "save model.state_dict()"
    if path.suffix.lower() == LIGHTNING:
        what_to_do = (
            "if you trust who wrote it, write its weights alone: "
            f"torch.save(torch.load({path.name!r}, weights_only=False)[{_WEIGHTS!r}], 'weights.pt')"
        )
    return f"cannot be read as a file of tensors alone (torch.load with weights_only): {reason}; {what_to_do}"


def _collect(torch: Any, prefix: str, content: Any, tensors: dict[str, Any]) -> None:
    if isinstance(content, torch.Tensor):
        tensors[prefix] = content.detach()
    elif isinstance(content, Mapping):
        for name, one in content.items():
            _collect(torch, f"{prefix}.{name}" if prefix else str(name), one, tensors)
