#!/usr/bin/env bash
# Dask's to_parquet replaces the parts that it writes and leaves those of the last run beside them.
#
# Guess: without append, writing to a folder either replaces what is there or is refused, as Spark and pandas do.
# What happens: with the defaults (append and overwrite both false) part.0 to part.n are written over, and parts of a larger
# run before stay. The folder reads as one table of today's first rows and yesterday's last ones.
# Why it matters: a catalogue that shrinks, or is written with fewer partitions, keeps rows that are gone, and ids in both are
# there twice with old and new embeddings. The number of rows looks plausible. overwrite=True, or a folder a day, helps.
# Source: https://github.com/dask/dask/issues/6824
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check 'dask[dataframe]==2026.8.0' pandas==2.3.3 pyarrow==26.0.1

cat > "$work/run.py" <<'PY'
import dask.dataframe
import pandas
import pyarrow.parquet


def write(rows, parts):
    frame = pandas.DataFrame({"id": range(len(rows)), "day": rows})
    dask.dataframe.from_pandas(frame, npartitions=parts).to_parquet("items", write_index=False)


write(["yesterday"] * 8, 4)
write(["today"] * 4, 2)
table = pyarrow.parquet.read_table("items")
for row in table.to_pylist():
    print(row["id"], row["day"])
PY

echo "dask 2026.8.0: four rows written over eight"
(cd "$work" && venv/bin/python run.py) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
0 today
1 today
2 today
3 today
4 yesterday
5 yesterday
6 yesterday
7 yesterday
WANT
