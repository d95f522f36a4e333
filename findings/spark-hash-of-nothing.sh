#!/usr/bin/env bash
# Spark's hash and xxhash64 of a null are the seed, 42, and the same id hashes otherwise as int, as long and as text.
#
# Guess: hash(null) is null, as nearly all functions of SQL have it, so rows without a category have no row number; and an
# id has one hash, whether its column is an int or a long.
# What happens: a null leaves the hash as it was, which is the seed, 42. pmod(hash(x), n) of a missing category is row 42
# modulo n, which some category has too, and a null in one of several columns vanishes: hash('a', null) is hash('a').
# An int is hashed by four bytes and a long by eight, so a column that a reader widens gets other rows throughout.
# Why it matters: examples without a category train the row of another one. Who serves the table has to hash by the width
# of the column that was trained on, not by the width of the request's ids, and to look up row 42 for a missing one.
# Source: https://github.com/apache/spark/blob/master/sql/catalyst/src/main/scala/org/apache/spark/sql/catalyst/expressions/hash.scala
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pyspark==4.3.0

cat > "$work/run.py" <<'PY'
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
for what in (
    "hash(null)", "xxhash64(null)", "hash('a', null) = hash('a')", "hash(null, 'a') = hash('a')",
    "hash(17)", "hash(17L)", "hash('17')", "xxhash64(17)", "xxhash64(17L)", "hash(17) = hash(cast(17 as smallint))",
):  # fmt: skip
    print(what, "is", spark.sql(f"select {what}").first()[0])
spark.stop()
PY

echo "pyspark 4.3.0"
(cd "$work" && venv/bin/python run.py 2> log) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
hash(null) is 42
xxhash64(null) is 42
hash('a', null) = hash('a') is True
hash(null, 'a') = hash('a') is True
hash(17) is -1355542311
hash(17L) is 1546268258
hash('17') is 1970338662
xxhash64(17) is 5610435394499596547
xxhash64(17L) is 5840989680794618359
hash(17) = hash(cast(17 as smallint)) is True
WANT
