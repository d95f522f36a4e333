"""A data directory of an earlier release is served by this one; one of a newer format is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tests.counts import with_large_counts
from tests.upgrade import directory
from tierstore import kernels
from tierstore.engine.lifecycle import directory_format
from tierstore.errors import Corruption, DiskFull
from tierstore.formats import files

ROOT = Path(__file__).parents[2]
KEPT = sorted((ROOT / "tests/corpus/directory").glob("*.tar.xz"))
OLDER = "cb26fc0d05f26d312c7a8640d4e9729dcc385687"  # the last commit of 0.1.0


def open_(data: Path) -> tierstore.Store:
    return tierstore.open(data, **directory.SETTINGS)


def unpack(archive: Path, where: Path) -> None:
    filtered: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
    with tarfile.open(archive) as held:
        held.extractall(where, **filtered)


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_a_directory_of_an_earlier_release_is_served_and_goes_on(kept: Path, tmp_path: Path) -> None:
    unpack(kept, tmp_path / "data")
    directory.check(tmp_path / "data", tmp_path)
    directory.check(tmp_path / "data", tmp_path, newest=directory.NEXT)  # by a second start


def test_there_is_a_directory_of_every_release_before_this_one() -> None:
    released = {
        line.split()[1]
        for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("## ")
    }
    assert released - {tierstore.__version__} == {path.name.removesuffix(".tar.xz") for path in KEPT}


def test_the_version_of_the_package_has_its_part_of_the_changelog() -> None:
    first = next(
        line for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line.startswith("## ")
    )
    assert first.split()[1] == tierstore.__version__


def test_a_format_that_is_not_known_is_named_before_anything_is_touched(tmp_path: Path) -> None:
    data = tmp_path / "data"
    open_(data).close()
    files.publish_json(data / "format.json", {"format": directory_format.FORMAT + 1, "written_by": "9.1.0"})
    (data / "models/ctr").mkdir()
    (data / "models/ctr/state.json").write_text("of another kind")
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    with pytest.raises(
        Corruption, match=r"format\.json was written by tierstore 9\.1\.0, .*expected format 1 or 2, got 3"
    ):
        open_(data)
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before
    (data / "format.json").unlink()
    open_(data).close()  # the lock was given back


def test_a_new_directory_says_its_format_and_one_that_cannot_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise DiskFull("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(directory_format.files, "publish_record", full)
        open_(tmp_path / "data").close()
    where = tmp_path / "data/format.json"
    assert not where.exists()
    open_(tmp_path / "data").close()
    document = json.loads(where.read_text())
    assert (document["format"], document["written_by"]) == (2, tierstore.__version__)
    where.write_text(where.read_text().replace('"format": 2', '"format": 7'))  # which its checksum does not cover
    open_(tmp_path / "data").close()
    assert "does not match its checksum" in caplog.text
    assert json.loads(where.read_text()) == document


# --- by the code of an earlier commit


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it was, from the history of a clone."""
    where = tmp_path_factory.mktemp("older")
    archive = where / "older.tar"
    command = ["git", "archive", "--output", str(archive), OLDER, "tierstore", "schema"]
    if subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("the history of this clone does not reach back so far")
    unpack(archive, where)
    # of no use where its kernels are others; else they need not be compiled
    shutil.copytree(kernels.directory(), where / "tierstore/kernels/__pycache__")
    return where


def run(package: Path, what: str, data: Path) -> str:
    script = ROOT / "tests/upgrade/directory.py"
    environment = os.environ | {"PYTHONPATH": str(package)}
    command = [sys.executable, str(script), what, str(data)]
    done = subprocess.run(command, env=environment, cwd=data.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@with_large_counts
@pytest.mark.thorough
@pytest.mark.timeout(1800)  # where the kernels have changed since, the older ones are compiled
def test_a_directory_that_an_earlier_commit_has_made_is_served_and_goes_on(older: Path, tmp_path: Path) -> None:
    assert "as it was" in run(older, "make", tmp_path / "old")
    assert "as it was" in run(ROOT, "check", tmp_path / "old")
