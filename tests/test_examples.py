"""Each program in `examples/` runs in an empty directory, and every value that it serves is checked by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_types import mypy
from tierstore.config import ENV_PREFIX

ROOT = Path(__file__).parents[1]
NEEDS = {
    "parquet_to_served": (),
    "hps_to_served": ("tritonclient.http",),
    "pytorch_with_deltas": ("torch", "onnxscript", "onnxruntime"),
    "lightgbm_with_embeddings": ("lightgbm", "onnxmltools", "onnxruntime"),
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == NEEDS.keys()


@pytest.mark.parametrize("name", NEEDS)
def test_an_example(tmp_path: Path, name: str) -> None:
    for needed in NEEDS[name]:
        pytest.importorskip(needed, reason=f"{needed} is not installed: make trainers")
    env = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(ROOT), "TIERSTORE_DRAIN_S": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "served" in done.stdout


def test_a_type_checker_has_nothing_to_say_of_them(tmp_path: Path) -> None:
    others = ("pyarrow", "torch", "lightgbm", "onnxmltools", "tritonclient")
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\nignore_missing_imports = true\n" for name in others)
    lines = mypy(tmp_path, *map(str, sorted((ROOT / "examples").glob("*.py"))), more=skipped)
    assert lines[-1].startswith("Success"), "\n".join(lines)
