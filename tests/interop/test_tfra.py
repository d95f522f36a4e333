"""TFRA's dynamic embeddings, by the program of docs/migrate-tfra.md in an environment of TFRA's: each row is served, and follows by deltas."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.test_docs import blocks

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".bench/tfra"
HAS_WRITERS = bool([*VENV.glob("lib/python3*/site-packages/pyarrow")])  # of an earlier `make bench-tfra` it lacks them


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_WRITERS, reason="TFRA is not installed with what writers need: make bench-tfra")
def test_a_dynamic_embedding_is_written_and_followed(tmp_path: Path) -> None:
    ((_, program),) = blocks("docs/migrate-tfra.md", "python")
    (tmp_path / "deltas").mkdir()
    done = subprocess.run(
        [VENV / "bin/python", Path(__file__).with_name("run_tfra.py")], input=program, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "changed what was looked up: True numpy 1." in done.stdout
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "snapshots/1")
        for seq in (1, 2):
            store.apply_delta(tmp_path / f"deltas/{seq}.arrow")
        now = np.load(tmp_path / "now.npz")
        assert {-3, 1 << 62} < set(now["keys"].tolist())
        rows, found = store.model("ctr").lookup("item", now["keys"], return_found=True)
        assert found.all()
        np.testing.assert_array_equal(rows, now["rows"])
