"""The wheel: what a user installs holds all that the package needs, and runs where no clone is."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tierstore

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("a wheel is built with setuptools 77 or later")
    # a copy: building writes beside the sources
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("tierstore", "schema"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    command = [sys.executable, "-m", "pip", "wheel", ".", *options, "-w", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package_and_the_schemas(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tierstore").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sorted(package - held) == []
    schemas = {path.name for path in (ROOT / "schema").iterdir() if path.is_file()}
    assert sorted(schemas - {name.rsplit("/", 1)[1] for name in held if "/share/tierstore/schema/" in name}) == []


def test_what_is_installed_runs_where_no_clone_is(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert Path(run("-c", "import tierstore; print(tierstore.__file__)").strip()).is_relative_to(site)
    assert run("-m", "tierstore", "--version").strip() == f"tierstore {tierstore.__version__}"
    assert wheel.name.split("-")[1] == tierstore.__version__
    assert "serve" in run("-m", "tierstore", "--help")
    run("-c", "from tierstore import Client; Client('http://127.0.0.1:1').close()")
