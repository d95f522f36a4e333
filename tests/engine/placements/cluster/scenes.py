"""What tests of nodes over a real cluster have in common."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.engine import scenes
from tierstore.engine.placements.cluster.model import ClusterModel
from tierstore.engine.store import Store

OpenNode = Callable[..., Store]


def check(store: Store, table: str, keys: range, stamp: int) -> None:
    rows, found = store.model("ctr").lookup(f"{table}_id", np.array(keys), return_found=True)
    assert found.all()
    np.testing.assert_array_equal(rows, scenes.vectors(table, stamp, keys))


def member(store: Store) -> ClusterModel:
    found = store.placement.followed.existing("ctr")
    assert isinstance(found, ClusterModel)
    return found


def marks(store: Store) -> list[int]:
    """The seq of every tag of version 1, and of the pointer's mark."""
    of = member(store)
    info = of.model.catalogue.info(1)
    with store.placement.open_writer("ctr", 1, {}, info.tags) as writer:  # type: ignore[attr-defined]
        return [state.seq for state in writer.states() if state is not None] + [of.shared.pointer().marks.get(1, 0)]


def has_version(store: Store, number: int) -> bool:
    return store.model("ctr").active_version == number
