"""Tables that a log describes: Delta, Iceberg, Hudi, Paimon, Lance, DuckLake, and Hive's of transactions.

Their directories hold Parquet, ORC or files of their own, but which files count, and which rows in them were deleted,
stands in the log alone. Read as plain files they give rows back that their owner has deleted. They are found by the
names beside the files. Pure but for `log_in` and `log_above`, which list directories; any thread.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_HEX = "[0-9a-f]"


class LogFormat(NamedTuple):
    """A format of such tables: how a file of its log is named, below the table's directory; how to get live rows."""

    name: str
    file: re.Pattern[str]
    advice: str


def _format(name: str, file: str, advice: str) -> LogFormat:
    return LogFormat(name, re.compile(rf"(?:(?P<table>.+)/)?(?:{file})"), advice)


DELTA = _format(
    "a Delta table (_delta_log)",
    r"_delta_log/[^/]+",
    "`tierstore import {table}` reads it by its log, with deltalake: pip install 'tierstore[deltalake]'. Or write the "
    "live rows first: duckdb -c \"COPY (FROM delta_scan('{table}')) TO 'live.parquet'\", for which DuckDB fetches an "
    "extension",
)
ICEBERG = _format(
    "an Iceberg table (metadata)",
    r"metadata/(?:[^/]+\.metadata\.json(?:\.gz)?|version-hint\.text)",
    "`tierstore import {table}` reads it by its log, with PyIceberg: pip install 'tierstore[pyiceberg]'. Or write the "
    "live rows first: duckdb -c \"COPY (FROM iceberg_scan('{table}', allow_moved_paths=true)) TO 'live.parquet'\"",
)
_FORMATS = (
    DELTA,
    ICEBERG,
    _format(
        "a Hudi table (.hoodie)",
        r"\.hoodie/hoodie\.properties",
        "write the live rows first: spark.read.format('hudi').load('{table}').write.parquet('live')",
    ),
    _format(
        "a Paimon table (manifest)",
        r"manifest/manifest-list-[^/]+",
        "write the live rows first: spark.read.format('paimon').load('{table}').write.parquet('live')",
    ),
    _format(
        "a table of Hive's with transactions (_orc_acid_version)",
        r"(?:base|delta|delete_delta)_[0-9_]+(?:_v[0-9]+)?/_orc_acid_version",
        "write the live rows first: in Hive, INSERT OVERWRITE DIRECTORY 'live' STORED AS PARQUET SELECT …",
    ),
    _format(
        "a Lance dataset (_versions)",
        r"_versions/[^/]+\.manifest",
        "in Python, tierstore.import_table(lance.dataset('{table}'), …) takes the live rows, with pylance",
    ),
    _format(
        "a DuckLake table (ducklake-….parquet)",
        rf"ducklake-{_HEX}{{8}}(?:-?{_HEX}{{4}}){{3}}-?{_HEX}{{12}}(?:-delete)?\.parquet",
        "write the live rows first: COPY (FROM the table) TO 'live.parquet', in DuckDB with its catalogue attached",
    ),
)
_BESIDE = ("_delta_log", "_versions", ".hoodie", "metadata", "manifest")  # directories of logs, in that of the table


def reason_of_log(root: Path | PurePosixPath, names: Iterable[PurePosixPath]) -> str | None:
    """Why the files of these `names`, relative to `root`, may not be read as they are; None where they may."""
    for name in names:
        for format in _FORMATS:
            found = format.file.fullmatch(name.as_posix())
            if found is not None:
                return reason_of(format, root / (found["table"] or ""))
    return None


def reason_of(format: LogFormat, table: Path | PurePosixPath) -> str:
    """Why the files of a table of this format may not be read as they are, and what to do."""
    return (
        f"{table} is {format.name}: its log says which files and rows are live, and read as plain files it would give "
        f"deleted rows back; {format.advice.format(table=table)}"
    )


def log_in(folder: Path) -> LogFormat | None:
    """The format of the table whose directory this is; None where it is that of no table with a log."""
    for name in _BESIDE:
        with contextlib.suppress(OSError):
            for file in os.listdir(folder / name):
                for format in _FORMATS:
                    if format.file.fullmatch(f"{name}/{file}"):
                        return format
    return None


def log_above(path: Path) -> str | None:
    """The reason where `path` lies in the directory of such a table: one of its files, or of its directories."""
    for folder in path.resolve().parents:
        if (format := log_in(folder)) is not None:
            return reason_of(format, folder)
    return None
