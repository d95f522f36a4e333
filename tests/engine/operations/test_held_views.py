"""Views that a node holds for those in front of it: no longer than these ask, and of no model that is gone."""

from __future__ import annotations

import weakref

import pytest

from tests.engine import scenes
from tests.engine.scenes import eventually
from tierstore.engine.operations import fronts as module
from tierstore.engine.operations.fronts import Fronts

pytestmark = pytest.mark.usefixtures("quick_loads")


def test_a_model_that_nobody_in_front_asks_for_is_forgotten(store, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.001)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    view = store.model("ctr").served.active
    fronts = Fronts(store.models, store.model)
    held = weakref.ref(fronts.held("ctr"))
    assert view.readers == 1
    assert fronts.held("ctr") is held()
    monkeypatch.setattr(module, "GONE_S", 0.0)
    eventually(lambda: fronts._thread is None, "nothing is held any more")
    assert view.readers == 0
    assert held() is None
    monkeypatch.setattr(module, "GONE_S", 60.0)
    fronts.held("ctr")
    assert view.readers == 1, "whoever asks again finds it"
    fronts.close()
    assert view.readers == 0
