"""A canary after a restart: there again, or, where it cannot be opened, on record until somebody says otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.serving.test_canary import KEYS, both, rows
from tierstore.engine.serving.document import SavedRoutes, read_document
from tierstore.errors import Conflict

pytestmark = pytest.mark.usefixtures("quick_loads")


def recorded(store: tierstore.Store) -> SavedRoutes:
    """What the next start serves."""
    return read_document(store.model("ctr").where, "ctr").routes


def test_canary_share_and_labels_are_there_again_after_a_restart(open_store, tmp_path):
    store = open_store(fold_grace_s=60)
    both(store, tmp_path, share=0.25)
    store.label("ctr", "trial", 2)
    store.label("ctr", "holdout", 1)
    store.apply_delta(scenes.stamped(1, {"item": KEYS}))
    before = store.model("ctr").served
    store.close()
    store = open_store()
    after = store.model("ctr").served
    assert (after.versions, after.share, after.all_labels()) == (before.versions, 0.25, before.all_labels())
    for version in ("stable", "trial"):
        np.testing.assert_array_equal(rows(store.model("ctr"), version), scenes.vectors("item", 1, KEYS))
    store.promote("ctr")
    store.close()
    store = open_store()
    assert store.model("ctr").served.all_labels() == {"stable": 2, "trial": 2}
    store.unlabel("ctr", "trial")
    assert not recorded(store).labels


def test_a_canary_that_is_damaged_at_start_is_reported_and_can_be_withdrawn(open_store, tmp_path):
    store = open_store()
    ctr = both(store, tmp_path)
    store.label("ctr", "trial", 2)
    store.close()
    (ctr.where.version(2).db / "CURRENT").write_bytes(b"no such manifest\n")
    store = open_store()
    ctr = store.model("ctr")
    assert ctr.served.all_labels() == {"stable": 1}
    assert "version 2, is not served" in ctr.problem
    assert recorded(store).canary == 2, "the next start may have more luck"
    assert store.withdraw("ctr") == 2
    assert ctr.problem is None
    assert recorded(store) == SavedRoutes(1)


def not_there(open_store, root: Path) -> tuple[tierstore.Store, Path, bytes]:
    """A store whose canary, version 1, older than what is active, could not be opened at its start; what mends it."""
    store = open_store(keep_versions=0)
    for version in (3, 1):
        store.load_snapshot(scenes.write_snapshot(root, version, stamp=version), activate=version == 3)
    store.canary("ctr", 1, 0.25)
    for name, version in (("trial", 1), ("other", 1), ("holdout", 3)):
        store.label("ctr", name, version)
    damaged = store.model("ctr").where.version(1).db / "CURRENT"
    store.close()
    content = damaged.read_bytes()
    damaged.write_bytes(b"no such manifest\n")
    return open_store(keep_versions=0), damaged, content


@pytest.mark.parametrize("again", ["restart", "canary"])
def test_a_canary_that_could_not_be_opened_stays_on_record_whatever_labels_are_changed(open_store, tmp_path, again):
    store, damaged, content = not_there(open_store, tmp_path)
    store.label("ctr", "mine", 3)
    store.unlabel("ctr", "holdout")
    store.unlabel("ctr", "other")  # of the canary that is not there
    store.label("ctr", "trial", 3)
    store.label("ctr", "trial2", 3)
    ctr = store.model("ctr")
    assert ctr.served.all_labels() == {"stable": 3, "mine": 3, "trial": 3, "trial2": 3}
    assert "version 1, is not served" in ctr.problem
    with pytest.raises(Conflict, match="no canary: the canary, version 1, is not served"):
        store.promote("ctr")
    with pytest.raises(Conflict, match="is the canary; withdraw it first"):
        store.drop("ctr", 1)
    with ctr.state.switch:
        ctr.drops.drop_surplus()
    assert ctr.versions == [1, 3]
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2), activate=False)
    with pytest.raises(Conflict, match=r"version 1, is not served: .*; withdraw it first"):
        store.canary("ctr", 2)
    store.unlabel("ctr", "trial2")
    damaged.write_bytes(content)
    if again == "canary":
        store.canary("ctr", 1, 0.25)
    else:
        store.close()
        store = open_store(keep_versions=9)
    ctr = store.model("ctr")
    assert (ctr.served.versions, ctr.served.share, ctr.problem) == ((3, 1), 0.25, None)
    assert ctr.served.all_labels() == {"stable": 3, "canary": 1, "mine": 3, "trial": 3}


def test_labels_of_a_canary_that_could_not_be_opened_come_back_with_it(open_store, tmp_path):
    store, damaged, content = not_there(open_store, tmp_path)
    store.label("ctr", "mine", 3)
    with pytest.raises(tierstore.TierstoreError):
        store.canary("ctr", 1, 0.5)
    damaged.write_bytes(content)
    store.canary("ctr", 1, 0.5)
    everything = {"stable": 3, "canary": 1, "holdout": 3, "mine": 3, "other": 1, "trial": 1}
    assert store.model("ctr").served.all_labels() == everything
    store.close()
    assert open_store().model("ctr").served.all_labels() == everything


def test_withdrawing_a_canary_that_could_not_be_opened_frees_its_version(open_store, tmp_path):
    store, _, _ = not_there(open_store, tmp_path)
    assert store.withdraw("ctr") == 1
    assert store.model("ctr").problem is None
    store.drop("ctr", 1)
    store.close()
    assert open_store().model("ctr").served.all_labels() == {"stable": 3, "holdout": 3}
