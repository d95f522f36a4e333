"""A command run in this process, and the data directories and services that commands work on."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tierstore.cli import main
from tierstore.config import ENV_PREFIX
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

ROOT = Path(__file__).parents[2]
ROWS, DIM = 300, 8
SMALL = {"host_budget": "4MiB", "load_workers": 1, "disk_threads": 2, "fold_grace_s": 0.0}


def row(stamp: int, key: int) -> list[float]:
    return [stamp + key / 8] * DIM


def write_snapshot(root: Path, version: int) -> Path:
    where = root / f"ctr-{version}"
    keys = np.arange(ROWS)
    with tierstore.SnapshotWriter(where, model="ctr", version=version, delta_seq=10) as snapshot:
        vectors = np.array([row(version, key) for key in keys.tolist()], np.float32)
        snapshot.table("item", dim=DIM).write(keys, vectors)
        snapshot.table("word", dim=2, key="string").write(["a", "b"], np.ones((2, 2), np.float32))
        snapshot.feature("item_id", table="item")
        snapshot.feature("clicked", table="item", combiner="mean")
        snapshot.feature("query", table="word")
    return where


def write_delta(root: Path, seq: int, key: int) -> Path:
    where = root / f"{seq}.arrow"
    with tierstore.DeltaWriter(where, model="ctr", seq=seq, event_time=datetime.now(UTC)) as delta:
        delta.upsert("item", np.array([key]), np.array([row(seq, key)], np.float32))
    return where


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)


@dataclass
class Run:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict:
        return json.loads(self.out)


Cli = Callable[..., Run]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process, in tmp_path, with no setting but small budgets."""
    for name in list(os.environ):
        if name.upper().startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
    for name, value in SMALL.items():
        monkeypatch.setenv(ENV_PREFIX + name.upper(), str(value))
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Run:
        monkeypatch.setattr(sys, "argv", ["tierstore", *map(str, words)])
        capfd.readouterr()
        level, handlers = logging.root.level, logging.root.handlers[:]
        with pytest.raises(SystemExit) as ended:
            main()
        logging.root.setLevel(level)  # `serve` sets up a log for its process
        logging.root.handlers[:] = handlers
        out, err = capfd.readouterr()
        return Run(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture(params=["data", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path, cli: Cli) -> Iterator[list[str]]:
    """The options that say where: a data directory, or a service that holds one open."""
    if request.param == "data":
        yield ["--data", str(tmp_path / "data")]
        return
    with (
        tierstore.open(
            tmp_path / "data", port=0, source_root=[tmp_path], export_root=tmp_path / "exports", **SMALL
        ) as store,
        ServerThread(store) as server,
    ):
        yield ["--url", server.url]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store with version 1, for what changes nothing; held open, so that it is reached by its service alone."""
    root = tmp_path_factory.mktemp("loaded")
    with tierstore.open(root / "data", port=0, source_root=[root], **SMALL) as store:
        store.load_snapshot(write_snapshot(root, 1))
        yield store
