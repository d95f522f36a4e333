"""A canary on disks that fail and machines that lose power: what is served is what was before, or what was asked for.

As in `test_faults.py`, each operation is tried with its first file operation failing, then its second, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.test_faults import KEYS, PowerCut, Rows, numbers, same
from tests.formats.disks import FailingDisk
from tierstore.engine.serving.document import SavedRoutes
from tierstore.errors import TierstoreError
from tierstore.formats import files

pytestmark = pytest.mark.usefixtures("quick_loads")


def routes(store: tierstore.Store) -> SavedRoutes:
    return SavedRoutes.for_routing(store.model("ctr").served)


def rows_of(store: tierstore.Store) -> dict[int, Rows]:
    """By version that is served."""
    found = {}
    for number in store.model("ctr").served.versions:
        with store.model("ctr").view(number) as view:
            found[number] = {name: view.lookup(name, KEYS, return_found=True) for name in ("user_id", "item_id")}
    return found


def alike(a: dict[int, Rows], b: dict[int, Rows]) -> bool:
    return a.keys() == b.keys() and all(same(a[number], b[number]) for number in a)


class Scene:
    """Versions 1, active, with the label `holdout`, 2 and 3; deltas that are not folded."""

    def __init__(self, root: Any, open_store: Callable[..., tierstore.Store]) -> None:
        self._open = lambda: open_store(fold_grace_s=60, keep_versions=99)
        self.store = self._open()
        for version in (1, 2, 3):
            where = scenes.write_snapshot(root, version, stamp=version, rows={"user": 200, "item": 300})
            self.store.load_snapshot(where, activate=version == 1)
        for seq in (1, 2):
            keys = [37 * seq, 1000, 5000 + seq]
            self.store.apply_delta(
                scenes.delta(seq, {"item": (keys, scenes.vectors("item", seq, keys))}, {"user": [37]})
            )
        self.holdout()

    def holdout(self) -> None:
        self.store.label("ctr", "holdout", self.store.model("ctr").active_version)

    def begin(self, *, canary: int | None) -> None:
        """Version 1 active with its label, beside that canary with one of its own."""
        self.store.activate("ctr", 1)
        if self.store.model("ctr").served.canary is not None:
            self.store.withdraw("ctr")
        self.holdout()
        if canary is not None:
            self.store.canary("ctr", canary, 0.25)
            self.store.label("ctr", "trial", canary)

    def reopen(self) -> None:
        self.store.close()
        self.store = self._open()


def canary(scene: Scene) -> Callable[[], Any]:
    scene.begin(canary=None)
    return lambda: scene.store.canary("ctr", 2, 0.25)


def share(scene: Scene) -> Callable[[], Any]:
    scene.begin(canary=2)
    return lambda: scene.store.canary("ctr", 2, 0.75)


def label(scene: Scene) -> Callable[[], Any]:
    scene.begin(canary=2)
    return lambda: scene.store.label("ctr", "trial", 1)


def unlabel(scene: Scene) -> Callable[[], Any]:
    scene.begin(canary=None)
    return lambda: scene.store.unlabel("ctr", "holdout")


def promote(scene: Scene) -> Callable[[], Any]:
    scene.begin(canary=2)
    return lambda: scene.store.promote("ctr")


def withdraw(scene: Scene) -> Callable[[], Any]:
    scene.begin(canary=2)
    return lambda: scene.store.withdraw("ctr")


def activate_another(scene: Scene) -> Callable[[], Any]:
    scene.begin(canary=2)
    return lambda: scene.store.activate("ctr", 3)


def deactivate(scene: Scene) -> Callable[[], Any]:
    scene.begin(canary=2)
    return lambda: scene.store.deactivate("ctr")


VERBS = [canary, share, label, unlabel, promote, withdraw, activate_another, deactivate]


@pytest.mark.thorough
@pytest.mark.parametrize("reopen", [False, True], ids=["goes on", "reopens"])
@pytest.mark.parametrize("prepare", VERBS)
def test_whichever_file_operation_fails_nothing_changes_and_a_second_try_works(tmp_path, open_store, prepare, reopen):
    scene = Scene(tmp_path, open_store)
    for fail_at in range(60):
        attempt = prepare(scene)
        before, served, now = routes(scene.store), rows_of(scene.store), numbers(scene.store)
        disk = FailingDisk(fail_at)
        try:
            with files.use(disk):
                attempt()
        except TierstoreError:
            if reopen:
                scene.reopen()
            assert (routes(scene.store), numbers(scene.store)) == (before, now), f"operation {fail_at} failed"
            assert alike(rows_of(scene.store), served)
            attempt()
        if disk.operations <= fail_at:
            break
    else:
        pytest.fail("never came to an end")
    assert fail_at >= 1
    expected, served = routes(scene.store), rows_of(scene.store)
    assert expected != before
    scene.reopen()
    assert routes(scene.store) == expected
    assert alike(rows_of(scene.store), served)
    assert scene.store.verify().ok


@pytest.mark.thorough
@pytest.mark.parametrize("prepare", VERBS)
def test_whenever_power_goes_it_is_done_or_was_never_begun(tmp_path, open_store, prepare):
    scene = Scene(tmp_path, open_store)
    for cut_at in range(60):
        disk = PowerCut(cut_at, tmp_path / f"kept-{cut_at}")
        with files.use(disk):
            disk.cut_at = 1 << 30  # the preparation has power
            attempt = prepare(scene)
            before = routes(scene.store)
            disk.operations, disk.cut_at = 0, cut_at
            done = True
            try:
                attempt()
            except TierstoreError:
                done = False
            last = disk.operations <= cut_at
            wanted = routes(scene.store)
            disk.cut_at = 0
            scene.store.close()
        disk.apply(tmp_path / "data")
        scene.reopen()
        now = routes(scene.store)
        assert scene.store.model("ctr").problem is None
        assert now == wanted if done else now in (before, _after(prepare, before)), f"power went at {cut_at}"
        assert scene.store.model("ctr").served.versions == tuple(n for n in (now.active, now.canary) if n is not None)
        assert scene.store.verify().ok
        if last:
            assert done
            return
    pytest.fail("never came to an end")


def _after(prepare: Callable[[Scene], object], before: SavedRoutes) -> SavedRoutes:
    """What an attempt that lost power may have come to all the same."""
    return {
        canary: SavedRoutes(1, 2, 0.25, before.labels),
        share: SavedRoutes(1, 2, 0.75, before.labels),
        label: SavedRoutes(1, 2, 0.25, {**before.labels, "trial": 1}),
        unlabel: SavedRoutes(1),
        promote: SavedRoutes(2, labels={"trial": 2}),
        withdraw: SavedRoutes(1, labels={"holdout": 1}),
        activate_another: SavedRoutes(3),
        deactivate: SavedRoutes(),
    }[prepare]


def test_a_delta_goes_on_beside_a_record_that_cannot_be_written(tmp_path, open_store):
    scene = Scene(tmp_path, open_store)
    scene.begin(canary=2)
    with files.use(FailingDisk(0)), pytest.raises(TierstoreError):
        scene.store.label("ctr", "trial", 1)
    scene.store.apply_delta(scenes.stamped(3, {"item": [7]}))
    for version in (1, 2):
        with scene.store.model("ctr").view(version) as view:
            np.testing.assert_array_equal(view.lookup("item_id", [7]), scenes.vectors("item", 3, [7]))
