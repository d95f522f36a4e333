"""The programs that refusals name for what only a large package reads: run with the package, they give its rows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.imports.test_tables import rows_of
from tierstore.errors import SnapshotError
from tierstore.imports.tables import import_table

TENSORFLOW = Path(__file__).parents[2] / ".clients/tfs/bin/python"
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
MADE_BY_TENSORFLOW = """
import numpy, sys, tensorflow as tf
rows = numpy.arange(12, dtype="f4").reshape(4, 3)
module = tf.Module()
module.item = tf.Variable(rows)
module.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, tf.zeros(3))
module.table.insert(tf.constant([70, 80, 90, 100], tf.int64), rows)
tf.train.Checkpoint(module=module).write(sys.argv[1] + "/checkpoint-1")
tf.saved_model.save(module, sys.argv[1] + "/saved")
parts = [rows[:2], rows[2:]]
tf.raw_ops.SaveV2(prefix=sys.argv[1] + "/deeprec", tensor_names=["emb/part_%d-%s" % (i, what) for i in (0, 1) for what in ("keys", "values")],
    shape_and_slices=[""] * 4, tensors=[one for i in (0, 1) for one in (numpy.array([7, 8], "i8") + 10 * i, parts[i])])
"""


def program(path: Path, name: str, vectors: str = "") -> str:
    """The program of a refusal, for the table `name`."""
    with pytest.raises(SnapshotError, match="which is not read") as refused:
        import_table(path, model="ctr", table="item", out=path.parent / "s")
    text = str(refused.value).partition("which is: ")[2].partition(", with ")[0].replace("NAME", name)
    return text.replace("'item.npz', ", f"{str(path.parent / 'item.npz')!r}, ")


def rows_by(python: str, text: str, path: Path) -> dict[int, list[float]]:
    subprocess.run([python, "-c", text], check=True, timeout=240, capture_output=True)
    import_table(path.parent / "item.npz", model="ctr", table="item", out=path.parent / "s")
    found = rows_of(path.parent / "s")
    shutil.rmtree(path.parent / "s")
    return found


@pytest.fixture(scope="module")
def tensorflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not TENSORFLOW.exists():
        pytest.skip("TensorFlow is not installed: make client-venvs")
    where = tmp_path_factory.mktemp("tensorflow")
    subprocess.run([TENSORFLOW, "-c", MADE_BY_TENSORFLOW, where], check=True, timeout=240, capture_output=True)
    return where


@pytest.mark.parametrize("form", ["checkpoint-1.index", "saved"])
def test_a_variable_of_tensorflow(tensorflow: Path, form: str) -> None:
    name = "module/item/.ATTRIBUTES/VARIABLE_VALUE" if form != "saved" else "item/.ATTRIBUTES/VARIABLE_VALUE"
    path = tensorflow / form
    assert rows_by(str(TENSORFLOW), program(path, name), path) == dict(enumerate(ROWS.tolist()))


def test_a_table_of_tensorflow_with_keys_of_its_own(tensorflow: Path) -> None:
    path = tensorflow / "checkpoint-1.index"
    name = "module/table/.ATTRIBUTES/table"
    with_keys = program(path, f"{name}-values").replace(
        "vectors=", f"keys=checkpoint.get_tensor('{name}-keys'), vectors="
    )
    assert rows_by(str(TENSORFLOW), with_keys, path) == dict(zip((70, 80, 90, 100), ROWS.tolist(), strict=True))
    parts = "numpy.concatenate([checkpoint.get_tensor(f'emb/part_{i}-%s') for i in range(2)])"
    text = program(tensorflow / "deeprec.index", "").partition("numpy.savez")[0]
    text += f"numpy.savez({str(tensorflow / 'item.npz')!r}, keys={parts % 'keys'}, vectors={parts % 'values'})"
    assert rows_by(str(TENSORFLOW), text, path) == dict(zip((7, 8, 17, 18), ROWS.tolist(), strict=True))


def test_a_table_of_orbax(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="JAX, with which Orbax runs, is not installed")
    orbax = pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed")
    path = tmp_path / "checkpoint"
    orbax.PyTreeCheckpointer().save(path, {"params": {"item": ROWS}})
    text = program(path, "params").replace("['params']", "['params']['item']")
    assert rows_by(sys.executable, text, path) == dict(enumerate(ROWS.tolist()))
