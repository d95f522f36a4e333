"""The programs that refusals name for what only a large package reads: run with the package, they give its rows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.imports.test_tables import rows_of
from tierstore.errors import SnapshotError
from tierstore.imports.tables import import_table

TENSORFLOW = Path(__file__).parents[2] / ".clients/tfs/bin/python"
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
KEYS = [70, 80, 90, 100]
# variables, a hash table, and tensors by DeepRec's names of a table in two partitions
WRITE_WITH_TENSORFLOW = """
import numpy, tensorflow as tf
rows, keys = numpy.arange(12, dtype="f4").reshape(4, 3), numpy.array([70, 80, 90, 100], "i8")
module = tf.Module()
module.item = tf.Variable(rows)
module.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, tf.zeros(3))
module.table.insert(keys, rows)
tf.train.Checkpoint(module=module).write("checkpoint-1")
tf.saved_model.save(module, "saved")
parts = {f"emb/part_{i}-{what}": of[2 * i : 2 * i + 2] for i in (0, 1) for what, of in (("keys", keys), ("values", rows))}
tf.raw_ops.SaveV2(prefix="deeprec", tensor_names=list(parts), shape_and_slices=[""] * 4, tensors=list(parts.values()))
"""
VARIABLE, TABLE = "item/.ATTRIBUTES/VARIABLE_VALUE", "module/table/.ATTRIBUTES/table"
PARTS = "numpy.concatenate([checkpoint.get_tensor(f'emb/part_{i}-%s') for i in range(2)])"


def program(path: Path, out: str) -> str:
    """The program of the refusal of a file, which is made for it; it writes the array `out`."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(b"")
    with pytest.raises(SnapshotError, match="which is not read") as refused:
        import_table(path, model="ctr", table="item", out=path.parent / "s")
    path.unlink()
    text = str(refused.value).partition("which is: ")[2].partition(", with ")[0]
    assert "'item.npz'" in text
    return text.replace("item.npz", out)


def imported(where: Path, name: str) -> dict[int, list[float]]:
    import_table(where / f"{name}.npz", model="ctr", table="item", out=where / "snapshots" / name)
    return rows_of(where / "snapshots" / name)


@pytest.mark.skipif(not TENSORFLOW.exists(), reason="TensorFlow is not installed: make client-venvs")
def test_tables_of_tensorflow(tmp_path: Path) -> None:
    checkpoint, saved = tmp_path / "checkpoint-1.index", tmp_path / "saved/saved_model.pb"
    deeprec = tmp_path / "deeprec.data-00000-of-00001"
    programs = [
        program(checkpoint, "variable.npz").replace("NAME", f"module/{VARIABLE}"),
        program(saved, "saved.npz").replace("NAME", VARIABLE),
        program(checkpoint, "table.npz").replace("vectors=", f"keys=checkpoint.get_tensor('{TABLE}-keys'), vectors=").replace("NAME", f"{TABLE}-values"),
        program(deeprec, "parts.npz").replace("vectors=checkpoint.get_tensor('NAME')", f"keys={PARTS % 'keys'}, vectors={PARTS % 'values'}"),
    ]  # fmt: skip
    text = "\n".join([WRITE_WITH_TENSORFLOW, *programs])
    subprocess.run([TENSORFLOW, "-c", text], cwd=tmp_path, check=True, timeout=240, capture_output=True)
    by_number, by_key = dict(enumerate(ROWS.tolist())), dict(zip(KEYS, ROWS.tolist(), strict=True))
    found = {name: imported(tmp_path, name) for name in ("variable", "saved", "table", "parts")}
    assert found == {"variable": by_number, "saved": by_number, "table": by_key, "parts": by_key}
