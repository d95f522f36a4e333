"""Datasets of Hugging Face: what `save_to_disk` wrote, and the objects of a program.

A folder's `state.json` names its data files, which are streams of Arrow; others beside them are of an earlier save
(datasets/arrow_dataset.py, 5.2). Nothing here needs the package. One thread at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from tierstore.errors import SnapshotError
from tierstore.formats.regular import MAX_DOCUMENT_BYTES, read_regular

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_INDICES = ("_indices_data_files", "_indices_files")  # of the first releases, for rows that `select` chose


def dataset_files(folder: Path) -> list[Path] | None:
    """The data files of a saved dataset, in their order; None for a folder that is none. SnapshotError for one that has
    several splits, or a state that is not as the package writes it.
    """
    if (folder / _SPLITS).is_file():
        splits = sorted(file.parent.name for file in folder.glob(f"*/{_STATE}")) or ["none"]
        raise SnapshotError(
            f"is a DatasetDict with splits {', '.join(splits)}: name one, as {folder / splits[0]}",
            file=str(folder),
        )
    if not ((folder / _STATE).is_file() and (folder / _INFO).is_file()):
        return None
    file = folder / _STATE
    try:
        state = json.loads(read_regular(file, MAX_DOCUMENT_BYTES))
        names = [one["filename"] for one in state["_data_files"]]
        if any(Path(name).name != name for name in names):
            raise ValueError(f"names a file that is not beside it: {names}")
        indices = [name for name in _INDICES if state.get(name)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"is not as save_to_disk writes it: {error!r}", file=str(file)) from error
    if indices:
        raise SnapshotError(
            "says that another file chooses the rows, as the first releases of datasets wrote it: save it anew with "
            "the release that wrote it, load_from_disk(…).flatten_indices().save_to_disk(…)",
            file=str(file),
        )
    return [folder / name for name in names]


def dataset_folders(names: Iterable[PurePosixPath]) -> list[PurePosixPath]:
    """The folders of saved datasets among these files."""
    there = set(names)
    return sorted(name.parent for name in there if name.name == _STATE and name.with_name(_INFO) in there)


def dataset_reader(source: Any, batch_rows: int) -> pa.RecordBatchReader | None:
    """The rows of a `datasets.Dataset` (those that `select` and others chose) or `IterableDataset`; None for any other
    object.
    """
    if type(source).__module__.partition(".")[0] != "datasets" or not hasattr(source, "with_format"):
        return None

    def batches() -> Iterator[pa.RecordBatch]:
        for table in source.with_format("arrow").iter(batch_size=batch_rows):
            yield from table.to_batches()

    found = batches()
    first = next(found, None)
    if first is None:
        return pa.RecordBatchReader.from_batches(source.features.arrow_schema if source.features else pa.schema([]), [])
    return pa.RecordBatchReader.from_batches(first.schema, chain([first], found))
