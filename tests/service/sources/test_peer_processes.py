"""Two services in processes of their own, one the peer of the other, which is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

import tierstore
from tests.counts import few_or_many
from tierstore.engine.operations import from_peers
from tierstore.formats import files

from ..conftest import eventually
from ..upstream.scenes import write_snapshot
from .peer_scenes import (
    TABLES,
    assert_equal,
    stamped,
)


class Process:
    """A service in a process of its own."""

    def __init__(self, data: Path, *options: str) -> None:
        self.data, self.options, self.port = data, options, "0"
        self.start()

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERSTORE_")}
        environment |= {
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "TIERSTORE_HOST_BUDGET": "4MiB",
            "TIERSTORE_GRPC_PORT": "off",
        }
        command = [
            sys.executable,
            "-m",
            "tierstore",
            "serve",
            "--data",
            str(self.data),
            "--port",
            self.port,
            "--source-root",
            str(self.data.parent),
        ]
        with (self.data.parent / f"{self.data.name}.log").open("a") as said:
            self.process = subprocess.Popen(
                [*command, *self.options],
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=environment,
                cwd=self.data.parent,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:([0-9]+)", line)
        assert found, (line, (self.data.parent / f"{self.data.name}.log").read_text())
        self.url, self.port = found[0], found[1]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def ready(self) -> bool:
        return httpx.get(f"{self.url}/v2/health/ready").status_code == 200

    def last(self) -> int:
        return int(httpx.get(f"{self.url}/admin/models/ctr").json()["log"]["last"])


@pytest.fixture
def processes() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def make(data: Path, *options: str) -> Process:
        made.append(Process(data, *options))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.kill()


@pytest.mark.thorough
def test_a_process_that_was_killed_while_deltas_go_on_comes_back_equal(
    tmp_path: Path, processes: Callable[..., Process]
) -> None:
    first = processes(tmp_path / "first")
    second = processes(tmp_path / "second", "--peer", first.url)
    snapshot = write_snapshot(tmp_path, 1, 0)
    for node in (first, second):
        with tierstore.Client(node.url) as client:
            client.load_snapshot(snapshot)
    ends, sent = threading.Event(), [0]

    def produce() -> None:
        with tierstore.Client(first.url) as client:
            while not ends.wait(0.02):
                client.apply_delta(stamped(sent[0] + 1))
                sent[0] += 1

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        for _ in range(few_or_many(1, 2)):
            eventually(lambda: second.last() > 0, "deltas come")
            second.kill()
            at = sent[0]
            eventually(lambda: sent[0] > at + 20, "deltas go on")  # noqa: B023
            second.start()
            eventually(second.ready, "it has caught up")
            assert second.last() > at
    finally:
        ends.set()
        producer.join()
    eventually(lambda: second.last() == sent[0], "the last delta")
    assert_equal(first.url, second.url)
    document = httpx.get(f"{second.url}/admin/models").json()
    assert document["problems"] == []


@pytest.mark.thorough
def test_a_new_process_that_is_killed_in_the_copy_and_started_again_becomes_equal(
    tmp_path: Path, processes: Callable[..., Process]
) -> None:
    first = processes(tmp_path / "first")
    where = tmp_path / "large"
    keys = np.arange(400_000)
    with tierstore.SnapshotWriter(where, model="ctr", version=1) as writer:
        for table in TABLES:
            writer.table(table, dim=32, dtype="float32").write(
                keys, np.random.default_rng(1).random((len(keys), 32), np.float32)
            )
            writer.feature(f"{table}_id", table=table)
    with tierstore.Client(first.url) as client:
        client.load_snapshot(where)
    second = processes(tmp_path / "second", "--peer", first.url)
    kills = 0
    while not second.ready():
        left = from_peers.copies_of(second.data)
        if left and files.tree_bytes(left[0]) > (kills + 1) * 20 << 20 and kills < few_or_many(1, 3):
            second.kill()
            kills += 1
            assert from_peers.copies_of(second.data)
            second.start()
    assert kills >= 1
    with tierstore.Client(first.url) as ours, tierstore.Client(second.url) as theirs:
        for table in TABLES:
            np.testing.assert_array_equal(
                ours.lookup("ctr", f"{table}_id", keys), theirs.lookup("ctr", f"{table}_id", keys)
            )
    assert second.last() == 0
