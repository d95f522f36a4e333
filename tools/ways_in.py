"""How long the ways in take, and how many lines: each example in an environment of its own, without compiled kernels but those of the wheel.

python -m tools.ways_in dist/tierstore-0.2.0-*.whl [--only parquet hps]
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.kafka_real import real_brokers

EXAMPLES = Path(__file__).parents[1] / "examples"
WAYS = {  # the example; what is installed for it, extras first; and what without its own needs
    "parquet": ("parquet_to_served.py", "", ""),
    "hps": ("hps_to_served.py", "tritonclient[http]", ""),
    "lightgbm": ("lightgbm_with_embeddings.py", "[dense] lightgbm onnxmltools", ""),
    "pytorch": ("pytorch_with_deltas.py", "[dense] torch==2.13.0 onnxscript", ""),
    "torchrec": (
        "torchrec_with_deltas.py",
        "[dense] torch==2.13.0 onnxscript fbgemm-gpu-cpu==1.8.0 tensordict torchmetrics==1.0.3 tqdm pyre-extensions",
        "torchrec==1.8.0",  # it wants FBGEMM with CUDA
    ),
    "spark": ("spark_build.py", "pyspark==4.1.4 pandas>=2.2", ""),
    "ray": ("ray_build.py", "ray[data]==2.60.0", ""),
    "kafka": ("kafka_rows_to_served.py", "[kafka]", ""),  # of a broker that is started for it
}


def lines_of(file: Path) -> int:
    """Lines with code: no comments, no docstrings, no blank ones."""
    tree = ast.parse(file.read_text())
    texts = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return len({node.lineno for node in ast.walk(tree) if hasattr(node, "lineno") and id(node) not in texts})


def try_way(wheel: Path, example: Path, needs: str, alone: str, root: Path, *words: str) -> tuple[float, float]:
    """Seconds of the installation, and of the example, which is given `words`."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", root / "venv"], check=True)
    python = root / "venv/bin/python"
    extras, _, others = needs.partition(" ") if needs.startswith("[") else ("", "", needs)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, f"{wheel}{extras}", *others.split()], check=True)
    if alone:
        subprocess.run([*install, "--no-deps", *alone.split()], check=True)
    installed = time.monotonic()
    (root / "work").mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "TIERSTORE_", "PYTHON"))}
    env |= {"HOME": str(root), "XDG_CACHE_HOME": str(root / "cache"), "PYSPARK_PYTHON": str(python)}
    subprocess.run([python, example, *words], check=True, cwd=root / "work", env=env, stdout=subprocess.DEVNULL)
    return installed - began, time.monotonic() - installed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    print("| from | lines | seconds to install | seconds to answers |\n|---|---|---|---|")
    for name in options.only:
        example, needs, alone = WAYS[name]
        with ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            words = [stack.enter_context(real_brokers(1)).address] if name == "kafka" else []
            install_s, run_s = try_way(options.wheel.resolve(), EXAMPLES / example, needs, alone, root, *words)
        print(f"| {name} | {lines_of(EXAMPLES / example)} | {install_s:.0f} | {run_s:.0f} |", flush=True)


if __name__ == "__main__":
    main()
