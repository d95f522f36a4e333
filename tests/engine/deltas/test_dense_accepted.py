"""What a version accepted while it served is its own, however it was left and whatever crashed since.

Version 1 has the feature `user_id` alone and accepts a graph that takes `city` beside it, as a plain input. To version 2
`city` is a feature, so while that one is active a kept version would not be given such a graph.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine.deltas.test_dense_kept import CITY, DIM, OLD, rows, snapshot
from tests.engine.reads.test_dense import state
from tests.formats.disks import FailingDisk
from tests.predict import onnx_models as om
from tierstore.engine.serving.document import read_document
from tierstore.errors import StorageError
from tierstore.formats import files
from tierstore.formats.files import FileSystem
from tierstore.formats.names import DataDirectory

pytestmark = pytest.mark.usefixtures("quick_loads")

Open = Callable[..., tierstore.Store]


@pytest.fixture
def open_store(open_store: Open) -> Open:
    """Nothing is dropped, rejected or not."""
    return partial(open_store, keep_versions=9)


def unfolded(open_store: Open) -> tierstore.Store:
    return open_store(fold_grace_s=60)


def accept(store: tierstore.Store) -> None:
    store.apply_delta(rows(1, dense=om.linear(CITY, 7.0)))


def load(store: tierstore.Store, root: Path, version: int, *, activate: bool = True, delta_seq: int = 0) -> None:
    features = {"user_id": None, "city": None} if version == 2 else {"user_id": None}
    where = snapshot(root, version, features, om.linear(CITY) if version == 2 else OLD, delta_seq=delta_seq)
    store.load_snapshot(where, activate=activate)


def check(store: tierstore.Store) -> None:
    """Going to version 1, it has what it accepted."""
    store.activate("ctr", 1)
    score = store.model("ctr").predict({"user_id": [1], "city": np.ones((1, DIM))})[0, 0]
    assert (score, state(store)) == (DIM + DIM + 7, "served")


def switched(open_store: Open, root: Path) -> tierstore.Store:
    store = unfolded(open_store)
    load(store, root, 1)
    accept(store)
    load(store, root, 2, delta_seq=1)
    return store


def promoted(open_store: Open, root: Path) -> tierstore.Store:
    store = unfolded(open_store)
    load(store, root, 1)
    load(store, root, 2, activate=False)
    store.canary("ctr", 2)
    accept(store)
    store.promote("ctr")
    return store


def deactivated(open_store: Open, root: Path) -> tierstore.Store:
    store = unfolded(open_store)
    load(store, root, 1)
    load(store, root, 2, activate=False)
    accept(store)
    store.deactivate("ctr")
    store.close()
    store = unfolded(open_store)
    store.activate("ctr", 2)
    return store


def canary_that_accepted(open_store: Open, root: Path) -> tierstore.Store:
    store = unfolded(open_store)
    load(store, root, 3)
    load(store, root, 1, activate=False)
    store.canary("ctr", 1)
    accept(store)
    return store


def withdrawn(open_store: Open, root: Path) -> tierstore.Store:
    store = canary_that_accepted(open_store, root)
    store.withdraw("ctr")
    load(store, root, 2, delta_seq=1)
    return store


def canary_of_another_active_version(open_store: Open, root: Path) -> tierstore.Store:
    store = canary_that_accepted(open_store, root)
    load(store, root, 2, delta_seq=1)
    return store


def canary_over_a_crash(open_store: Open, root: Path) -> tierstore.Store:
    store = canary_that_accepted(open_store, root)
    store.close()
    store = unfolded(open_store)
    load(store, root, 2, delta_seq=1)
    return store


def not_opened_at_a_start(open_store: Open, root: Path) -> tierstore.Store:
    store = unfolded(open_store)
    load(store, root, 1)
    accept(store)
    store.close()
    manifest = root / "data/models/ctr/1/db/CURRENT"
    content = manifest.read_bytes()
    manifest.write_bytes(b"no such manifest\n")
    store = unfolded(open_store)
    assert not store.model("ctr").ready
    load(store, root, 2, delta_seq=1)
    manifest.write_bytes(content)
    return store


@pytest.mark.thorough
@pytest.mark.parametrize(
    "prepare",
    [
        switched,
        promoted,
        deactivated,
        withdrawn,
        canary_of_another_active_version,
        canary_over_a_crash,
        not_opened_at_a_start,
    ],
)
@pytest.mark.parametrize("crash", [False, True], ids=["closes", "crashes"])
def test_what_a_version_accepted_is_its_own_after_a_restart(open_store, tmp_path, prepare, crash):
    store = prepare(open_store, tmp_path)
    assert store.model("ctr").active_version == 2
    if crash:
        assert store.model("ctr").state.retiring.wait_closed(1, 60)
        shutil.copytree(tmp_path / "data", tmp_path / "left")
    store.close()
    if crash:
        shutil.rmtree(tmp_path / "data")
        (tmp_path / "left").rename(tmp_path / "data")
    open_store().close()
    check(open_store())


def accepted(data: Path) -> dict[int, int]:
    """What is on record: by version the newest delta whose dense part it accepted."""
    return dict(read_document(DataDirectory(data).model("ctr"), "ctr").accepted)


class Images(FileSystem):
    """Keeps the data directory as it was before each operation."""

    def __init__(self, data: Path, to: Path) -> None:
        self._data, self._to = data, to
        self.kept: list[Path] = []

    def keep(self) -> None:
        image = self._to / str(len(self.kept))
        shutil.copytree(self._data, image)
        self.kept.append(image)

    def create(self, path):
        self.keep()
        return super().create(path)

    def rename(self, old, new):
        self.keep()
        super().rename(old, new)

    def unlink(self, path):
        self.keep()
        super().unlink(path)


@pytest.mark.parametrize("way", [pytest.param("switch", marks=pytest.mark.thorough), "withdraw"])
def test_wherever_a_crash_cuts_the_leaving_off_it_is_its_own(open_store, tmp_path, way):
    store = unfolded(open_store)
    load(store, tmp_path, 1 if way == "switch" else 3)
    load(store, tmp_path, 2 if way == "switch" else 1, activate=False)
    if way == "withdraw":
        store.canary("ctr", 1)
    accept(store)
    images = Images(tmp_path / "data", tmp_path / "images")
    with files.use(images):
        store.activate("ctr", 2) if way == "switch" else store.withdraw("ctr")
        images.keep()
    store.close()
    marked = [1 in accepted(image) for image in images.kept]
    assert not marked[0]
    assert marked[-1]
    assert marked == sorted(marked)
    for image in images.kept:
        with tierstore.open(image, host_budget="4MiB", load_workers=1, keep_versions=9, fold_grace_s=60) as prepare:
            if way == "withdraw":
                load(prepare, tmp_path / image.name, 2, delta_seq=1)
            else:
                prepare.activate("ctr", 2)
        with tierstore.open(image, host_budget="4MiB", load_workers=1, keep_versions=9) as prepare:
            check(prepare)


def test_where_it_cannot_be_written_down_the_version_is_not_left(open_store, tmp_path):
    store = unfolded(open_store)
    load(store, tmp_path, 1)
    load(store, tmp_path, 2, activate=False)
    accept(store)
    store.deactivate("ctr")
    store.activate("ctr", 1)
    store.apply_delta(rows(2, dense=om.linear(CITY, 7.0)))
    with files.use(FailingDisk(0)), pytest.raises(StorageError):
        store.deactivate("ctr")
    assert store.model("ctr").served.versions == (1,)
    store.deactivate("ctr")
    store.close()
    assert accepted(tmp_path / "data") == {1: 2}


def test_nothing_is_written_for_a_version_that_has_folded_all_or_accepted_rows_alone(open_store, tmp_path):
    store = open_store(fold_grace_s=60)
    load(store, tmp_path, 1)
    load(store, tmp_path, 2, activate=False)
    store.apply_delta(rows(1))
    store.activate("ctr", 2)
    store.activate("ctr", 1)
    accept_ = rows(2, dense=om.linear(CITY, 7.0))
    store.apply_delta(accept_)
    store.close()
    store = open_store()  # it is folded
    store.activate("ctr", 2)
    assert accepted(tmp_path / "data") == {}
