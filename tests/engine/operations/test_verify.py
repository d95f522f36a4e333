"""`verify` reads for as long as it takes, and nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.predict import onnx_models as om
from tierstore.engine.data.overlay import Overlay
from tierstore.engine.operations import verify
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import Closed
from tierstore.types import Progress, VerifyReport

pytestmark = pytest.mark.usefixtures("quick_loads")

WAIT_S = 20


class Blocked:
    """A verification that stands still in the midst of the version `number` of `ctr` until it is let go on."""

    def __init__(self, store: tierstore.Store, number: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.outcome: list[VerifyReport | BaseException] = []

        def progress(step: Progress) -> None:
            if step.phase == f"verify ctr {number}":
                self.reached.set()
                assert self.go_on.wait(WAIT_S)

        def run() -> None:
            try:
                self.outcome.append(store.verify(progress))
            except BaseException as error:  # noqa: BLE001
                self.outcome.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert self.reached.wait(WAIT_S)

    def result(self) -> VerifyReport | BaseException:
        self.go_on.set()
        self._thread.join(WAIT_S)
        assert self.outcome
        return self.outcome[0]


def test_nothing_verified_is_no_success(store: tierstore.Store, tmp_path: Path) -> None:
    report = store.verify()
    assert not report.ok
    assert report.problems == (f"nothing was verified: {tmp_path / 'data'} has no complete version of any model",)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    assert store.verify().ok


def meanwhile(work: Callable[[], object]) -> None:
    """Do it on a thread of its own: what waits for the verification is to fail, not to wait."""
    done: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            done.append(error)
        else:
            done.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert done == [None]


def loaded(open_store: Callable[..., tierstore.Store], root, versions: int, **settings: object) -> tierstore.Store:
    store = open_store(keep_versions=9, **settings)
    for version in range(1, versions + 1):
        store.load_snapshot(scenes.write_snapshot(root, version, stamp=version))
    scenes.eventually(lambda: not store.model("ctr").state.retiring, "what was replaced is closed")
    return store


def answer(store: tierstore.Store, model: str = "ctr") -> float:
    return float(store.model(model).lookup("item_id", [64])[0, 0])


@pytest.mark.parametrize("read", [1, 2, 3])
def test_nobody_waits_for_a_verification_that_stands_still(open_store, tmp_path, read):
    """Kept versions, the one that is rolled back to among them, and the active one."""
    store = loaded(open_store, tmp_path, 3)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, stamp=1, model="other"))
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, stamp=2, model="other"))
    verify = Blocked(store, read)
    meanwhile(lambda: store.apply_delta(scenes.stamped(1, {"item": [1]})))
    meanwhile(lambda: store.rollback("ctr"))
    assert answer(store) == 2 * 64
    meanwhile(lambda: store.apply_delta(scenes.stamped(2, {"item": [2]})))
    meanwhile(lambda: store.activate("other", 1))
    assert answer(store, "other") == 64
    meanwhile(lambda: store.activate("ctr", 1))
    meanwhile(lambda: store.activate("ctr", 3))
    assert answer(store) == 3 * 64
    report = verify.result()
    assert isinstance(report, VerifyReport)
    assert report.ok, report.problems
    assert report.versions == 5
    assert store.verify().ok
    meanwhile(lambda: store.rollback("ctr"))
    assert answer(store) == 64


def test_a_version_that_is_left_while_it_is_verified_gives_its_memory_back(open_store, tmp_path):
    store = loaded(open_store, tmp_path, 2)
    verify = Blocked(store, 2)
    meanwhile(lambda: store.rollback("ctr"))
    scenes.eventually(lambda: len(store.shared.host_budget.users) == 1, "the version that was left is closed")
    assert isinstance(verify.result(), VerifyReport)


def test_a_version_may_be_dropped_while_it_is_verified_but_the_house_leaves_it(open_store, tmp_path):
    store = loaded(open_store, tmp_path, 3)
    ctr = store.model("ctr")
    verify = Blocked(store, 1)
    store.settings.__dict__["keep_versions"] = 0

    def only_what_is_used() -> bool:
        ctr.housekeeping.tasks.run()
        return ctr.versions == [1, 3]

    scenes.eventually(only_what_is_used, "version 2 is removed")
    meanwhile(lambda: store.drop("ctr", 1))
    assert not ctr.where.version(1).root.exists()
    report = verify.result()
    assert isinstance(report, VerifyReport)
    assert (report.ok, report.versions) == (True, 1)


def test_two_verifications_at_once_read_one_open_version(open_store, tmp_path):
    store = loaded(open_store, tmp_path, 2)
    first = Blocked(store, 1)
    second = Blocked(store, 1)
    assert isinstance(first.result(), VerifyReport)
    report = second.result()
    assert isinstance(report, VerifyReport)
    assert report.ok
    assert store.rollback("ctr") == 1


def test_a_store_that_is_closed_ends_a_verification(open_store, tmp_path):
    store = loaded(open_store, tmp_path, 2)
    verify = Blocked(store, 1)
    meanwhile(store.close)
    assert isinstance(verify.result(), Closed)
    assert open_store().verify().ok


def test_a_dense_part_that_a_fold_is_replacing_is_no_fault(
    store: tierstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file comes before the record of it; a verification in between waits for the fold."""
    store.load_snapshot(scenes.write_snapshot(tmp_path, heads={"cvr": om.linear({"user_id": np.ones(4)})}))
    replaced, read, go_on = threading.Event(), threading.Event(), threading.Event()
    fold_heads, read_regular = VersionInfo.fold_heads, verify.read_regular

    def folded(info: VersionInfo, overlay: Overlay) -> None:
        replaced.set()
        assert go_on.wait(WAIT_S)
        fold_heads(info, overlay)

    def noted(path: Path) -> bytes:
        content = read_regular(path)
        read.set()
        return content

    monkeypatch.setattr(VersionInfo, "fold_heads", folded)
    monkeypatch.setattr(verify, "read_regular", noted)
    store.apply_delta(scenes.delta(1, heads={"cvr": om.linear({"user_id": np.zeros(4)})}))
    assert replaced.wait(WAIT_S)
    reports: list[VerifyReport] = []
    verifying = threading.Thread(target=lambda: reports.append(store.verify()), daemon=True)
    verifying.start()
    assert read.wait(WAIT_S)
    go_on.set()
    verifying.join(WAIT_S)
    assert [report.problems for report in reports] == [()]
