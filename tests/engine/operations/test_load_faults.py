"""A load by real helper processes, in which a file operation fails: in the process that serves, or in a helper.

Whatever fails, what serves goes on as it was, and the same load succeeds once nothing fails any more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine import scenes
from tests.formats.disks import FailingDisk
from tierstore.engine.store import Store
from tierstore.errors import StorageError
from tierstore.formats import files
from tierstore.ingest import load_plan

KEYS = list(range(0, 500, 7))
ROWS = {"user": 500, "item": 1000}
POINTS = 12

# Found by a helper as it starts: its path is that of the process that starts it.
IN_HELPERS = """
import os
if "FAIL_AT" in os.environ:
    from tests.formats.disks import FailingDisk
    from tierstore.formats import files
    faults = files.use(FailingDisk(int(os.environ["FAIL_AT"])))  # kept, or it would end
    faults.__enter__()
"""


class Scene:
    """A store in which version 1 serves, with a delta on it; later versions are loaded one after the other."""

    def __init__(self, store: Store, tmp_path: Path) -> None:
        self.store, self.tmp_path, self.seq, self.active = store, tmp_path, 0, 1
        store.load_snapshot(self.snapshot(1))
        self.delta()

    def snapshot(self, version: int) -> Path:
        source = self.tmp_path / f"ctr-{version}"
        if source.exists():
            return source
        return scenes.write_snapshot(self.tmp_path, version, stamp=version, rows=ROWS)

    def delta(self) -> None:
        """One more, which must be accepted."""
        self.seq += 1
        self.store.apply_delta(scenes.stamped(self.seq, {"user": [7]}))

    def check(self) -> None:
        """What serves is whole: its rows, and the newest delta."""
        ctr = self.store.model("ctr")
        assert ctr.active_version == self.active
        expected = scenes.vectors("user", self.active, KEYS)
        expected[KEYS.index(7)] = scenes.vector("user", self.seq, 7)
        np.testing.assert_array_equal(ctr.lookup("user_id", KEYS), expected)

    def load(self, version: int) -> bool:
        """Load a version. False where that failed, by which nothing else may be lost."""
        failure = ""
        try:
            self.store.load_snapshot(self.snapshot(version))
        except StorageError as error:
            failure = str(error)
        assert not failure or "injected failure" in failure
        loaded = not failure
        if loaded or self.store.model("ctr").active_version == version:
            self.active = version
        self.check()
        return loaded

    def repeat(self, version: int) -> None:
        """The same load again, where nothing fails."""
        self.delta()
        assert self.store.model("ctr").active_version == version or self.load(version)
        self.check()


@pytest.fixture
def scene(open_store: Any, tmp_path: Path) -> Scene:
    return Scene(open_store(fold_grace_s=60, keep_versions=99), tmp_path)


def test_a_file_operation_that_fails_in_the_process_that_serves_costs_that_load_alone(
    scene: Scene, open_store: Any
) -> None:
    counting = FailingDisk()
    for version in range(2, 3 + POINTS):
        scene.snapshot(version)
    with files.use(counting):
        assert scene.load(2)
    assert counting.operations > POINTS
    failed = 0
    for version, at in enumerate(np.linspace(0, counting.operations - 1, POINTS).astype(int).tolist(), 3):
        with files.use(FailingDisk(at)):
            failed += not scene.load(version)
        scene.repeat(version)
    assert failed > POINTS // 2
    scene.store.close()
    scene.store = open_store(fold_grace_s=60, keep_versions=99)
    scene.check()
    assert scene.store.verify().ok


@pytest.mark.parametrize("at", [1, 5])
def test_a_file_operation_that_fails_in_a_helper_costs_that_load_alone(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    scene.snapshot(2)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(IN_HELPERS)
    with monkeypatch.context() as patch:
        patch.setattr(load_plan, "SMALL_BYTES", -1)
        patch.syspath_prepend(tmp_path / "site")
        patch.setenv("FAIL_AT", str(at))
        assert not scene.load(2)
    scene.repeat(2)
    assert scene.store.verify().ok
