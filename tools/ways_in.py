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
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
WAYS = {  # the example, and what is installed for it, extras first
    "parquet": ("parquet_to_served.py", ""),
    "hps": ("hps_to_served.py", "tritonclient[http]"),
    "lightgbm": ("lightgbm_with_embeddings.py", "[dense] lightgbm onnxmltools"),
    "pytorch": ("pytorch_with_deltas.py", "[dense] torch onnxscript"),
}


def lines_of(file: Path) -> int:
    """Lines with code: no comments, no docstrings, no blank ones."""
    tree = ast.parse(file.read_text())
    texts = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return len({node.lineno for node in ast.walk(tree) if hasattr(node, "lineno") and id(node) not in texts})


def try_way(wheel: Path, example: Path, needs: str, root: Path) -> tuple[float, float]:
    """Seconds of the installation, and of the example."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", root / "venv"], check=True)
    python = root / "venv/bin/python"
    extras, _, others = needs.partition(" ") if needs.startswith("[") else ("", "", needs)
    install = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        f"{wheel}{extras}",
        *others.split(),
    ]
    subprocess.run(install, check=True)
    installed = time.monotonic()
    (root / "work").mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "TIERSTORE_", "PYTHON"))}
    env |= {"HOME": str(root), "XDG_CACHE_HOME": str(root / "cache")}
    subprocess.run([python, example], check=True, cwd=root / "work", env=env, stdout=subprocess.DEVNULL)
    return installed - began, time.monotonic() - installed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    print("| from | lines | seconds to install | seconds to answers |\n|---|---|---|---|")
    for name in options.only:
        example, needs = WAYS[name]
        with tempfile.TemporaryDirectory() as root:
            install_s, run_s = try_way(options.wheel.resolve(), EXAMPLES / example, needs, Path(root))
        print(f"| {name} | {lines_of(EXAMPLES / example)} | {install_s:.0f} | {run_s:.0f} |", flush=True)


if __name__ == "__main__":
    main()
