"""Each program in `examples/` runs in an empty directory, and every value that it serves is checked by itself."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kafka_real import real_brokers, why_not
from tests.test_types import mypy
from tierstore.config import ENV_PREFIX

ROOT = Path(__file__).parents[1]
NEEDS = {
    "parquet_to_served": (),
    "hps_to_served": ("tritonclient.http",),
    "pytorch_with_deltas": ("torch", "onnxscript", "onnxruntime"),
    "pytorch_in_fastapi": ("torch", "fastapi", "httpx"),
    "pytorch_in_ray_serve": ("torch", "ray.serve"),
    "spark_build": (),
    "ray_build": (),
    "lightgbm_with_embeddings": ("lightgbm", "onnxmltools", "onnxruntime"),
    "torchrec_with_deltas": ("torch", "torchrec", "onnxscript", "onnxruntime"),
    "fbgemm_with_deltas": ("torch", "fbgemm_gpu"),
    "keras_with_deltas": ("torch", "keras", "onnxscript", "onnxruntime"),
    "kafka_rows_to_served": ("confluent_kafka",),
}
ENGINES = ROOT / ".clients/engines"  # `make engines`
ON_ENGINES = ("spark_build", "ray_build")


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == NEEDS.keys()


@pytest.mark.parametrize(
    ("name", "commands", "lines"),
    [
        ("parquet_to_served", 2, None),
        ("hps_to_served", 2, None),
        ("pytorch_with_deltas", 0, 15),
        ("pytorch_in_fastapi", 0, 15),
        ("pytorch_in_ray_serve", 0, 18),
        ("lightgbm_with_embeddings", 0, 15),
        ("spark_build", 0, 35),
        ("ray_build", 0, 32),
        ("torchrec_with_deltas", 0, 17),
        ("fbgemm_with_deltas", 0, 18),
        ("keras_with_deltas", 0, 27),
        ("kafka_rows_to_served", 2, None),
    ],
)
def test_an_example_is_as_short_as_was_promised(name: str, commands: int, lines: int | None) -> None:
    """By the number of commands, or by the lines of `main`, from the model to what is served."""
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert text.count("[*command, ") == commands
    (main,) = (one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef) and one.name == "main")
    body = text.splitlines()[main.body[0].lineno - 1 : main.end_lineno]
    assert lines is None or len([line for line in body if line.strip()]) <= lines


@pytest.mark.thorough
@pytest.mark.parametrize("name", NEEDS)
def test_an_example(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    paths = [str(ROOT)]
    if name in ON_ENGINES:
        if not ENGINES.is_dir():
            pytest.skip("no .clients/engines: make engines")
        if name == "spark_build" and shutil.which("java") is None:
            pytest.skip("no java on the PATH")
        paths.append(str(ENGINES))
    for needed in NEEDS[name]:
        pytest.importorskip(needed, reason=f"{needed} is not installed (make trainers, or pip)")
    env = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    with ExitStack() as stack:
        words = []
        if name == "kafka_rows_to_served":
            if (why := why_not()) is not None:
                pytest.skip(why)
            words.append(stack.enter_context(real_brokers(1)).address)
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / f"{name}.py"), *words],
            cwd=tmp_path,
            env={
                **env,
                "PYTHONPATH": os.pathsep.join(paths),
                "PYSPARK_PYTHON": sys.executable,
                "TIERSTORE_DRAIN_S": "0",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert "served" in done.stdout


@pytest.mark.thorough
def test_a_type_checker_has_nothing_to_say_of_them() -> None:
    lines = mypy(*sorted((ROOT / "examples").glob("*.py")))
    assert lines[-1].startswith("Success"), "\n".join(lines)
