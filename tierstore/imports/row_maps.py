"""Rows that are found by way of other tensors: which row a key has, where that is not the row's number.

    TorchRec, MCH    `…item._mch_sorted_raw_ids` and `…item._mch_remapped_ids_mapping` beside `…item.weight`: the id at
                     a place of the one has the row at that place of the other; 2^63 - 1 stands where no id is. An id
                     that is not there reads the last row (`_mch_remap` in torchrec/modules/mc_modules.py, 1.8.0)
    TorchRec, hash   `…item._hash_zch_identities`: the id of each row, -1 where none is. An id that is not there reads
    ZCH              whichever row its hash leads to (torchrec/modules/hash_mc_modules.py, 1.8.0)
    model2vec        `mapping` and `weights` beside `embeddings`: token `i` is row `mapping[i]`, times `weights[i]`
                     (`_encode_helper` in model2vec/model.py, 0.10.0)

The columns of ids are read whole, the rows by batches. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tierstore.errors import SnapshotError
from tierstore.formats.managed_collisions import HASH_ZCH_IDS, MCH_FREE, MCH_IDS, MCH_SLOTS
from tierstore.imports.named_tensors import NamedTensors, TensorKind
from tierstore.imports.raw_pairs import BATCH_ROWS, RowsPart

_MCH_RANGES = "_output_segments_tensor"
_COLLECTION = "_managed_collision_collection"  # of TorchRec's modules: what is before it is before the table's name too
_MODEL2VEC = ("embeddings", "embedding.weight")


def managed_module(kinds: Mapping[str, TensorKind], rows: str, key: str | None) -> str | None:
    """The managed collision module of the table `rows`: one of the same name, or, where a tensor is named for keys,
    the one that has it. None where there is none, or keys of another kind are named."""
    modules = {
        name.removesuffix(ids): f"{name.removesuffix(ids)}".rstrip(".")
        for name in kinds
        for ids in (MCH_IDS, HASH_ZCH_IDS)
        if name == ids or name.endswith(f".{ids}")
    }
    if key is not None:
        return next((module for prefix, module in modules.items() if key.startswith(f"{prefix}_")), None)
    table = _last(_module(rows))
    alike = [one for one in modules.values() if _last(one) == table and rows.startswith(one.partition(_COLLECTION)[0])]
    return max(alike, key=lambda one: len(one.partition(_COLLECTION)[0]), default=None)


def rows_by_id(
    files: Sequence[NamedTensors], holding: NamedTensors, rows: str, module: str, *, has_default: bool
) -> Iterator[RowsPart]:
    """The rows of a table with managed collisions, under the ids that lead to them; those without are passed over.

    The part's `default` is the row of ids that are not there. SnapshotError where no one row is that, and the table has
    no default of its own.
    """
    place, prefix = str(holding.place), f"{module}." if module else ""
    count = holding.kinds[rows].shape[0]
    kinds = {name for file in files for name in file.kinds}
    if prefix + HASH_ZCH_IDS in kinds:
        ids = _column(files, prefix + HASH_ZCH_IDS)
        if len(ids) != count:
            raise SnapshotError(f"expected an id or -1 for each of {count} rows, got {len(ids)} of them", file=place)
        ids = np.where(ids == -1, MCH_FREE, ids)
        one_default, why = False, "an id that is not there read whichever row its hash led to"
    else:
        ids = _by_row(place, _column(files, prefix + MCH_IDS), _column(files, prefix + MCH_SLOTS), count)
        ranges = _column(files, prefix + _MCH_RANGES) if prefix + _MCH_RANGES in kinds else np.array([0, count])
        one_default = int((ranges >= 0).sum()) <= 2
        why = "each shard that the trainer had read a row of its own for ids that are not there"
    if not (one_default or has_default):
        raise SnapshotError(
            f"tensor {rows!r} has managed collisions ({module}): {why}, which no table by id does. Say what such an id "
            "gets: --default zeros or mean (default=)",
            file=place,
        )
    default = next(holding.read([rows], count - 1))[0][0] if one_default and count else None
    first = 0
    for (block,) in holding.read([rows], 0):
        of_block = ids[first : first + len(block)]
        kept = np.flatnonzero(of_block != MCH_FREE)
        yield RowsPart(place, first, of_block[kept], block[kept], kept, default)
        first += len(block)


def is_codebook(kinds: Mapping[str, TensorKind], rows: str) -> bool:
    """Whether the tensors are model2vec's, with tokens that are not the rows themselves."""
    mapping, weights = kinds.get("mapping"), kinds.get("weights")
    if rows not in _MODEL2VEC or any(one is not None and len(one.shape) != 1 for one in (mapping, weights)):
        return False
    return mapping is not None or weights is not None


def rows_by_token(files: Sequence[NamedTensors], holding: NamedTensors, rows: str) -> Iterator[RowsPart]:
    """The rows of model2vec's tokens, under the tokens' numbers."""
    place, kinds = str(holding.place), {name for file in files for name in file.kinds}
    count = holding.kinds[rows].shape[0]
    weights = _column(files, "weights") if "weights" in kinds else None
    if "mapping" not in kinds:
        batches: Iterator[tuple[np.ndarray, ...]] = holding.read([rows], 0)
        tokens = count
    else:
        mapping = _column(files, "mapping")
        if len(mapping) and not 0 <= int(mapping.min()) <= int(mapping.max()) < count:
            raise SnapshotError(
                f"'mapping': expected rows 0 to {count - 1} of {rows!r}, got {mapping.max()}", file=place
            )
        book = np.concatenate([block for (block,) in holding.read([rows], 0)])
        tokens = len(mapping)
        batches = ((book[mapping[i : i + BATCH_ROWS]],) for i in range(0, tokens, BATCH_ROWS))
    if weights is not None and len(weights) != tokens:
        raise SnapshotError(f"'weights': expected one for each of {tokens} tokens, got {len(weights)}", file=place)
    first = 0
    for (block,) in batches:
        numbers = np.arange(first, first + len(block), dtype=np.int64)
        vectors = block if weights is None else block * weights[numbers, None]
        yield RowsPart(place, first, numbers, vectors)
        first += len(block)


def _by_row(place: str, ids: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """The id of each row, `MCH_FREE` for none. SnapshotError where two ids have one row, or one has none."""
    if ids.shape != rows.shape or len(ids) != count:
        raise SnapshotError(
            f"expected an id and its row, or a free place, for each of {count} rows, got {len(ids)} ids and "
            f"{len(rows)} rows of them",
            file=place,
        )
    taken = rows[ids != MCH_FREE]
    if len(taken) and not 0 <= int(taken.min()) <= int(taken.max()) < count:
        raise SnapshotError(f"{MCH_SLOTS!r}: expected rows 0 to {count - 1}, got {taken.max()}", file=place)
    if len(np.unique(taken)) != len(taken):
        raise SnapshotError(f"{MCH_SLOTS!r}: expected a row of its own for each id, got one that two have", file=place)
    of_row = np.full(len(ids), MCH_FREE, np.int64)
    of_row[taken] = ids[ids != MCH_FREE]
    return of_row


def _column(files: Sequence[NamedTensors], name: str) -> npt.NDArray[np.int64]:
    file = next(one for one in files if name in one.kinds)
    return np.concatenate([np.empty(0, np.int64), *(block.reshape(-1) for (block,) in file.read([name], 0))])


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _last(module: str) -> str:
    return module.rpartition(".")[2]
