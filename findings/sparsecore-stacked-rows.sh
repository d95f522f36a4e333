#!/usr/bin/env bash
# In JAX's SparseCore layout the rows of stacked tables lie by id modulo the shards, between rows and columns of padding.
#
# Guess: a stacked variable of two tables holds the rows of the first by id and then those of the second, padded at the end.
# What happens: each shard holds every n-th row of the first table, padding up to a multiple of 8 rows, then every n-th of the
# second, and so on; dim is padded to a multiple of 8. The row numbers depend on how many cores trained.
# Why it matters: a checkpoint of the training state holds this array. A reader by row numbers serves other rows for nearly
# every id, and padding (zeros or NaN) for some, and a checkpoint of the same model from another slice differs.
# unshard_and_unstack_tables of the same package gives the tables back; it needs their specs.
# Source: https://github.com/jax-ml/jax-tpu-embedding
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jax-tpu-embedding==0.1.0 numpy==2.4.6

cat > "$work/run.py" <<'PY'
import jax.numpy as jnp
import numpy as np
from jax_tpu_embedding.sparsecore.lib.nn import embedding_spec, table_stacking

ROWS, DIM, CORES = 10, 3, 4


def feature(name):
    table = embedding_spec.TableSpec(
        vocabulary_size=ROWS, embedding_dim=DIM, initializer=lambda *_: None, combiner="mean", name=name,
        optimizer=embedding_spec.SGDOptimizerSpec(learning_rate=0.1),
    )  # fmt: skip
    return embedding_spec.FeatureSpec(table_spec=table, input_shape=(8, 1), output_shape=(8, DIM), name=name)


features = {"user": feature("user"), "item": feature("item")}
table_stacking.stack_tables(features, ["user", "item"], global_device_count=1, num_sc_per_device=CORES, stack_name="both")
specs = {name: each.table_spec for name, each in features.items()}
tables = {name: jnp.tile(jnp.arange(ROWS)[:, None] + start, (1, DIM)) for name, start in (("user", 100), ("item", 200))}
stacked = table_stacking.stack_and_shard_tables(specs, tables, CORES, -1)["both"]
print("shape", stacked.shape)
for shard, rows in enumerate(np.asarray(stacked)[:, :, 0].astype(int)):
    print("shard", shard, " ".join("." if row < 0 else str(row) for row in rows))
print("columns of user 0", np.asarray(stacked)[0, 0].astype(int).tolist())
back = table_stacking.unshard_and_unstack_tables(specs, {"both": stacked}, CORES)
print("back", all(bool((back[name] == tables[name]).all()) for name in tables))
PY

echo "jax-tpu-embedding 0.1.0: where users 100 to 109 and items 200 to 209 lie; a dot is padding"
(cd "$work" && venv/bin/python run.py 2> /dev/null) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
shape (4, 16, 8)
shard 0 100 104 108 . . . . . 200 204 208 . . . . .
shard 1 101 105 109 . . . . . 201 205 209 . . . . .
shard 2 102 106 . . . . . . 202 206 . . . . . .
shard 3 103 107 . . . . . . 203 207 . . . . . .
columns of user 0 [100, 100, 100, -1, -1, -1, -1, -1]
back True
WANT
