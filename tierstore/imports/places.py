"""Recognises what lies where a source points to, by its name: files of columns, lake tables, checkpoints, pairs,
arrays, text.

Directories are searched to their bottom. What begins with `_` or a dot is passed over, and so are data directories and
snapshots of tierstore. Tables that a log describes are taken by their own directory alone, and only where something
here reads the log. Any thread; nothing is read but names, and what a saved dataset says of its files.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from enum import Enum
from itertools import groupby
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import pyarrow as pa

from tierstore.errors import SnapshotError
from tierstore.formats.names import BUILT_MANIFEST, DIRECTORY_FORMAT, LOCK, SNAPSHOT_MANIFEST
from tierstore.formats.objects import names_below
from tierstore.formats.snapshot.checksum import is_hugectr
from tierstore.formats.snapshot.table_logs import DELTA, ICEBERG, log_above, log_in, reason_of_log
from tierstore.imports.hugging_face import dataset_files, dataset_folders
from tierstore.imports.raw_pairs import folders_of_pairs, pairs_in

LIGHTNING, KERAS = ".ckpt", ".keras"
HDF5 = (".h5", ".hdf5", KERAS)
SAFETENSORS, NPZ, NPY = ".safetensors", ".npz", ".npy"
FORMATS = {".parquet": "parquet", ".arrow": "ipc", ".feather": "ipc", ".ipc": "ipc", ".orc": "orc"}
_TENSORS = (".pt", ".pth", ".bin", LIGHTNING, *HDF5, SAFETENSORS, NPZ, NPY)
_TEXT = (".txt", ".vec")
_TENSORFLOW = (
    "import numpy, tensorflow; checkpoint = tensorflow.train.load_checkpoint({path!r}); "
    "numpy.savez('item.npz', vectors=checkpoint.get_tensor('NAME')), with a NAME of "
    "checkpoint.get_variable_to_shape_map()"
)
# Orbax's own types take the devices that the trainer had, NumPy's do not. Of a smaller tree with a wrong name it would
# give back what it was asked with, so it gets the whole one, where a placeholder leaves out what only training needs.
_ORBAX = (
    "import jax, numpy, orbax.checkpoint as orbax; reader, path = orbax.PyTreeCheckpointer(), {path!r}; "
    "tree = reader.metadata(path).item_metadata.tree; table = jax.tree.map(lambda leaf: "
    "orbax.RestoreArgs(numpy.ndarray) if leaf.name == 'NAME' else orbax.PLACEHOLDER, tree); "
    "state = reader.restore(path, orbax.args.PyTreeRestore(table, table)); "
    "[rows] = [leaf for leaf in jax.tree.leaves(state) if leaf is not orbax.PLACEHOLDER]; "
    "numpy.savez('item.npz', vectors=rows), with a NAME of [leaf.name for leaf in jax.tree.leaves(tree)]"
)
_ORBAX_TREE = "_METADATA"  # in a directory that Orbax restores, which may lie below that of a step
# what only a large package reads: the names of its files, the checkpoint that they are of, and a program for its rows
_TRAINERS = (
    (re.compile(r"(.+)\.(?:index|data-\d+-of-\d+)"), r"\1", "a TensorFlow checkpoint", _TENSORFLOW),
    (re.compile(r"saved_model\.pb"), "variables/variables", "a TensorFlow SavedModel", _TENSORFLOW),
    (re.compile(rf"{_ORBAX_TREE}|manifest\.ocdbt|_CHECKPOINT_METADATA"), "", "an Orbax checkpoint", _ORBAX),
)
_DISTRIBUTED = ".metadata"  # of torch.distributed.checkpoint, in its directory
ICEBERG_METADATA = re.compile(r".+\.metadata\.json")
_HIVE = re.compile(r"([^=]+)=(.*)")
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")


class RowsKind(Enum):
    """How rows lie in a file, or in files that belong together."""

    COLUMNS = "Parquet, Arrow or ORC"
    DELTA = "a Delta table"
    ICEBERG = "an Iceberg table"
    PAIRS = "pairs of TFRA or dynamicemb"
    HUGECTR = "a HugeCTR folder"
    TENSORS = "tensors"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class RowsPlace:
    """Rows at `path`: one file or folder, or of tensors all `files`. `folders`: columns by names of hive's folders."""

    kind: RowsKind
    path: Path
    files: tuple[Path, ...] = ()
    folders: tuple[tuple[str, pa.Scalar], ...] = ()


