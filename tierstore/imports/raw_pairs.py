"""Rows as trainers leave them in pairs of raw files, one of keys and one of vectors.

    TFRA            `FileSystemSaver`: `<table>-keys`, `<table>-values`, with ranks and shards in the names
    dynamicemb      its dump: `<table>_emb_keys.rank_0.world_size_1`, `…_emb_values…`
    HugeCTR, HPS    a folder with `key`, `emb_vector`

All int64 keys and float32 rows, little-endian. The files say neither: their sizes have to fit, and where `dim` is said,
that too. TFRA's may hold other types, so there it has to be said. One thread at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from tierstore.errors import SnapshotError
from tierstore.formats.columns import Malformed
from tierstore.formats.names import HUGECTR_KEYS, HUGECTR_VECTORS
from tierstore.formats.snapshot.tensor_shards import raw_pair, read_tensors

BATCH_ROWS = 1 << 15

_TFRA = re.compile(
    r"(?P<table>.+?)(?:_mht_(?P<shard>\d+)of(?P<shards>\d+))?(?:_rank(?P<rank>\d+)_size(?P<ranks>\d+))?-keys"
)
_DYNAMICEMB = re.compile(r"(?P<table>.+)_emb_keys\.rank_(?P<rank>\d+)\.world_size_(?P<ranks>\d+)")


class RowsPart(NamedTuple):
    """Rows from row `first` on of `place`: keys [n], an array of NumPy or Arrow, and vectors [n, dim].

    `kept`: the number of each of them, from `first` on, where some rows between them have no key. `default`: the vector
    [dim] that the source has for keys that are not there.
    """

    place: str
    first: int
    keys: Any
    vectors: np.ndarray
    kept: np.ndarray | None = None
    default: np.ndarray | None = None


def numbered(place: str, batches: Iterator[tuple[np.ndarray, ...]]) -> Iterator[RowsPart]:
    """`batches`: rows and their keys, or rows alone, whose numbers are the keys. SnapshotError for a cut file."""
    first = 0
    try:
        for rows, *keys in batches:
            yield RowsPart(place, first, keys[0] if keys else np.arange(first, first + len(rows), dtype=np.int64), rows)
            first += len(rows)
    except Malformed as error:
        raise SnapshotError(error.reason, file=place) from error


class Pair(NamedTuple):
    """A file of keys and the file of their rows; `part` of `parts` that a table has.

    `typed`: whoever wrote it knows no other types.
    """

    keys: Path
    values: Path
    part: int
    parts: int
    typed: bool = True

    def rows(self, dim: int | None) -> Iterator[RowsPart]:
        """The rows of the pair. SnapshotError, before anything is read, where the sizes of the files do not fit.

        So it is where `dim` has to be said.
        """
        if not self.values.is_file():
            raise SnapshotError(f"is missing: it holds the rows of {self.keys.name}", file=str(self.values))
        if dim is None and not self.typed:
            raise SnapshotError(
                "does not say the types of its keys and numbers: say how many numbers a vector has (--dim, dim=), so "
                "that other types than int64 and float32 are noticed",
                file=str(self.keys),
            )
        try:
            keys, rows = raw_pair(self.keys, self.values, dim)
        except Malformed as error:
            raise SnapshotError(error.reason, file=str(self.keys)) from error
        return numbered(str(self.keys), read_tensors((rows, keys), BATCH_ROWS))


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


def folders_of_pairs(names: Iterable[PurePosixPath]) -> list[PurePosixPath]:
    """The directories of such pairs, of which these are all files."""
    there = set(names)
    pairs = ((name, _pair(Path(name))) for name in there)
    return sorted(
        {name.parent for name, found in pairs if found is not None and PurePosixPath(found[1].values) in there}
    )


def _pair(file: Path) -> tuple[str, Pair] | None:
    if match := _DYNAMICEMB.fullmatch(file.name):
        values = file.with_name(file.name.replace("_emb_keys.rank_", "_emb_values.rank_"))
        return match["table"], Pair(file, values, int(match["rank"]), int(match["ranks"]))
    if match := _TFRA.fullmatch(file.name):
        values = file.with_name(file.name.removesuffix("-keys") + "-values")
        shards, ranks = int(match["shards"] or 1), int(match["ranks"] or 1)
        shard = max(0, int(match["shard"] or 1) - 1)
        return match["table"], Pair(file, values, int(match["rank"] or 0) * shards + shard, shards * ranks, False)
    return None


def read_pairs(path: Path, dim: int | None) -> Iterator[RowsPart]:
    """The rows of the one table that `path` holds. SnapshotError, before anything is read, where files do not fit."""
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
    return _one_after_another([pair.rows(dim) for pair in pairs])


def read_hugectr(path: Path, dim: int | None) -> Iterator[RowsPart]:
    """The rows of a HugeCTR/HPS folder, which is one pair. SnapshotError, before anything is read, as `read_pairs`."""
    pair = Pair(path / HUGECTR_KEYS, path / HUGECTR_VECTORS, 0, 1)
    for file in (pair.keys, pair.values):
        if not file.is_file():
            raise SnapshotError(
                f"expected the files {HUGECTR_KEYS!r} and {HUGECTR_VECTORS!r}; {file.name!r} is missing", file=str(path)
            )
    return pair.rows(dim)


def _one_after_another(parts: list[Iterator[RowsPart]]) -> Iterator[RowsPart]:
    for part in parts:
        yield from part
