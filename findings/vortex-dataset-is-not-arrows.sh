#!/usr/bin/env bash
# Vortex's dataset is an instance of PyArrow's Dataset, and refuses arguments and orders that PyArrow's takes.
#
# Guess: what passes isinstance(…, pyarrow.dataset.Dataset) can be scanned with the options of that class, and take()
# gives the rows of any indices, in their order and as often as they are named.
# What happens: VortexDataset overrides the methods of the class. A scan with a read-ahead is a ValueError, and so is a
# table or a head with a batch size; take() wants indices that ascend strictly, so neither a shuffled batch nor one that
# names a row twice; sort_by is not there. Texts come back as string_view.
# Why it matters: loaders and training loops branch on isinstance and tune the read-ahead; rows of embeddings are taken
# by shuffled indices with repetitions. Both fail only once somebody hands in a Vortex file. Scan without options, and
# take sorted distinct indices.
# Source: https://github.com/vortex-data/vortex/blob/develop/vortex-python/python/vortex/dataset.py
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check vortex-data==0.93.0 pyarrow==26.0.1

cat > "$work/run.py" <<'PY'
import pyarrow as pa
import pyarrow.dataset as ds
import vortex

vectors = pa.array([[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]], pa.list_(pa.float32(), 2))
table = pa.table({"id": pa.array(["a", "b", "c"]), "embedding": vectors})
vortex.io.write(vortex.array(table), "items.vortex")
for dataset in (ds.dataset(table), vortex.open("items.vortex").to_dataset()):
    print(type(dataset).__name__, isinstance(dataset, ds.Dataset), dataset.schema.field("id").type)
    calls = {
        "scanner()": lambda: dataset.scanner().to_table().num_rows,
        "scanner(batch_readahead=2)": lambda: dataset.scanner(batch_readahead=2).to_table().num_rows,
        "scanner(batch_size=2)": lambda: dataset.scanner(batch_size=2).to_table().num_rows,
        "head(2, batch_size=2)": lambda: dataset.head(2, batch_size=2).num_rows,
        "take([0, 2])": lambda: dataset.take(pa.array([0, 2]))["id"].to_pylist(),
        "take([2, 0])": lambda: dataset.take(pa.array([2, 0]))["id"].to_pylist(),
        "take([1, 1])": lambda: dataset.take(pa.array([1, 1]))["id"].to_pylist(),
        "sort_by": lambda: dataset.sort_by("id").to_table().num_rows,
    }
    for name, call in calls.items():
        try:
            print("  " + name, call())
        except Exception as error:
            print("  " + name, type(error).__name__, str(error).splitlines()[0])
PY

echo "vortex-data 0.93.0, pyarrow 26.0.1"
(cd "$work" && venv/bin/python run.py) | tee "$work/seen"
diff "$work/seen" - <<'WANT'
InMemoryDataset True string
  scanner() 3
  scanner(batch_readahead=2) 3
  scanner(batch_size=2) 3
  head(2, batch_size=2) 2
  take([0, 2]) ['a', 'c']
  take([2, 0]) ['c', 'a']
  take([1, 1]) ['b', 'b']
  sort_by 3
VortexDataset True string_view
  scanner() 3
  scanner(batch_readahead=2) ValueError batch_readahead not supported
  scanner(batch_size=2) ValueError batch_size is not supported
  head(2, batch_size=2) ValueError batch_size is not supported
  take([0, 2]) ['a', 'c']
  take([2, 0]) RuntimeError buffer values must be strictly increasing at positions 0 and 1
  take([1, 1]) RuntimeError buffer values must be strictly increasing at positions 0 and 1
  sort_by NotImplementedError sort_by
WANT