_BY_LOG = {DELTA: RowsKind.DELTA, ICEBERG: RowsKind.ICEBERG}


def is_distributed(path: Path) -> bool:
    """Whether a directory is a torch.distributed.checkpoint."""
    return (path / _DISTRIBUTED).is_file()


def kind_of(path: Path) -> RowsKind | None:
    """The kind of a file, by the ending of its name; None for one that is not read."""
    ending = path.suffix.lower()
    if ending in FORMATS:
        return RowsKind.COLUMNS
    return RowsKind.TENSORS if ending in _TENSORS else RowsKind.TEXT if ending in _TEXT else None


def places_of(paths: Iterable[Path]) -> list[RowsPlace]:
    """What there is to read, in order; all files of tensors are one. SnapshotError names a path without."""
    found = [place for path in paths for place in _places(path)]
    tensors = [place for place in found if place.kind is RowsKind.TENSORS]
    if not tensors:
        return found
    together = RowsPlace(RowsKind.TENSORS, tensors[0].path, tuple(file for place in tensors for file in place.files))
    return [*(place for place in found if place.kind is not RowsKind.TENSORS), together]


def _places(path: Path) -> list[RowsPlace]:
    if pairs_in(path):
        return [RowsPlace(RowsKind.PAIRS, path)]
    if not path.exists():
        raise SnapshotError("is missing", file=str(path))
    if ICEBERG_METADATA.fullmatch(path.name):
        return [RowsPlace(RowsKind.ICEBERG, path)]
    log = log_in(path)
    if log in _BY_LOG:
        return [RowsPlace(_BY_LOG[log], path)]
    if path.is_dir():
        if is_distributed(path):
            return [RowsPlace(RowsKind.TENSORS, path, (path,))]
        if is_hugectr(path):
            return [RowsPlace(RowsKind.HUGECTR, path)]
        if (files := dataset_files(path)) is not None:
            return [RowsPlace(RowsKind.COLUMNS, file, (file,)) for file in files]
        return _in_directory(path)
    reason = reason_of_log(path.parent, [PurePosixPath(path.name)]) or log_above(path)
    if reason is not None:
        raise SnapshotError(reason, file=str(path))
    return [_of_file(path)]


def _of_file(path: Path) -> RowsPlace:
    kind = kind_of(path)
    if kind is None:
        _refuse_trainers(path, [PurePosixPath(path.name)])
        raise SnapshotError(
            f"expected {', '.join(FORMATS)}, a checkpoint ({SAFETENSORS}, .pt, …), arrays ({NPZ}, {NPY}), vectors as "
            f"text ({', '.join(_TEXT)}) or a HugeCTR folder, got {path.suffix or 'no ending'}; DuckDB or pandas can "
            "convert other formats to Parquet",
            file=str(path),
        )
    return RowsPlace(kind, path, (path,), tuple(_folders(path)) if kind is RowsKind.COLUMNS else ())


def _in_directory(path: Path) -> list[RowsPlace]:
    names = names_below(path)
    reason = reason_of_log(path, names) or log_above(path / "file")
    if reason is not None:
        raise SnapshotError(reason, file=str(path))
    if deeper := folders_of_pairs(names):
        raise SnapshotError(
            f"holds rows of TFRA or dynamicemb in {len(deeper)} of its directories: name one of them, as "
            f"{path / deeper[0]}",
            file=str(path),
        )
    if datasets := dataset_folders(names):
        raise SnapshotError(
            f"holds datasets of Hugging Face in {len(datasets)} of its directories, whose states name their "
            f"files: name one, as {path / datasets[0]}",
            file=str(path),
        )
    own = _own_directories(names)
    if PurePosixPath() in own:
        raise SnapshotError(own[PurePosixPath()], file=str(path))
    _refuse_trainers(path, names)
    files = [
        path / name
        for name in sorted(names)
        if not any(part.startswith(("_", ".")) for part in name.parts) and not own.keys() & set(name.parents)
    ]
    kinds = {kind: file for file in reversed(files) if (kind := kind_of(file)) is not None}
    if RowsKind.TENSORS in kinds and RowsKind.COLUMNS not in kinds:  # with a checkpoint lie its settings and words
        files = [file for file in files if kind_of(file) is RowsKind.TENSORS]
        files = [file for file in files if file.suffix.lower() != LIGHTNING] or files  # one beside weights has them too
    elif len(kinds) > 1:
        one, other = list(kinds.values())[:2]
        raise SnapshotError(
            f"holds files of several kinds, as {one.relative_to(path)} and {other.relative_to(path)}: name the files, "
            "or a directory of one kind",
            file=str(path),
        )
    if not files:
        beside = "".join(f"; passed over: {path / where}, which {what}" for where, what in own.items())
        raise SnapshotError(f"expected a directory with Parquet, Arrow or ORC files; got none{beside}", file=str(path))
    return [_of_file(file) for file in files]


