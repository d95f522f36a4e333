#!/usr/bin/env bash
# Dask turns a column of vectors into text, and long vectors into text with a gap.
#
# Guess: a pandas column of NumPy arrays becomes a Parquet column of lists, as pandas itself writes it.
# What happens: Dask takes a column of objects for strings and calls str() on each array. Parquet then has "[0.5 1. ]", with
# what NumPy's print keeps: eight digits, and of more than 1,000 numbers the first and last three around "...".
# pandas writes the same frame as lists of floats.
# Why it matters: the step from pandas to Dask is one line, and no error is raised. A loader that parses such text back
# gets rounded numbers, or three of the first and of the last. dask.config dataframe.convert-string False keeps the arrays.
# Source: https://github.com/dask/dask/issues/10504, https://github.com/dask/dask/issues/10467
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check 'dask[dataframe]==2026.8.0' pandas==2.3.3 pyarrow==26.0.1 numpy==2.4.6

cat > "$work/run.py" <<'PY'
import dask.dataframe
import numpy as np
import pandas
import pyarrow.parquet

for dim in (2, 1001):
    frame = pandas.DataFrame({"id": [17], "embedding": [np.full(dim, 1 / 3, np.float32)]})
    frame.to_parquet("pandas.parquet")
    dask.dataframe.from_pandas(frame, npartitions=1).to_parquet("dask")
    for name in ("pandas.parquet", "dask/part.0.parquet"):
        column = pyarrow.parquet.ParquetFile(name).read(["embedding"])["embedding"]
        value = column[0].as_py()
        print(dim, name, column.type, value if isinstance(value, str) else f"{len(value)} numbers, {value[0]!r} first")
PY

echo "dask 2026.8.0, pandas 2.3.3"
(cd "$work" && venv/bin/python run.py) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
2 pandas.parquet list<element: float> 2 numbers, 0.3333333432674408 first
2 dask/part.0.parquet large_string [0.33333334 0.33333334]
1001 pandas.parquet list<element: float> 1001 numbers, 0.3333333432674408 first
1001 dask/part.0.parquet large_string [0.33333334 0.33333334 0.33333334 ... 0.33333334 0.33333334 0.33333334]
WANT
