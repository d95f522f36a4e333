"""Tables that a log describes: Delta, Iceberg, Hudi, Paimon, DuckLake, and Hive's of transactions.

Their directories hold Parquet or ORC, but which files count, and which rows in them were deleted, stands in the log
alone. Read as plain files they give rows back that their owner has deleted. They are found by the names beside the
files. Pure but for `log_above`, which lists directories; any thread.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_HEX = "[0-9a-f]"


class _Format(NamedTuple):
    """A format of such tables: how a file of its log is named, below the table's directory; how to get live rows."""

    name: str
    file: re.Pattern[str]
    advice: str


DELTA_ADVICE = (
    "Import what deltalake's QueryBuilder gives, as it is: "
    "QueryBuilder().register('t', DeltaTable(…)).execute('SELECT * FROM t')"
)


def _format(name: str, file: str, advice: str) -> _Format:
    return _Format(name, re.compile(rf"(?:(?P<table>.+)/)?(?:{file})"), advice)


_FORMATS = (
    _format(
        "a Delta table (_delta_log)",
        r"_delta_log/[^/]+",
        "duckdb -c \"COPY (FROM delta_scan('{table}')) TO 'live.parquet'\", for which DuckDB fetches an extension; or "
        "in Python, tierstore.import_table(deltalake.QueryBuilder().register('t', deltalake.DeltaTable('{table}'))"
        ".execute('SELECT * FROM t'), …)",
    ),
    _format(
        "an Iceberg table (metadata)",
        r"metadata/(?:[^/]+\.metadata\.json(?:\.gz)?|version-hint\.text)",
        "duckdb -c \"COPY (FROM iceberg_scan('{table}', allow_moved_paths=true)) TO 'live.parquet'\"; or in Python, "
        "tierstore.import_table(the table's scan().to_arrow(), …) with pyiceberg",
    ),
    _format(
        "a Hudi table (.hoodie)",
        r"\.hoodie/hoodie\.properties",
        "spark.read.format('hudi').load('{table}').write.parquet('live')",
    ),
    _format(
        "a Paimon table (manifest)",
        r"manifest/manifest-list-[^/]+",
        "spark.read.format('paimon').load('{table}').write.parquet('live')",
    ),
    _format(
        "a table of Hive's with transactions (_orc_acid_version)",
        r"(?:base|delta|delete_delta)_[0-9_]+(?:_v[0-9]+)?/_orc_acid_version",
        "INSERT OVERWRITE DIRECTORY 'live' STORED AS PARQUET SELECT … FROM the table, in Hive",
    ),
    _format(
        "a DuckLake table (ducklake-….parquet)",
        rf"ducklake-{_HEX}{{8}}(?:-?{_HEX}{{4}}){{3}}-?{_HEX}{{12}}(?:-delete)?\.parquet",
        "COPY (FROM the table) TO 'live.parquet', in DuckDB with its catalogue attached",
    ),
)
_BESIDE = ("_delta_log", ".hoodie", "metadata", "manifest")  # directories of logs, in that of the table


def reason_of_log(root: Path | PurePosixPath, names: Iterable[PurePosixPath]) -> str | None:
    """Why the files of these `names`, relative to `root`, may not be read as they are; None where they may."""
    for name in names:
        for format in _FORMATS:
            found = format.file.fullmatch(name.as_posix())
            if found is not None:
                table = root / (found["table"] or "")
                return (
                    f"{table} is {format.name}: its log says which files and rows are live, and read as plain files it "
                    f"would give deleted rows back. Write the live rows first: {format.advice.format(table=table)}"
                )
    return None


def log_above(path: Path) -> str | None:
    """The same where `path` lies in the directory of such a table: one of its files, or of its directories."""
    for folder in path.resolve().parents:
        for name in _BESIDE:
            with contextlib.suppress(OSError):
                names = (PurePosixPath(name, one) for one in os.listdir(folder / name))
                if (reason := reason_of_log(folder, names)) is not None:
                    return reason
    return None
