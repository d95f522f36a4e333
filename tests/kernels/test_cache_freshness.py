"""Compiled kernels are never older than a helper that they inline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tierstore import kernels

PROGRAM = """
import sys
from pathlib import Path
from tierstore.kernels import stamp_caches
stamp_caches(Path(sys.argv[1]))
sys.path.insert(0, sys.argv[1])
from inner import kernel
print(kernel.answer(), sum(kernel.answer.stats.cache_hits.values()))
"""
KERNEL = """
from numba import njit
from helper import number
@njit("int64()", cache=True)
def answer():
    return number()
"""
HELPER = """
from numba import njit
@njit
def number():
    return {}
"""


def run(folder: Path) -> str:
    return subprocess.run(
        # -B: Python would take its own compiled file for a source of the same length that was written in the same second
        [sys.executable, "-B", "-c", PROGRAM, str(folder)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.strip()


@pytest.mark.thorough
def test_an_edit_to_one_source_makes_kernels_of_another_compile_anew(tmp_path: Path) -> None:
    """Also where the kernel lies in a folder of its own."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/kernel.py").write_text(KERNEL)
    for number, cached in ((1, False), (1, True), (2, False), (2, True)):
        (tmp_path / "helper.py").write_text(HELPER.format(number))
        assert run(tmp_path) == f"{number} {int(cached)}"


def test_sources_of_kernels_are_those_of_packages_and_of_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever one lies, an edit of it has kernels compiled anew."""
    kept = ["rows/__init__.py", "rows/inner/codec.py", "tiers/disk/bloom.py"]
    for name in (*kept, "tiers/disk/tier.py", "tiers/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(kernels, "_PACKAGE", tmp_path)
    monkeypatch.setattr(kernels, "PARTS", ("tiers.disk.bloom", "rows"))
    names = ["rows.__init__", "rows.inner.codec", "tiers.disk.bloom"]
    assert kernels.sources.__wrapped__() == dict(zip((tmp_path / name for name in kept), names, strict=True))
