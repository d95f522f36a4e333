"""Feast, in an environment of its own, in front of a real service: materializes, writes, reads, applies and tears down."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

import tierstore
from tests.engine.quick_build import in_process as in_process_loads
from tierstore.service.server import ServerThread

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENV = ROOT / ".clients/feast"
PROGRAM = HERE / "run_feast.py"
CASES = [
    node.name.removeprefix("case_")
    for node in ast.parse(PROGRAM.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]

TIMEOUT_S = 900.0  # Feast imports for ten seconds of processor time

pytestmark = [
    pytest.mark.skipif(not (VENV / ".installed").exists(), reason="no environment .clients/feast: make client-venvs"),
    pytest.mark.timeout(TIMEOUT_S + 60),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Of each case the traceback with which it failed, or None. The service cannot read the snapshots of views: they are sent."""
    root = tmp_path_factory.mktemp("feast")
    (root / "cases").mkdir()
    words = [VENV / "bin/python", PROGRAM]
    with (
        in_process_loads(),
        tierstore.open(root / "data", host_budget="64MiB", source_root=[root / "cases"], port=0, grpc_port=0) as store,
        ServerThread(store) as server,
    ):
        done = subprocess.run(
            [*words, server.url, root / "cases"], capture_output=True, text=True, timeout=TIMEOUT_S,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_feast(results: dict[str, str | None], case: str) -> None:
    failed = results[f"case_{case}"]
    assert failed is None, failed


def test_without_feast_the_error_names_the_extra() -> None:
    program = "import sys; sys.modules['feast'] = None; import tierstore.feast"
    done = subprocess.run(
        [VENV / "bin/python", "-c", program], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert "MissingExtra" in done.stderr, done.stderr
    assert "tierstore[feast]" in done.stderr
