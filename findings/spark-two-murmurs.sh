#!/usr/bin/env bash
# Spark has two murmur3 hashes of a text: SQL's hash is neither the one of HashingTF nor the one of mmh3.
#
# Guess: hash(text) is murmur3_32 with the seed 42, as the name of its class, Murmur3Hash, and that class's source say, so mmh3.hash(text, 42)
# gives the same number anywhere else.
# What happens: SQL's hash makes a block of its own of each byte beyond the last four, where murmur3 makes one of all of
# them. The two agree where the UTF-8 has a multiple of four bytes, and nowhere else. HashingTF of
# pyspark.ml has had the true one since Spark 3.0 (SPARK-23469).
# Why it matters: who serves what was trained on hash(text) with a murmur3 of their language reads right rows for a quarter
# of the texts, enough for a short test, and other rows for the remaining ones.
# Source: https://issues.apache.org/jira/browse/SPARK-23381
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check pyspark==4.3.0 mmh3==5.3.1 numpy==2.4.6

cat > "$work/run.py" <<'PY'
import mmh3
from pyspark.ml.feature import HashingTF
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
ROWS = 1 << 30
places = HashingTF(numFeatures=ROWS)
for text in ("item", "colour12", "red", "shoes", "item-17", "ü"):
    sql = spark.sql(f"select pmod(hash('{text}'), {ROWS})").first()[0]
    wanted = mmh3.hash(text, 42) % ROWS
    print(len(text.encode()), "bytes: hash", sql == wanted, "HashingTF", places.indexOf(text) == wanted)
spark.stop()
PY

echo "pyspark 4.3.0, mmh3 5.3.1: equal to murmur3_32 with the seed 42"
(cd "$work" && venv/bin/python run.py 2> log) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
4 bytes: hash True HashingTF True
8 bytes: hash True HashingTF True
3 bytes: hash False HashingTF True
5 bytes: hash False HashingTF True
7 bytes: hash False HashingTF True
2 bytes: hash False HashingTF True
WANT
