"""The programs that refusals name for what only a large package reads: run with the package, they give its rows."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.imports.test_tables import rows_of
from tierstore.errors import SnapshotError
from tierstore.imports.tables import import_table

TENSORFLOW = Path(__file__).parents[2] / ".clients/tfs/bin/python"
# a Python that has Orbax and JAX, which may be another than that of the tests
ORBAX = os.environ.get("ORBAX_PYTHON") or (sys.executable if find_spec("orbax") and find_spec("jax") else None)
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
# on four devices, of which the program that reads it has one: a table in two types beside what is no array of rows
WRITE_WITH_ORBAX = """
import jax, numpy, orbax.checkpoint as orbax
devices = jax.sharding.Mesh(numpy.array(jax.devices()).reshape(4), ("rows",))
by_row = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("rows"))
rows = numpy.arange(12, dtype="f4").reshape(4, 3)
float32, bfloat16 = (jax.device_put(rows.astype(dtype), by_row) for dtype in ("float32", jax.numpy.bfloat16))
state = {"params": {"item": {"embedding": float32}, "towers": [{"kernel": -float32}, {"kernel": bfloat16}]}, "step": 7, "note": "text"}
orbax.PyTreeCheckpointer().save(path / "alone", state)
orbax.PyTreeCheckpointer(use_ocdbt=False).save(path / "files", state)
with orbax.CheckpointManager(path / "managed") as manager:
    manager.save(7, args=orbax.args.PyTreeSave(state))
"""


def program(path: Path, out: str) -> str:
    """The program of the refusal of a file, which is made for it; it writes the array `out`."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(b"")
    text = refusal(path)
    path.unlink()
    return text.replace("item.npz", out)


def refusal(path: Path) -> str:
    """The program that the refusal of this path names."""
    with pytest.raises(SnapshotError, match="which is not read") as refused:
        import_table(path, model="ctr", table="item", out=path.parent / "s")
    text = str(refused.value).partition("which is: ")[2].partition(", with ")[0]
    assert "'item.npz'" in text
    return text


def imported(where: Path, name: str, of: str = "") -> dict[int, list[float]]:
    out = where / "snapshots" / f"{of}{name}"
    import_table(where / f"{name}.npz", model="ctr", table="item", out=out)
    return rows_of(out)


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


def with_orbax(text: str, where: Path, devices: int) -> subprocess.CompletedProcess[str]:
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [str(ORBAX), "-c", text]
    return subprocess.run(
        command, cwd=where, env=os.environ | environment, timeout=240, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(ORBAX is None, reason="Orbax is not installed: pip install 'jax[cpu]' orbax-checkpoint")
def test_tables_of_orbax_on_fewer_devices_than_they_were_saved_on(tmp_path: Path) -> None:
    wrote = with_orbax(f"import pathlib; path = pathlib.Path({str(tmp_path)!r}){WRITE_WITH_ORBAX}", tmp_path, devices=4)
    assert wrote.returncode == 0, wrote.stderr
    by_number = dict(enumerate(ROWS.tolist()))
    for checkpoint in ("alone", "files", "managed"):
        text = refusal(tmp_path / checkpoint)
        both = [
            text.replace("item.npz", "float32.npz").replace("NAME", "params.item.embedding"),
            text.replace("item.npz", "bfloat16.npz").replace("NAME", "params.towers.1.kernel").replace("=rows)", "=rows.astype('float32'))"),
        ]  # fmt: skip
        read = with_orbax("\n".join(both), tmp_path, devices=1)
        assert read.returncode == 0, read.stderr
        found = {name: imported(tmp_path, name, checkpoint) for name in ("float32", "bfloat16")}
        assert found == {"float32": by_number, "bfloat16": by_number}
    assert "not enough values" in with_orbax(text, tmp_path, devices=1).stderr, "NAME is the name of no array"
