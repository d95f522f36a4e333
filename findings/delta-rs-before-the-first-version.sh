#!/usr/bin/env bash
# delta-rs answers a time before a Delta table existed with the table's oldest version, and says nothing.
#
# Guess: `load_as_version` of a moment before the first commit is an error, as Delta's own `TIMESTAMP AS OF` in Spark is
# (it names the earliest time that there is); or the table is empty then.
# What happens: it loads the oldest version of the log. After log files of old versions were cleaned up, or after
# a table was copied (a version's time is the modification time of its file in the log, which a copy makes anew), the
# oldest may be much younger than the moment that was asked for.
# Why it matters: who trains and serves as of a time, so that no later event leaks into an example, or goes back to the
# rows of before an incident, gets rows from after it. `table.version()` and the time of that file tell.
# Source: https://delta-io.github.io/delta-rs/usage/loading-table/#time-travel,
# https://github.com/delta-io/delta/blob/master/PROTOCOL.md#commit-files
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check deltalake==1.6.6 pyarrow==26.0.1

cat > "$work/run.py" <<'PY'
import os
import shutil
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import deltalake
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

where = Path(sys.argv[1]) / "items"
for key in (1, 2):
    write_deltalake(where, pa.table({"item_id": [key]}), mode="append")
print("deltalake", deltalake.__version__)


def at(table, moment):
    opened = DeltaTable(table)
    opened.load_as_version(moment)
    return opened.version(), sorted(pa.table(opened.scan())["item_id"].to_pylist())


long_ago = at(where, datetime(2001, 1, 1, tzinfo=UTC))
print("a table of today as of 2001: version", long_ago[0], "with keys", long_ago[1])

now = datetime.now(UTC)
for version, days in ((0, 20), (1, 10)):  # as if the commits were of then
    then = (now - timedelta(days=days)).timestamp()
    os.utime(where / f"_delta_log/{version:020}.json", (then, then))
moment = now - timedelta(days=15)
own = at(where, moment)
copy = Path(sys.argv[1]) / "copy"
shutil.copytree(where, copy, copy_function=shutil.copyfile)
for version in (0, 1):  # a copy has the time of the copying
    assert (copy / f"_delta_log/{version:020}.json").stat().st_mtime > moment.timestamp()
copied = at(copy, now - timedelta(days=5))
print("15 days ago, between its two commits: version", own[0])
print("5 days ago, both commits are older: of the table version", at(where, now - timedelta(days=5))[0], "- of its copy version", copied[0])
if not (long_ago == (0, [1]) and own == (0, [1]) and at(where, now - timedelta(days=5))[0] == 1 and copied == (0, [1])):
    raise SystemExit("this has changed")
PY
"$work/venv/bin/python" "$work/run.py" "$work"
