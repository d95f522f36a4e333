"""The programs in `tools/` that write snapshots."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tierstore.formats.snapshot.reader import open_snapshot

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
