"""Builds as tasks of Spark and of Ray: what their workers sort, with one of them killed and one that fails, is what is served."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.ingest.engine_job import PARTITIONS, ROWS, vectors

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / ".clients/engines"
pytestmark = pytest.mark.thorough


def run(engine: str, where: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (where / "marks").mkdir(exist_ok=True)
    program = str(ROOT / "tests/ingest/engine_job.py")
    places = [str(where / name) for name in ("out", "template", "marks")]
    paths = os.pathsep.join([str(ROOT), str(ENGINES)])
    return subprocess.run(
        [sys.executable, program, engine, *places, *more],
        env={**os.environ, "PYTHONPATH": paths, "PYSPARK_PYTHON": sys.executable, "RAY_DATA_DISABLE_PROGRESS_BARS": "1", "RAY_raylet_start_wait_time_s": "240"},
        cwd=where, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip


def marks(where: Path) -> list[str]:
    return sorted(path.name for path in (where / "marks").iterdir())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["spark", "ray"])
def test_a_task_is_killed_a_job_fails_and_the_next_one_goes_on(engine: str, tmp_path: Path) -> None:
    if not (ENGINES / ("pyspark" if engine == "spark" else "ray")).is_dir():
        pytest.skip(f"no {engine} in .clients/engines: make engines")
    if engine == "spark" and shutil.which("java") is None:
        pytest.skip("no java on the PATH")
    with tierstore.SnapshotWriter(tmp_path / "template", model="shop", version=1) as template:
        template.table("item", dim=4)
    first = run(engine, tmp_path, "fails")
    assert first.returncode != 0
    assert "this task always fails" in first.stderr + first.stdout
    others = range(PARTITIONS - 1)
    assert marks(tmp_path) == ["killed", *(f"sorted-{i}" for i in others)]
    build = tierstore.begin_build(tmp_path / "template", tmp_path / "out", partitions=PARTITIONS)
    assert build.pending("item") == [PARTITIONS - 1]
    shutil.rmtree(tmp_path / "marks")
    (tmp_path / "marks").mkdir()
    (tmp_path / "marks/killed").touch()
    with tierstore.open(tmp_path / "no", host_budget="4MiB") as store, pytest.raises(tierstore.SnapshotError):
        store.load_snapshot(tmp_path / "out")

    second = run(engine, tmp_path)
    assert second.returncode == 0, second.stderr[-4000:]
    assert marks(tmp_path) == ["killed", f"sorted-{PARTITIONS - 1}"]
    with tierstore.open(tmp_path / "data", host_budget="4MiB", load_workers=1) as store:
        store.load_snapshot(tmp_path / "out")
        keys = np.arange(ROWS)
        rows, found = store.model("shop").lookup("item", keys, return_found=True)
        assert found.all()
        np.testing.assert_array_equal(rows, vectors(keys))
        assert store.verify().ok
