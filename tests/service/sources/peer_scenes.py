"""Nodes that have others as peers, and what is compared of them."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import httpx
import numpy as np

import tierstore
from tests.engine import scenes

from ..conftest import eventually
from ..upstream.scenes import Scene, Upstream

TABLES = ("user", "item")


@functools.cache
def stamped(seq: int) -> bytes:
    """A delta that rewrites one key in five of both tables, other ones each time, and deletes one."""
    keys = {table: range(seq % 5, scenes.ROWS[table], 5) for table in TABLES}
    upserts = {table: (of, scenes.vectors(table, seq, of)) for table, of in keys.items()}
    return scenes.delta(seq, upserts, {"item": [scenes.ROWS["item"] - 1 - seq]})


def rows(node: Upstream | str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """All rows of a node, by table, and which there are: as clients get them."""
    with tierstore.Client(node if isinstance(node, str) else node.url) as client:
        return {
            table: client.lookup(
                "ctr", f"{table}_id", np.arange(scenes.ROWS[table] + 50), return_found=True, version="stable"
            )
            for table in TABLES
        }


def assert_equal(one: Upstream | str, other: Upstream | str) -> None:
    ours, theirs = rows(one), rows(other)
    for table in TABLES:
        np.testing.assert_array_equal(ours[table][0], theirs[table][0], err_msg=table)
        np.testing.assert_array_equal(ours[table][1], theirs[table][1], err_msg=table)


def digests(node: Upstream) -> dict[int, str | None]:
    log = node.store.model("ctr").log
    return {seq: log.digest(seq) for seq in log.held()}


def last(node: Upstream) -> int | None:
    return node.store.model("ctr").log.last


def status(node: Upstream) -> dict[str, Any]:
    return node.server.service.sources["peers"].status()


def is_ready(node: Upstream) -> bool:
    return httpx.get(f"{node.url}/v2/health/ready").status_code == 200


def await_ready(node: Upstream) -> None:
    eventually(lambda: is_ready(node), f"ready, {status(node)}")


def await_problem(node: Upstream, pattern: str) -> str:
    def found() -> str | None:
        return next((text for text in status(node)["problems"] if re.search(pattern, text)), None)

    return eventually(found, f"a problem like {pattern!r}")


def two(scene: Scene, upto: int, **settings: Any) -> tuple[Upstream, Upstream]:
    """Two nodes with one snapshot and the same deltas; the second one has the first one as peer, and is away from now on."""
    first = scene.node()
    second = scene.node(**settings)
    for node in (first, second):
        node.load(1, 0)
    for seq in range(1, upto + 1):
        scene.apply(stamped(seq))
    second.stop()
    second.settings["peer"] = [first.url]
    return first, second


def await_undone(node: Upstream, *ranges: list[int]) -> None:
    eventually(lambda: node.store.status("ctr")["models"]["ctr"]["undone"] == [*ranges], f"undone: {ranges}")


def audit(node: Upstream) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (node.data / "audit/audit.jsonl").read_text().splitlines()]


def assert_problem_is_in_the_status_of(node: Upstream, text: str) -> None:
    found = httpx.get(f"{node.url}/admin/models").json()["problems"]
    assert {"model": "", "kind": "peers", "text": text} in found
