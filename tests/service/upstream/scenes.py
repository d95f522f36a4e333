"""Nodes with rows over HTTP, each with all or with a share of the partitions, and fronts of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tests.engine import scenes
from tests.service.conftest import settings_for
from tierstore.engine.store import Store
from tierstore.formats.keys import partition_of
from tierstore.service.server import ServerThread

COUNT = 8  # partitions
KEYS = range(1000)  # of the table `item`
NO_CACHE = "16KiB"  # so little memory that no table has a host tier: every key is read from a node


def of_share(keys: np.ndarray, own: tuple[int, int] | None) -> np.ndarray:
    """The keys whose partition is one of `own`, first to last."""
    if own is None:
        return keys
    partitions = partition_of(keys, COUNT)
    return keys[(partitions >= own[0]) & (partitions <= own[1])]


def write_snapshot(root: Path, version: int, stamp: int, **options: Any) -> Path:
    """The snapshot of `scenes`."""
    where = root / f"ctr-{version}"
    with tierstore.SnapshotWriter(where, model="ctr", version=version, **options) as writer:
        for table in ("user", "item"):
            keys = np.arange(scenes.ROWS[table], dtype=np.int64)
            writer.table(table, dim=scenes.DIM[table]).write(keys, scenes.vectors(table, stamp, keys))
        writer.feature("user_id", table="user")
        writer.feature("item_id", table="item")
        writer.feature("clicked", table="item", combiner="mean", padding_key=0)
        writer.warmup("item", np.arange(32, dtype=np.int64))
    return where


class Upstream:
    """One node, which owns the partitions `own`, first to last, or all of them."""

    def __init__(self, root: Path, number: int, own: tuple[int, int] | None, settings: dict[str, Any]) -> None:
        self.root, self.number, self.own, self.port, self.settings = root, number, own, 0, settings
        self.data = root / f"node-{number}"
        self.start()

    def start(self) -> None:
        share = {} if self.own is None else {"partition": f"{self.own[0]}-{self.own[1]}/{COUNT}"}
        more = {"grpc_port": "off", "fold_grace_s": 0.0} | share | self.settings
        settings = settings_for(self.root, data=self.data, port=self.port, **more)
        self.store = Store(settings)
        self.server = ServerThread(self.store)
        self.server.__enter__()
        self.url = self.server.url
        self.port = int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        if self.store is not None:
            self.server.__exit__(None, None, None)
            self.store.close()
            self.store = None  # type: ignore[assignment]

    def load(self, version: int, stamp: int, *, activate: bool = True, **options: Any) -> None:
        self.store.load_snapshot(write_snapshot(self.data, version, stamp, **options), activate=activate)


class Scene:
    """Nodes and fronts, closed at the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes: list[Upstream] = []
        self.fronts: list[Store] = []

    def node(self, own: tuple[int, int] | None = None, **settings: Any) -> Upstream:
        self.nodes.append(Upstream(self.root, len(self.nodes), own, settings))
        return self.nodes[-1]

    def quarters(self, version: int = 1, stamp: int = 0) -> list[Upstream]:
        for at in range(0, COUNT, 2):
            self.node((at, at + 1)).load(version, stamp)
        return self.nodes

    def front(self, **settings: Any) -> Store:
        urls = ",".join(node.url for node in self.nodes)
        options = {"host_budget": "4MiB", "disk_threads": 2, "fold_grace_s": 0.0, "remote_timeout_s": 20.0} | settings
        store = tierstore.open(self.root / f"front-{len(self.fronts)}", upstream=urls, **options)
        self.fronts.append(store)
        return store

    def apply(self, delta: bytes) -> None:
        for node in self.nodes:
            node.store.apply_delta(delta)

    def close(self) -> None:
        for store in self.fronts:
            store.close()
        for node in self.nodes:
            node.stop()


def check(store: Store, table: str, keys: Any, stamp: int) -> None:
    keys = np.array(keys)
    rows, found = store.model("ctr").lookup(f"{table}_id", keys, return_found=True)
    assert found.all()
    np.testing.assert_array_equal(rows, scenes.vectors(table, stamp, keys))


def watermark(store: Store) -> int:
    return int(store.status("ctr")["models"]["ctr"]["watermark"])


def await_watermark(store: Store, seq: int) -> None:
    scenes.eventually(lambda: watermark(store) >= seq, f"delta {seq} is visible at the front")
