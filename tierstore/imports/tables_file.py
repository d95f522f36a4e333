"""`tables.toml`: the tables of a model, where their rows are, and the settings of each. One thread at a time."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierstore.errors import SnapshotError
from tierstore.imports.tables import Feature, TableSource


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _FeatureEntry(_Strict):
    combiner: str | None = None
    padding_key: int | str | None = None
    hash: dict[str, int | str] | None = None


class _TableEntry(_Strict):
    path: str | list[str]
    key: str = "key"
    vector: str | list[str] = "vector"
    key_type: str | None = None
    dtype: str | None = None
    default: str | list[float] | None = None
    ttl_s: int | str | None = None
    time_column: str | None = None
    on_null: str = "fail"
    on_duplicate: str = "fail"
    dim: int | None = None
    integers: bool = False
    features: dict[str, _FeatureEntry] = Field(default_factory=dict)


class TablesFile(_Strict):
    """`tables.toml`: the tables of a model. Made by `TablesFile.read`."""

    model: str | None = None
    version: int | None = None
    delta_seq: int = 0
    dense: str | None = None
    tables: dict[str, _TableEntry]

    @classmethod
    def read(cls, path: Path) -> TablesFile:
        """Read and check the file. SnapshotError names the file and the entry."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SnapshotError(f"cannot be read: {error}", file=str(path)) from error
        except ValidationError as error:
            shown = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
            raise SnapshotError(shown, file=str(path)) from error

    def sources(self, root: Path) -> list[TableSource]:
        """The tables; relative paths start from the directory `root`."""
        return [_source(name, entry, root) for name, entry in self.tables.items()]


def _source(name: str, entry: _TableEntry, root: Path) -> TableSource:
    paths = [entry.path] if isinstance(entry.path, str) else entry.path
    features = tuple(Feature(feature, it.combiner, it.padding_key, it.hash) for feature, it in entry.features.items())
    return TableSource(
        name,
        [root / path for path in paths],
        entry.key,
        entry.vector,
        entry.key_type,
        entry.dtype,
        entry.default,
        features,
        entry.ttl_s,
        entry.time_column,
        entry.on_null,
        entry.on_duplicate,
        entry.dim,
        entry.integers,
    )
