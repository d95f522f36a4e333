"""What is wrong with one version, or one model, on disk: it is named, and everything else serves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.engine import scenes
from tests.engine.lifecycle.test_start import SMALL, item, loaded
from tierstore.errors import NotReady, StorageError, TierstoreError
from tierstore.formats import names

pytestmark = pytest.mark.usefixtures("quick_loads")


def forbidden(version: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (version / "db").chmod(0)


def a_directory_for_the_drivers_file(version: Path) -> None:
    """The binding opens it by itself, before RocksDB, and raises a bare OSError, as for a directory of another user."""
    config = version / "db/rocksdict-config.json"
    config.unlink()
    config.mkdir()


def gone(version: Path) -> None:
    shutil.rmtree(version / "db")


def a_loop_of_links(version: Path) -> None:
    gone(version)
    (version / "db").symlink_to("db")


def a_pipe(version: Path) -> None:
    (version / "db/CURRENT").unlink()
    os.mkfifo(version / "db/CURRENT")


DAMAGES = [forbidden, a_directory_for_the_drivers_file, gone, a_loop_of_links, a_pipe]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_kept_version_that_cannot_be_opened_is_named_and_all_else_serves(open_store, tmp_path, caplog, damage):
    store = open_store()
    root = loaded(store, tmp_path, 1, 2)
    loaded(store, tmp_path, 1, model="other")
    store.close()
    damage(root / "1")
    store = open_store()
    assert item(store, 1) == scenes.vector("item", 2, 1)[0]
    assert item(store, 1, "other") == scenes.vector("item", 1, 1)[0]
    status = store.status("ctr")["models"]["ctr"]
    problems = {entry["version"]: entry["problem"] for entry in status["versions"]}
    assert str(root / "1/db") in problems[1]
    assert problems[2] is None
    assert str(root / "1/db") in caplog.text
    assert [problem for problem in store.verify().problems if "version 1" in problem]
    with pytest.raises(StorageError):
        store.rollback("ctr")
    store.apply_delta(scenes.stamped(1, {"item": [3]}))
    assert item(store, 3) == scenes.vector("item", 1, 3)[0]
    store.drop("ctr", 1)
    assert store.verify().ok


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_active_version_that_cannot_be_opened_is_its_models_problem_alone(open_store, tmp_path, damage):
    store = open_store()
    root = loaded(store, tmp_path, 1, 2)
    loaded(store, tmp_path, 1, model="other")
    store.close()
    damage(root / "2")
    store = open_store()
    assert item(store, 1, "other") == scenes.vector("item", 1, 1)[0]
    with pytest.raises(NotReady, match="2/db"):
        item(store, 1)
    status = store.status("ctr")["models"]["ctr"]
    assert "2/db" in status["problem"]
    assert [entry["version"] for entry in status["versions"] if entry["problem"]] == [2]
    store.activate("ctr", 1)
    assert item(store, 1) == scenes.vector("item", 1, 1)[0]


def test_a_record_of_the_active_version_that_cannot_be_read_is_told_as_such(open_store, tmp_path):
    store = open_store()
    root = loaded(store, tmp_path, 1, 2)
    store.close()
    (root / "2/version.json").write_text("{")
    store = open_store()
    assert "state.json has version 2 serve, which is damaged" in store.model("ctr").problem


def test_a_model_whose_directory_cannot_be_listed_does_not_serve_and_loses_nothing(open_store, tmp_path, monkeypatch):
    store = open_store()
    root = loaded(store, tmp_path, 1, 2)
    loaded(store, tmp_path, 1, model="other")
    store.close()
    listing = names._listing

    def failing(path):
        if path == root:
            raise PermissionError(13, "Permission denied")
        return listing(path)

    with monkeypatch.context() as patch:
        patch.setattr(names, "_listing", failing)
        store = open_store()
        assert item(store, 1, "other") == scenes.vector("item", 1, 1)[0]
        assert "cannot be read: Permission denied" in store.model("ctr").problem
        with pytest.raises(TierstoreError, match="Permission denied"):  # it might take the place of one that is there
            store.load_snapshot(scenes.write_snapshot(tmp_path / "again", 1, stamp=5, rows=SMALL))
        store.close()
    store = open_store()
    assert (store.model("ctr").versions, item(store, 1)) == ([1, 2], scenes.vector("item", 2, 1)[0])