def _refuse_trainers(path: Path, names: Sequence[PurePosixPath]) -> None:
    """Raise SnapshotError where the trainer that wrote these files has to be asked for the rows."""
    folder = path if path.is_dir() else path.parent
    for files, checkpoint, trainer, program in _TRAINERS:
        found = [name for name in names if files.fullmatch(name.name)]
        if found:
            name = min(found, key=lambda one: len(one.parts))  # others lie deeper
            where = folder / name.parent / files.sub(checkpoint, name.name)
            if program is _ORBAX:
                where = _orbax_tree(folder) or where
            raise SnapshotError(
                f"{name} is a file of {trainer}, which is not read. A program writes a table of it as .npz, which is: "
                f"{program.format(path=str(where.absolute()))} (docs/trainers.md)",
                file=str(path),
            )


def _orbax_tree(folder: Path) -> Path | None:
    """The directory here or below that Orbax restores, None without one; SnapshotError names one of several."""
    trees = sorted(folder / name.parent for name in names_below(folder) if name.name == _ORBAX_TREE)
    if len(trees) > 1:
        raise SnapshotError(
            f"holds checkpoints of Orbax in {len(trees)} of its directories: name one of them, as {trees[0]}",
            file=str(folder),
        )
    return trees[0] if trees else None


def _own_directories(names: Sequence[PurePosixPath]) -> dict[PurePosixPath, str]:
    """Directories among these files that tierstore has written, and what they are."""
    there = set(names)
    own = {}
    for name in names:
        if name.name == LOCK and name.parent / DIRECTORY_FORMAT in there:
            own[name.parent] = (
                "is a data directory of tierstore: `tierstore export` writes a snapshot of what it serves"
            )
        elif name.name == SNAPSHOT_MANIFEST:
            own[name.parent] = "is a snapshot of tierstore: `tierstore load` loads it"
        elif name.name == BUILT_MANIFEST:
            own[name.parent] = "is a built version of tierstore: `tierstore load` loads it"
    return own


def _folders(path: Path) -> Iterable[tuple[str, pa.Scalar]]:
    """What the names of a file's folders say, as Spark, DuckDB and pandas partition: `day=2026-11-20/bucket=7/`."""
    for folder in path.parts[:-1]:
        if (found := _HIVE.fullmatch(folder)) is not None:
            name, text = unquote(found[1]), unquote(found[2])
            if text == _HIVE_NULL:
                yield name, pa.scalar(None, pa.string())
            elif _NUMBER.fullmatch(text):
                yield name, pa.scalar(int(text), pa.int64())
            else:
                yield name, pa.scalar(_date(text) or text)


def _date(text: str) -> date | None:
    """The date that a text of the form `2026-11-20` names; None for other texts, which a date would not give back."""
    with contextlib.suppress(ValueError):
        return date.fromisoformat(text) if len(text) == 10 and "W" not in text else None
    return None


def npy_folders(files: Iterable[Path]) -> list[tuple[Path, ...]]:
    """The `.npy` files among `files`, those of one folder together."""
    arrays = sorted(file for file in files if file.suffix.lower() == NPY)
    return [tuple(group) for _, group in groupby(arrays, key=lambda file: file.parent)]
