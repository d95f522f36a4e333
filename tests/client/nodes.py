"""Real stores behind real servers: several nodes that should serve the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tierstore
from tierstore.config import ENV_PREFIX
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

ITEMS, DIM = 400, 4
SMALL: dict[str, Any] = {
    "host_budget": "4MiB",
    "load_workers": 1,
    "disk_threads": 1,
    "fold_grace_s": 0.0,
    "drain_s": 0.0,
}


def row(version: int, key: int) -> list[float]:
    return [version * 1000.0 + key] * DIM


def write_version(root: Path, version: int, *, name: str = "ctr", shift: int = 0) -> Path:
    where = root / f"{name}-{version}-{shift}"
    with tierstore.SnapshotWriter(where, model=name, version=version, delta_seq=5) as snapshot:
        rows = np.array([row(version + shift, key) for key in range(ITEMS)], np.float32)
        snapshot.table("item", dim=DIM).write(np.arange(ITEMS), rows)
        snapshot.table("word", dim=2, key="string").write(["a", "b", "c"], np.ones((3, 2), np.float32))
        snapshot.feature("item_id", table="item")
        snapshot.feature("query", table="word")
    return where


def write_change(root: Path, seq: int, keys: npt.ArrayLike, value: float) -> Path:
    where = root / f"{seq}-{value}.arrow"
    keys = np.asarray(keys)
    with tierstore.DeltaWriter(where, model="ctr", seq=seq, event_time=datetime.now(UTC)) as delta:
        delta.upsert("item", keys, np.full((len(keys), DIM), value, np.float32))
    return where


@dataclass
class Node:
    store: Store
    server: ServerThread

    @property
    def url(self) -> str:
        return self.server.url


@contextmanager
def nodes(root: Path, count: int, **settings: Any) -> Iterator[list[Node]]:
    with ExitStack() as stack:
        made = []
        for number in range(count):
            options = SMALL | {"port": 0, "grpc_port": "off", "source_root": [root]} | settings
            store = stack.enter_context(tierstore.open(root / f"node-{number}", **options))
            made.append(Node(store, stack.enter_context(ServerThread(store))))
        yield made


@contextmanager
def process(root: Path, name: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A node in a process of its own, which may be killed: its URL and the process."""
    environment = {key: value for key, value in os.environ.items() if not key.upper().startswith(ENV_PREFIX)}
    environment |= {f"{ENV_PREFIX}{key.upper()}": str(value) for key, value in SMALL.items()}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [
        sys.executable,
        "-m",
        "tierstore",
        "serve",
        "--port",
        "0",
        "--grpc-port",
        "off",
        "--data",
        str(root / name),
    ]
    command += ["--source-root", str(root)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        try:
            line = service.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, line
            yield found.group(), service
        finally:
            service.kill()
