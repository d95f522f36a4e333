"""Nodes over engines of the same protocol that differ from Redis where the protocol leaves it open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine import scenes
from tests.engine.placements.cluster.scenes import OpenNode, check, has_version
from tests.redis_cluster import needs_engine
from tierstore.tiers.cluster.topology import Cluster

pytestmark = pytest.mark.usefixtures("quick_loads")


def without_empty(reply: Any) -> Any:
    """A reply with nil in place of each empty value."""
    if isinstance(reply, dict):
        return {name: without_empty(value) for name, value in reply.items()}
    if isinstance(reply, (list, tuple)):
        return type(reply)(without_empty(value) for value in reply)
    return None if reply == b"" else reply


@needs_engine("redis", "valkey", reason="Kvrocks is asked itself, by all tests")
def test_nil_is_taken_for_an_empty_value(open_node: OpenNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kvrocks answers so for the fields of a stream's entry."""
    call, met = Cluster.call, list[str]()

    def call_of_such_an_engine(self: Cluster, *words: Any) -> Any:
        whole = call(self, *words)
        reply = without_empty(whole)
        if reply != whole:
            met.append(str(words[0]))
        return reply

    monkeypatch.setattr(Cluster, "call", call_of_such_an_engine)
    a, b = open_node("a"), open_node("b")
    a.load_snapshot(scenes.write_snapshot(tmp_path))
    for seq in (1, 2):
        a.apply_delta(scenes.stamped(seq, {"item": range(10 * seq)}))
    for node in (a, b):
        scenes.eventually(lambda node=node: "ctr" in node.models() and has_version(node, 1), "all serve it", 60)
        scenes.eventually(lambda node=node: node.status()["models"]["ctr"]["watermark"] == 2, "all have both", 60)
        scenes.eventually(lambda node=node: node.status()["models"]["ctr"]["overlays"] == 0, "they are folded", 60)
        check(node, "item", range(20), 2)
    assert {"XRANGE", "HGETALL"} <= {*met}, "empty values were met, or this shows nothing"
