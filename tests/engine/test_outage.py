"""A disk that takes nothing for a while, then power that goes: what is said to be so in between is so afterwards.

A change that fails has often done a part already, and putting that back may fail as well. Then what serves and what the
disk says differ, and nothing may be acknowledged on top of that.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.engine import test_faults
from tests.engine.serving import test_canary_faults
from tests.engine.serving.test_canary_faults import routes
from tests.engine.test_faults import PowerCut
from tests.formats.disks import FailingDisk
from tierstore.errors import TierstoreError
from tierstore.formats import files

pytestmark = pytest.mark.usefixtures("quick_loads")


class Outage(PowerCut):
    """Has no room for a while, see `outage`; and forgets the inodes of files that are gone, for RocksDB takes them again."""

    def __init__(self, keep: Path) -> None:
        super().__init__(1 << 30, keep)
        self.first = self.remaining = 0

    def _count(self) -> None:
        super()._count()
        if self.operations > self.first and self.remaining:
            self.remaining -= 1
            raise OSError(errno.ENOSPC, "no space")

    def outage(self, first: int, count: int) -> None:
        """Operations from number `first` on fail, `count` of them."""
        self.operations, self.first, self.remaining = 0, first, count

    def unlink(self, path):
        inode = path.stat().st_ino if path.exists() else None
        super().unlink(path)
        self._unsynced.pop(inode, None)

    def rmtree(self, path):
        inodes = [each.stat().st_ino for each in path.rglob("*")]
        super().rmtree(path)
        for inode in inodes:
            self._unsynced.pop(inode, None)


LOAD = test_faults, test_faults.load_beyond_the_log
PROMOTE = test_canary_faults, test_canary_faults.promote
LABEL = test_canary_faults, test_canary_faults.label
TWICE, ALL = 2, 1000  # operations that fail


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "count", "then"),
    [
        pytest.param(LOAD, ALL, "a delta", id="load, delta"),
        pytest.param(LOAD, TWICE, "another try", id="load, load"),
        pytest.param(PROMOTE, TWICE, "a delta", id="promote, delta"),
        pytest.param(PROMOTE, ALL, "a close", id="promote, close"),
        pytest.param(LABEL, ALL, "another try", id="label, label"),
    ],
)
def test_after_a_change_that_could_not_be_taken_back_what_is_acknowledged_is_kept(
    tmp_path, open_store, change, count, then
):
    home, prepare = change
    scene = home.Scene(tmp_path, open_store)
    counted = FailingDisk()
    with files.use(counted):
        prepared = prepare(scene)
        counted.operations = 0
        prepared()
    if hasattr(scene, "seq"):
        scene.seq = scene.store.model("ctr").state.log.status()["last"]
    for first in range(max(0, counted.operations - 12), counted.operations):  # what is before only writes new files
        disk = Outage(tmp_path / f"kept-{first}")
        with files.use(disk):
            attempt = prepare(scene)
            before = routes(scene.store)
            disk.outage(first, count)
            failed = False
            try:
                attempt()
            except TierstoreError:
                failed = True
            disk.remaining = 0
            assert not failed or routes(scene.store) == before
            if then == "a delta":
                seq = scene.store.model("ctr").state.log.status()["last"] + 1
                scene.store.apply_delta(test_faults.scenes.stamped(seq, {"item": [7], "user": [7]}))
            elif then == "another try" and failed:
                loaded = getattr(scene, "latest", 0)
                if loaded > 2 and loaded in scene.store.model("ctr").versions:
                    scene.store.drop("ctr", loaded)  # only the switch to it has failed
                attempt()
            said, rows = routes(scene.store), test_canary_faults.rows_of(scene.store)
            log = scene.store.model("ctr").state.log.status()["last"]
            if then != "a close":
                disk.cut_at = 0  # no power from here on
            scene.store.close()
        if then != "a close":
            disk.apply(tmp_path / "data")
        scene.reopen()
        assert scene.store.model("ctr").problem is None
        assert routes(scene.store) == said, f"operation {first} failed"
        assert scene.store.model("ctr").state.log.status()["last"] == log
        assert test_canary_faults.alike(test_canary_faults.rows_of(scene.store), rows)
        if hasattr(scene, "seq"):
            scene.seq = log
