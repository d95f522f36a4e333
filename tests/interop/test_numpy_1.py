"""The client beside tritonclient 2.50, which wants NumPy 1: both in one process, and the same rows."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tierstore.service.server import ServerThread

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".clients/triton/bin/python"


@pytest.mark.skipif(not PYTHON.exists(), reason="no environment .clients/triton: make client-venvs")
def test_the_client_under_numpy_1(tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "data", host_budget="4MiB") as store:
        store.load_snapshot(scenes.write_snapshot(tmp_path))
        program = Path(__file__).with_name("run_numpy_1.py")
        with ServerThread(store) as server:
            done = subprocess.run(
                [PYTHON, program, server.url], env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer.pop("numpy").startswith("1.26.")
    there = scenes.vectors("item", 0, [1, 7])
    rows = np.concatenate([there, np.zeros((1, there.shape[1]), np.float32)])
    assert answer == {
        "found": [True, True, False],
        "same as tritonclient's": True,
        "rows": rows.tolist(),
        "halves": ["float16", rows.astype(np.float16).astype(np.float32).tolist()],
        "bags": [there.sum(0).tolist(), rows[2].tolist()],
        "many": {"item_id": rows[1:2].tolist(), "clicked": [there[0].tolist(), (there[1] / 2).tolist()]},
    }
