"""A progress callback that calls back: refused where it would wait for itself, or change the switch under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tierstore.errors import Conflict
from tierstore.types import Progress

pytestmark = pytest.mark.usefixtures("quick_loads")

ROWS = {"user": 20, "item": 40}
BEHIND = 6  # deltas, more than are left for the last step of a switch
Verb = Callable[[tierstore.Store, Callable[[Progress], None]], object]


def started(store: tierstore.Store, root: Path) -> None:
    """Versions 1, kept, 2, active, and 3, kept; deltas that the kept ones lack. A snapshot of version 4 beside."""
    for version in (1, 2, 3, 4):
        where = scenes.write_snapshot(root, version, stamp=version, rows=ROWS)
        if version < 4:
            store.load_snapshot(where, activate=version < 3)
    for seq in range(1, BEHIND + 1):
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))


def in_time(work: Callable[[], object]) -> None:
    """Do it on a thread of its own: a test that waits for itself is to fail, not to wait."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits for itself"
    if failed:
        raise failed[0]


VERBS: dict[str, Verb] = {
    "activate": lambda store, progress: store.activate("ctr", 1, progress=progress),
    "rollback": lambda store, progress: store.rollback("ctr", progress=progress),
    "canary": lambda store, progress: store.canary("ctr", 3, progress=progress),
    "load": lambda store, progress: store.load_snapshot(
        store.settings.data.parent / "ctr-4", progress=lambda step: step.phase in SWITCH and progress(step)
    ),
}
SWITCH = {"catch up", "warm", "switch"}


def refused(store: tierstore.Store) -> dict[str, Callable[[], object]]:
    source = store.settings.data.parent / "ctr-4"
    return {
        "activate the one that serves": lambda: store.activate("ctr", 2),
        "activate": lambda: store.activate("ctr", 3),
        "rollback": lambda: store.rollback("ctr"),
        "canary": lambda: store.canary("ctr", 1),
        "promote": lambda: store.promote("ctr"),
        "deactivate": lambda: store.deactivate("ctr"),
        "drop": lambda: store.drop("ctr", 1),
        "load": lambda: store.load_snapshot(source),
        "load and keep": lambda: store.load_snapshot(source, activate=False),
        "verify": lambda: store.verify(),
        "close": lambda: store.close(),
    }


@pytest.mark.thorough
@pytest.mark.parametrize("verb", VERBS)
def test_what_would_wait_for_the_switch_is_refused_in_each_of_its_phases_and_the_switch_goes_on(store, tmp_path, verb):
    started(store, tmp_path)
    seen: dict[str, set[str]] = {}
    threads: set[threading.Thread] = set()

    def callback(step: Progress) -> None:
        if step.phase in seen:
            return
        seen[step.phase] = set()
        threads.add(threading.current_thread())
        for name, call in refused(store).items():
            try:
                call()
            except Conflict as error:
                assert "progress callback cannot" in str(error)  # noqa: PT017
                seen[step.phase].add(name)

    in_time(lambda: VERBS[verb](store, callback))
    assert seen == {phase: set(refused(store)) for phase in SWITCH}
    assert len(threads) == 2, "warming is on a thread of its own"
    active = {"activate": 1, "rollback": 1, "canary": 2, "load": 4}[verb]
    ctr = store.model("ctr")
    assert ctr.served.versions == ((2, 3) if verb == "canary" else (active,))
    np.testing.assert_array_equal(
        ctr.lookup("item_id", [BEHIND], version=active), scenes.vectors("item", BEHIND, [BEHIND])
    )
    assert (ctr.problem, store.verify().problems) == (None, ())
    store.drop("ctr", 3 if verb in ("activate", "rollback") else 1)  # from outside it is done; a load drops 3 by itself


def test_what_a_callback_lets_through_ends_the_switch_and_nothing_has_changed(store, tmp_path):
    started(store, tmp_path)

    def drop(step: Progress) -> None:
        if step.phase == "warm":
            store.drop("ctr", 3)

    with pytest.raises(Conflict, match="progress callback cannot change the model it reports on"):
        in_time(lambda: store.activate("ctr", 1, progress=drop))
    assert store.model("ctr").active_version == 2
    store.activate("ctr", 1)


def test_what_waits_for_no_switch_works_within_a_callback(store, tmp_path):
    started(store, tmp_path)
    store.canary("ctr", 3, 0.1)
    ctr, phases = store.model("ctr"), []

    def callback(step: Progress) -> None:
        if step.phase in phases:
            return
        phases.append(step.phase)
        seq = BEHIND + len(phases)
        store.apply_delta(scenes.stamped(seq, {"item": [0]}))
        np.testing.assert_array_equal(ctr.lookup("item_id", [0], version=2), scenes.vectors("item", seq, [0]))
        store.canary("ctr", 3, 0.2)
        store.label("ctr", "trial", 3)
        store.unlabel("ctr", "trial")
        assert store.status("ctr")["models"]["ctr"]["watermark"] == seq

    in_time(lambda: store.activate("ctr", 1, progress=callback))
    assert set(phases) == SWITCH
    assert ctr.served.versions == (1,)


def test_while_a_load_builds_other_versions_may_be_switched_and_dropped_from_its_callback(open_store, tmp_path):
    store = open_store(keep_versions=9)  # nothing for housekeeping to drop
    started(store, tmp_path)
    built: list[str] = []

    def callback(step: Progress) -> None:
        if step.phase not in SWITCH and not built:
            built.append(step.phase)
            store.activate("ctr", 3)
            store.drop("ctr", 1)

    in_time(lambda: store.load_snapshot(tmp_path / "ctr-4", progress=callback))
    assert built
    assert store.model("ctr").versions == [2, 3, 4]


def test_a_callback_of_verify_changes_nothing(store, tmp_path):
    started(store, tmp_path)
    done: list[str] = []

    def callback(step: Progress) -> None:
        with pytest.raises(Conflict):
            store.drop("ctr", 1)
        done.append(step.phase)

    in_time(lambda: store.verify(callback))
    assert set(done) == {f"verify ctr {version}" for version in (1, 2, 3)}
    assert store.model("ctr").versions == [1, 2, 3]
