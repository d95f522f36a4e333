"""Who reads what is served, as background work sees it."""

from __future__ import annotations

from pathlib import Path

from tests.engine import scenes
from tierstore.engine.store import Store


def test_a_request_is_under_way_until_it_leaves_and_other_readers_are_none(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    publisher = store.model("ctr").publisher
    assert not publisher.under_way()
    with publisher.hold_all() as served:
        assert served.views[0].readers == 1
        assert not publisher.under_way()
        view = publisher.acquire()
        assert publisher.under_way()
    assert publisher.under_way()
    publisher.release(view)
    assert not publisher.under_way()
    assert view.readers == 0


def test_a_request_is_seen_beside_work_that_reads_what_was_served_before(store: Store, tmp_path: Path) -> None:
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    publisher = store.model("ctr").publisher
    assert not publisher.under_way()
    with publisher.hold_all():
        assert not publisher.under_way()
        store.apply_delta(scenes.stamped(1, {"item": [1]}))
        assert not publisher.under_way()
        with store.model("ctr").view():
            assert publisher.under_way()
        assert not publisher.under_way()
    assert not publisher.under_way()
