#!/usr/bin/env bash
# Signed and unsigned 64-bit ids in one column become floats in DuckDB's Parquet, and bytes that others cannot read in Polars'.
#
# Guess: joining a column of UBIGINT ids (hashes) with one of BIGINT ids keeps every bit, or is refused.
# What happens: DuckDB's common type is HUGEINT, exact in the engine, which COPY writes to Parquet as DOUBLE. Its sum() of
# BIGINT is HUGEINT too. All ids beyond 2**53 are rounded there, and neighbours become equal. Polars' relaxed concatenation
# makes Int128 (before release 2 it was Float64), which is exact, but whose Parquet DuckDB reads as a BLOB and
# PyArrow not at all. PyArrow's permissive concatenation makes int64.
# Why it matters: a catalogue of hashed ids with numbered ones beside them is usual. After such a step many ids are those of
# other items, and nothing fails until a look-up misses.
# Source: https://duckdb.org/docs/stable/data/parquet/overview, https://docs.pola.rs/api/python/stable/reference/api/polars.concat.html
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check duckdb==2.0.1 pyarrow==26.0.1 polars==2.1.0

cat > "$work/run.py" <<'PY'
import duckdb
import polars
import pyarrow
import pyarrow.parquet

hashed, numbered = 2**53 + 1, 7
query = f"SELECT {hashed}::UBIGINT AS hashed, NULL::BIGINT AS numbered UNION ALL SELECT NULL, {numbered}::BIGINT"
both = duckdb.sql(f"SELECT coalesce(hashed, numbered) AS id FROM ({query})")
print("duckdb", both.types[0], both.fetchall())
duckdb.sql(f"COPY (SELECT coalesce(hashed, numbered) AS id FROM ({query})) TO 'ids.parquet'")
ids = pyarrow.parquet.read_table("ids.parquet")["id"]
print("duckdb, Parquet", ids.type, [int(i) for i in ids.to_pylist()])

unsigned, signed = polars.Series("id", [hashed], dtype=polars.UInt64), polars.Series("id", [numbered], dtype=polars.Int64)
ids = polars.concat([unsigned.to_frame(), signed.to_frame()], how="vertical_relaxed")["id"]
print("polars", ids.dtype, ids.to_list())
ids.to_frame().write_parquet("polars.parquet")
print("polars, Parquet read by duckdb", duckdb.sql("FROM 'polars.parquet'").types[0])
try:
    print("polars, Parquet read by pyarrow", pyarrow.parquet.read_table("polars.parquet")["id"].type)
except NotImplementedError as error:
    print("polars, Parquet read by pyarrow:", error)

tables = [pyarrow.table({"id": pyarrow.array([i], kind)}) for i, kind in ((hashed, pyarrow.uint64()), (numbered, pyarrow.int64()))]
ids = pyarrow.concat_tables(tables, promote_options="permissive")["id"]
print("pyarrow", ids.type, ids.to_pylist())
PY

echo "duckdb 2.0.1, polars 2.1.0, pyarrow 26.0.1: ids 9007199254740993 and 7"
(cd "$work" && venv/bin/python run.py) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
duckdb HUGEINT [(9007199254740993,), (7,)]
duckdb, Parquet double [9007199254740992, 7]
polars Int128 [9007199254740993, 7]
polars, Parquet read by duckdb BLOB
polars, Parquet read by pyarrow: Integers with more than 64 bits not implemented
pyarrow int64 [9007199254740993, 7]
WANT
