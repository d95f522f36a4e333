"""`tables.toml`: the tables of a model, where their rows are, and the settings of each. One thread at a time."""

from __future__ import annotations

import difflib
import tomllib
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from tierstore.errors import SnapshotError
from tierstore.formats.snapshot.golden import RTOL
from tierstore.imports.tables import Feature, GoldenFile, TableSource


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _FeatureEntry(_Strict):
    combiner: str | None = None
    padding_key: int | str | None = None
    hash: dict[str, int | str | bool | list[int]] | None = None


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
    as_of: int | str | datetime | None = None
    features: dict[str, _FeatureEntry] = Field(default_factory=dict)


class _GoldenEntry(_Strict):
    path: str
    rtol: float = RTOL
    atol: float | None = None


class TablesFile(_Strict):
    """`tables.toml`: the tables of a model. Made by `TablesFile.read`."""

    model: str | None = None
    version: int | None = None
    delta_seq: int = 0
    dense: str | None = None
    golden: _GoldenEntry | None = None
    tables: dict[str, _TableEntry]

    @classmethod
    def read(cls, path: Path) -> TablesFile:
        """Read and check the file. SnapshotError names the file and the entry."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SnapshotError(f"cannot be read: {error}", file=str(path)) from error
        except ValidationError as error:
            shown = "; ".join(map(_shown, error.errors()[:3]))
            raise SnapshotError(shown, file=str(path)) from error

    def examples(self, root: Path) -> GoldenFile | None:
        """The golden examples; a relative path starts from the directory `root`."""
        golden = self.golden
        return None if golden is None else GoldenFile(root / golden.path, golden.rtol, golden.atol)

    def sources(self, root: Path) -> list[TableSource]:
        """The tables; relative paths start from the directory `root`."""
        return [_source(name, entry, root) for name, entry in self.tables.items()]


def _shown(problem: ErrorDetails) -> str:
    """What is wrong with an entry, and the name that was meant where there is none of that name."""
    *within, name = map(str, problem["loc"])
    where = ".".join([*within, name])
    if problem["type"] != "extra_forbidden":
        return f"{where}: {problem['msg']}"
    kind = _KINDS.get((len(within), within[0] if within else ""), TablesFile)
    close = [known for known in kind.model_fields if known.startswith(f"{name}_")]
    close += difflib.get_close_matches(name, kind.model_fields, 3)
    names = ", ".join(dict.fromkeys(close)) or ", ".join(kind.model_fields)
    return f"{where}: there is no such entry; {'did you mean' if close else 'there are'} {names}{'?' if close else ''}"


_KINDS: dict[tuple[int, str], type[BaseModel]] = {
    (2, "tables"): _TableEntry, (4, "tables"): _FeatureEntry, (1, "golden"): _GoldenEntry,
}  # fmt: skip


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
        entry.as_of,
    )
