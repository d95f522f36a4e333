"""HPS's `ps.json`: its models, as tables to import from their HugeCTR folders.

The file configures HugeCTR's Hierarchical Parameter Server and its Triton backend. Only the models, their sparse files,
table names, vector sizes and default values are read; the settings of HPS's own caches and databases have no
counterpart here. One thread at a time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tierstore.errors import SnapshotError
from tierstore.formats.names import HUGECTR_VECTORS
from tierstore.imports.tables import TableSource


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str
    sparse_files: list[str]
    embedding_table_names: list[str] | None = None
    embedding_vecsize_per_table: list[int] | None = None
    default_value_for_each_table: list[float] | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore")

    models: list[_Model]


@dataclass(frozen=True, slots=True)
class HpsModel:
    """A model of a `ps.json`, and its tables in HPS's order."""

    name: str
    tables: tuple[TableSource, ...]


def read_ps_json(path: Path, root: Path | None = None) -> list[HpsModel]:
    """The models of a `ps.json`. Relative paths start from `root`, by default the file's directory.

    An absolute path that does not exist (it is of the container that HPS ran in) is searched below `root` by its last
    parts. SnapshotError names the file and the entry.
    """
    try:
        document = _File.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            shown = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
            raise SnapshotError(f"expected an HPS configuration: {shown}", file=str(path)) from error
        raise SnapshotError(f"cannot be read: {error}", file=str(path)) from error
    return [HpsModel(model.model, tuple(_tables(model, path, root or path.parent))) for model in document.models]


def _tables(model: _Model, path: Path, root: Path) -> list[TableSource]:
    n = len(model.sparse_files)
    names = model.embedding_table_names or [f"sparse_embedding{i + 1}" for i in range(n)]
    for what, values in (
        ("embedding_table_names", names),
        ("embedding_vecsize_per_table", model.embedding_vecsize_per_table),
        ("default_value_for_each_table", model.default_value_for_each_table),
    ):
        if values is not None and len(values) != n:
            raise SnapshotError(
                f"model {model.model!r}: expected {n} {what}, one per sparse file, got {len(values)}", file=str(path)
            )
    tables = []
    for i, (name, file) in enumerate(zip(names, model.sparse_files, strict=True)):
        folder = _located(Path(file), root)
        declared = model.embedding_vecsize_per_table[i] if model.embedding_vecsize_per_table else None
        value = model.default_value_for_each_table[i] if model.default_value_for_each_table else 0.0
        default: Any = "zeros" if value == 0 else [value] * (declared or _dim(folder))
        tables.append(TableSource(name, folder, default=default, dim=declared))
    return tables


def _dim(folder: Path) -> int:
    """Numbers of a row, from the sizes of the files. 0 where they do not exist: the import reports that."""
    try:
        return (folder / HUGECTR_VECTORS).stat().st_size // 4 // max(1, (folder / "key").stat().st_size // 8)
    except OSError:
        return 0


def _located(file: Path, root: Path) -> Path:
    if not file.is_absolute():
        return root / file
    if not file.exists():
        for i in range(1, len(file.parts)):
            local = root.joinpath(*file.parts[i:])
            if local.exists():
                return local
    return file
