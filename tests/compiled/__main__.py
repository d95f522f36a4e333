"""Compiles all kernels of the package, and those of tests: `python -m tests.compiled`. CI does so beside its other preparations."""

from __future__ import annotations

import importlib
import multiprocessing
from pathlib import Path

from tierstore.kernels import ahead
from tierstore.machine import processors


def _compile(kernels: Path) -> None:
    importlib.import_module(f"tests.compiled.{kernels.stem}")


def compile_kernels(*, of_tests: bool) -> None:
    """With as many processes as processors. Those of tests take half a minute, which each process of tests would take again."""
    ahead.compile_all(processors())
    if of_tests:
        files = sorted(Path(__file__).parent.glob("[!_]*.py"), key=lambda file: -file.stat().st_size)
        with multiprocessing.get_context("fork").Pool(processors()) as pool:
            pool.map(_compile, files, chunksize=1)


if __name__ == "__main__":
    compile_kernels(of_tests=True)
