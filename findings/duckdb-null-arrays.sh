#!/usr/bin/env bash
# DuckDB's Parquet of fixed-size arrays with a null among them cannot be read by PyArrow.
#
# Guess: FLOAT[2] and FLOAT[] give the same Parquet, lists of floats, nulls included; what DuckDB and Polars read back,
# PyArrow reads.
# What happens: for a null array DuckDB writes the levels of as many elements as the array would have, and values for none
# of them. DuckDB and Polars read it right; PyArrow, and what is built upon it, refuses the whole file with
# an error about offsets. FLOAT[] is read by all, and so are arrays without a null.
# Why it matters: FLOAT[n] is the natural type of an embedding, and one item without one makes a day's export unreadable
# for Arrow's readers (Spark's own, pandas', Ray's and most loaders). Casting to FLOAT[] helps.
# Source: https://github.com/duckdb/duckdb/issues/24731, https://github.com/duckdb/duckdb/pull/24899
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check duckdb==2.0.1 pyarrow==26.0.1 polars==2.1.0

cat > "$work/run.py" <<'PY'
import duckdb
import polars
import pyarrow.parquet

rows = "(VALUES (1, [0.5, 1.0]), (2, NULL), (3, [1.5, 2.0])) AS items(id, embedding)"
for kind in ("FLOAT[2]", "FLOAT[]"):
    duckdb.sql(f"COPY (SELECT id, embedding::{kind} AS embedding FROM {rows}) TO 'items.parquet'")
    print(kind, "duckdb", [row[0] for row in duckdb.sql("SELECT embedding FROM 'items.parquet'").fetchall()])
    print(kind, "polars", polars.read_parquet("items.parquet")["embedding"].to_list())
    try:
        print(kind, "pyarrow", pyarrow.parquet.read_table("items.parquet")["embedding"].to_pylist())
    except pyarrow.ArrowInvalid as error:
        print(kind, "pyarrow", error)
PY

echo "duckdb 2.0.1, pyarrow 26.0.1, polars 2.1.0"
(cd "$work" && venv/bin/python run.py) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
FLOAT[2] duckdb [[0.5, 1.0], None, [1.5, 2.0]]
FLOAT[2] polars [[0.5, 1.0], None, [1.5, 2.0]]
FLOAT[2] pyarrow Length spanned by list offsets (5) larger than values array (length 4)
FLOAT[] duckdb [[0.5, 1.0], None, [1.5, 2.0]]
FLOAT[] polars [[0.5, 1.0], None, [1.5, 2.0]]
FLOAT[] pyarrow [[0.5, 1.0], None, [1.5, 2.0]]
WANT
