"""Finds the tensor with the rows of a table, and the one with their keys.

The files of a source are one set, as a large checkpoint is cut into several. One thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from tierstore.errors import SnapshotError
from tierstore.formats.normalize import refused_blocks, refused_integers
from tierstore.imports.codes import companions
from tierstore.imports.columns import TAKE_INTEGERS
from tierstore.imports.named_tensors import NamedTensors, TensorKind
from tierstore.imports.raw_pairs import RowsPart, numbered
from tierstore.imports.row_maps import is_codebook, managed_module, rows_by_id, rows_by_token

log = logging.getLogger(__name__)

_KEY, _VECTOR = "key", "vector"  # the defaults of `import_table`: no tensor was named
_ROW_NUMBER = "row_number"  # as a name for keys: the numbers of the rows, whatever lies beside them
_SHOWN = 20  # tensors in an error


def rows_in_tensors(
    files: Sequence[NamedTensors], key: str, vector: str, *, integers: bool = False, has_default: bool = False
) -> Iterator[RowsPart]:
    """The rows of the tensor `vector`, by batches; keys are the tensor `key`, or the rows' numbers where none is named.

    Of several files those without it are passed over. Where other tensors say which row a key has, the rows come by
    them (`row_maps.py`), unless the key is `row_number`. What else is beside the rows and may be about each is refused
    or logged, so that nobody takes it for read. `has_default`: absent keys get what the caller says. SnapshotError,
    before anything is read, for a name that does not fit (it names the tensors that there are), and for rows that are
    codes.
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
    for file in holding:
        _refuse_codes(str(file.place), rows, file.kinds[rows].dtype, kinds, integers)
    by_number = key == _ROW_NUMBER and key not in kinds
    named = None if key == _KEY and key not in kinds else key
    module = None if by_number else managed_module(kinds, rows, named)
    if module is not None:
        return rows_by_id(files, _only(holding, rows, place), rows, module, has_default=has_default)
    if named is None and is_codebook(kinds, rows):
        return rows_by_token(files, _only(holding, rows, place), rows)
    beside = [] if by_number else _beside(kinds, rows, named)
    if named is None and not any(file.are_arrays for file in holding):
        _refuse_integers(place, kinds, rows, beside)
    chosen = [(file, _with_keys(file, rows, key)) for file in holding]
    numbered_files = [str(file.place) for file, names in chosen if len(names) == 1]
    if len(numbered_files) > 1:
        raise SnapshotError(
            f"tensor {rows!r} is in {', '.join(numbered_files[:3])} too: as the keys of its rows are their numbers, "
            "name one of the files; or a tensor of keys by --key (key=)",
            file=place,
        )
    read = {name for _, names in chosen for name in names}
    unread = _shown(kinds, [name for name in beside if name not in read])
    return _parts(
        chosen, f"{place}: beside tensor {rows!r}, these were not read: {unread}" if set(beside) - read else ""
    )


def _parts(chosen: Sequence[tuple[NamedTensors, list[str]]], warning: str) -> Iterator[RowsPart]:
    """The rows; what there is to say of what is not read is said once, when they are."""
    if warning:
        log.warning(warning)
    for file, names in chosen:
        yield from numbered(str(file.place), file.read(names, 0))


def _only(holding: Sequence[NamedTensors], rows: str, place: str) -> NamedTensors:
    """The one file that has the rows. SnapshotError where several do."""
    if len(holding) > 1:
        names = ", ".join(str(file.place) for file in holding[:3])
        raise SnapshotError(f"tensor {rows!r} is in {names} too: name one of the files", file=place)
    return holding[0]


def _with_keys(file: NamedTensors, rows: str, key: str) -> list[str]:
    """The tensor of the rows, and that of their keys unless these are the rows' numbers."""
    place, kinds = str(file.place), file.kinds
    if key == _ROW_NUMBER and key not in kinds:
        return [rows]
    if key == _KEY and key not in kinds:
        fitting = [name for name, kind in kinds.items() if _may_be_keys(kind, kinds[rows])]
        if not file.are_arrays or not fitting:
            return [rows]
        if len(fitting) > 1:
            raise SnapshotError(
                f"name the array of keys by --key (key=): {_shown(kinds, fitting)}; or {_ROW_NUMBER}, where keys are "
                "the numbers of the rows",
                file=place,
            )
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


def _beside(kinds: Mapping[str, TensorKind], rows: str, key: str | None) -> list[str]:
    """What else is in the module of the rows, and has a number for each of them or leads to them."""
    module, count = rows.rpartition(".")[0], kinds[rows].shape[0]
    return [
        name
        for name, kind in kinds.items()
        if name not in (rows, key)
        and name.rpartition(".")[0] == module
        and (kind.shape in ((count,), (count, 1)) or (len(kind.shape) == 1 and "map" in name.rpartition(".")[2]))
    ]


def _refuse_integers(place: str, kinds: Mapping[str, TensorKind], rows: str, beside: Sequence[str]) -> None:
    """Raise SnapshotError for integers beside the rows, which may be their keys."""
    integers = [name for name in beside if kinds[name].dtype.startswith(("int", "uint"))]
    if integers:
        raise SnapshotError(
            f"beside {_shown(kinds, [rows])} lie integers that may say which key each row has: "
            f"{_shown(kinds, integers)}. --key (key=) names the tensor of keys; --key {_ROW_NUMBER}, where keys are "
            "the numbers of the rows",
            file=place,
        )


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


def _refuse_codes(place: str, rows: str, dtype: str, kinds: Mapping[str, TensorKind], integers: bool) -> None:
    """Raise SnapshotError for a tensor of codes: integers that are not meant, or floats of 8 bits with a scale."""
    beside = companions(rows, kinds)
    if (why := refused_blocks(dtype)) is not None:
        raise SnapshotError(f"tensor {rows!r}: {why}", file=place)
    if dtype.startswith("|V"):
        raise SnapshotError(
            f"tensor {rows!r}: expected rows of floats, got {dtype}, as NumPy writes types that it does not have "
            "(bfloat16, float8): save them as float32, as in .astype('float32')",
            file=place,
        )
    if dtype.startswith(("float", "bfloat")) and not (dtype.startswith("float8") and beside):
        return
    if not beside:
        if dtype.startswith(("int", "uint")):
            if integers:
                return
            raise SnapshotError(f"tensor {rows!r}: {refused_integers(dtype)}. {TAKE_INTEGERS}", file=place)
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
