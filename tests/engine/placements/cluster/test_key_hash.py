"""Features with a hash whose rows are in a real cluster: every node answers the row of the hashed key, before and after deltas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.placements.cluster.scenes import OpenNode
from tests.hashed_keys import FEATURES, IDS, PADDING, ROWS, vectors, write_hashed
from tierstore.engine.store import Store

pytestmark = pytest.mark.usefixtures("quick_loads")


def check(store: Store, changed: dict[int, float | None]) -> None:
    """All features, with the rows of the snapshot but for those that a delta has `changed`: to that number, or None for deleted."""
    expected = {row: float(row) for row in range(ROWS)} | changed

    def values(rows: Any) -> list[float]:
        return [expected[row] or 0.0 for row in rows]

    model = store.model("ctr")
    for feature, (_, keys, rows) in FEATURES.items():
        got, found = model.lookup(feature, keys, return_found=True)
        np.testing.assert_array_equal(got, vectors(values(rows)), feature)
        assert found.tolist() == [expected[row] is not None for row in rows], feature
    by_row = FEATURES["by_seed"][2]
    sums = [sum(values(row for row in part if row != PADDING)) for part in (by_row[:2], by_row[2:])]
    np.testing.assert_array_equal(model.lookup_bags("bag", IDS, np.array([0, 2])), vectors(sums))
    np.testing.assert_array_equal(model.lookup("row", np.arange(ROWS)), vectors(values(range(ROWS))))


@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "a cache on SSD"])
def test_every_node_reads_the_rows_of_hashed_keys(open_node: OpenNode, tmp_path: Path, cached: bool) -> None:
    more = (
        {"host_budget": "16KiB", "ssd_cache": "1MiB"} if cached else {}
    )  # so little memory that every key is read from below
    nodes = [open_node(name, **more) for name in "ab"]
    nodes[0].load_snapshot(write_hashed(tmp_path / "s"))
    scenes.eventually(lambda: "ctr" in nodes[1].models() and nodes[1].model("ctr").ready, "the other serves it", 60)
    for node in nodes:
        check(node, {})
        if cached:
            node.placement.followed.ssd_cache.drain()  # type: ignore[attr-defined]
        check(node, {})
        of_item = node.status("ctr")["models"]["ctr"]["tables"]["item"]
        assert not cached or of_item["ssd_cache"]["hits"] > 0
    row, gone = FEATURES["by_seed"][2][0], FEATURES["word"][2][3]
    assert row != gone
    delta = tmp_path / "1.arrow"
    with tierstore.DeltaWriter(delta, model="ctr", seq=1) as writer:
        writer.upsert("item", [row], vectors([row], 100.0))
        writer.delete("item", [gone])
    nodes[1].apply_delta(delta)
    for node in nodes:
        scenes.eventually(lambda node=node: node.status("ctr")["models"]["ctr"]["watermark"] == 1, "the delta", 60)
        check(node, {row: row + 100.0, gone: None})
    (entry,) = nodes[0].explain("ctr", "word", ["shoe"])["keys"]
    assert (entry["code"], entry["found"]) == (gone, False)
    nodes[0].close()
    check(open_node("c", **more), {row: row + 100.0, gone: None})
