"""What exports from older releases of LightGBM, XGBoost and their converters, run in an environment of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".trainers"
RUNS = ["tests/predict/test_join_inputs.py", "tests/predict/test_runtime.py"]
MUST_PASS = {"test_lightgbm[False]", "test_lightgbm[True]", "test_xgboost"}  # not be skipped


@pytest.mark.skipif(not (VENV / ".installed").exists(), reason="older trainers are not installed: make older-trainers")
def test_exporters_with_older_releases_and_the_oldest_onnx_that_is_supported() -> None:
    torch = [] if not list(VENV.glob("lib/*/site-packages/torch")) else ["tests/torch/test_export.py"]
    done = subprocess.run(
        [VENV / "bin/python", "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *RUNS, *torch],
        cwd=ROOT, capture_output=True, text=True, timeout=590, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = {line.rpartition("::")[2] for line in done.stdout.splitlines() if line.startswith("PASSED")}
    assert passed >= MUST_PASS, done.stdout[-6000:]
