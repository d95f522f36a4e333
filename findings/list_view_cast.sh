#!/usr/bin/env bash
# The guess: casting an Arrow column of list views to lists (`cast(pa.list_(…))`, `cast(pa.large_list(…))`) gives the same
#   lists, or an error where the type does not fit.
# What happens: where the views do not lie in the order of their numbers (which is what views are for: after a sort, a filter
#   or a dedup nothing is copied), the cast raises nothing and gives an array whose offsets go backwards. `validate(full=True)`
#   says so; nobody calls it. The first list reads as empty or as another row's numbers. `pc.list_flatten` is right.
# Why it matters: engines hand vectors over as list views (DuckDB's `arrow_output_list_view`, Velox), and a reader of embeddings
#   that turns them into lists first serves the vector of one key under another.
# Source: https://arrow.apache.org/docs/format/Columnar.html#listview-layout (offsets may be out of order)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check pyarrow==26.0.1
venv/bin/python - <<'PYTHON'
import pyarrow as pa
import pyarrow.compute as pc

print("pyarrow", pa.__version__)
numbers = pa.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
views = pa.ListViewArray.from_arrays(pa.array([4, 0, 2], pa.int32()), pa.array([2, 2, 2], pa.int32()), numbers)
wanted = [[5.0, 6.0], [1.0, 2.0], [3.0, 4.0]]
views.validate(full=True)
assert views.to_pylist() == wanted
assert pc.list_flatten(views).to_pylist() == [5.0, 6.0, 1.0, 2.0, 3.0, 4.0]
for kind in (pa.list_(pa.float64()), pa.large_list(pa.float64())):
    lists = views.cast(kind)  # raises nothing
    try:
        lists.validate(full=True)
    except pa.ArrowInvalid as error:
        print(f"cast to {kind}: no error, and the result is invalid: {error}")
    else:
        raise SystemExit(f"changed: the cast to {kind} is valid now: {lists.to_pylist()}")
    first = lists[0].as_py()
    print(f"  its first list reads {first}, expected {wanted[0]}")
    assert first != wanted[0]
PYTHON
