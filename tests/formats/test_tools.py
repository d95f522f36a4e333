"""The programs in `tools/` that write snapshots."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.formats.shards import KEYS, VECTORS, save_hugectr
from tierstore.formats.snapshot import open_snapshot

ROOT = Path(__file__).parents[2]


def run(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / tool), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={"PYTHONPATH": str(ROOT)}
    )


@pytest.mark.parametrize("key", ["int64", "uint64", "string"])
def test_a_random_snapshot_is_as_asked(tmp_path: Path, key: str) -> None:
    result = run(
        "make_snapshot.py",
        tmp_path / "s",
        "--rows",
        "2.5e3",
        "--dim",
        3,
        "--dtype",
        "float16",
        "--key",
        key,
        "--rows-per-shard",
        1000,
    )
    assert result.returncode == 0, result.stderr
    snapshot = open_snapshot(tmp_path / "s")
    assert [shard.rows for shard in snapshot.manifest.table("item").shards] == [1000, 1000, 500]
    keys = np.concatenate([batch.keys for shard in range(3) for batch in snapshot.batches("item", shard)])
    assert len(np.unique(keys)) == 2500


def test_a_hugectr_folder_becomes_a_table(tmp_path: Path) -> None:
    folder = tmp_path / save_hugectr()(tmp_path)
    result = run(
        "convert_hugectr.py",
        tmp_path / "s",
        "--model",
        "ctr",
        "--version",
        5,
        "--table",
        f"item={folder}:2",
        "--combiner",
        "sum",
    )
    assert result.returncode == 0, result.stderr
    (batch,) = open_snapshot(tmp_path / "s").batches("item", 0)
    assert np.array_equal(batch.keys, KEYS)
    assert np.array_equal(batch.vectors, VECTORS)


def test_a_hugectr_folder_of_another_dim_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / save_hugectr()(tmp_path)
    result = run("convert_hugectr.py", tmp_path / "s", "--model", "ctr", "--version", 5, "--table", f"item={folder}:3")
    assert result.returncode == 1
    assert "40 bytes of int64 keys need 60 bytes of vectors of 3 float32, came 40; is dim right?" in result.stderr
    assert not (tmp_path / "s" / "snapshot.json").exists()
