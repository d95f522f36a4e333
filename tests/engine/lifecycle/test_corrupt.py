"""Whichever file of a data directory is damaged, no row is wrong and everything else serves.

`tools/corrupt_test.py` does the work and runs for as long as one likes; CORRUPT_CASES makes this test longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import corrupt_test

ROOT = Path(__file__).parents[3]
CASES = int(os.environ.get("CORRUPT_CASES", 4))


@pytest.mark.thorough
def test_no_damaged_file_makes_a_row_wrong_or_keeps_another_model_from_serving() -> None:
    """In a process of its own: it forks, which is only safe where nothing has started threads."""
    command = [sys.executable, "-m", "tools.corrupt_test", "--cases", str(CASES), "--seed", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases" in done.stdout


def test_every_file_of_a_data_directory_has_a_kind() -> None:
    paths = {
        "LOCK": "LOCK",
        "models/ctr/log/00000000000000000003-0123456789abcdef.arrow": "log entry",
        "models/ctr/2/version.json": "version.json",
        "models/ctr/2/db/base/base-item-0000.sealed": "db/base",
        "models/ctr/2/db/MANIFEST-000004": "db/MANIFEST",
        "models/ctr/2/db/000012.sst": "db/*.sst",
        "models/ctr/2/db/changed.keys": "db/changed.keys",
        "models/ctr/2.1/dense-loaded.onnx": "dense-loaded.onnx",
        "models/ctr/state.json": "state.json",
    }
    assert {path: corrupt_test.kind_of(path) for path in paths} == paths
