"""Two nodes over a real cluster; the one that brings deltas into it, or the server that has the log, ends in the middle of one, over and over.

`python -m tools.cluster_chaos --rounds 100 --seed 1`, from the root of the repository; needs `redis-server`.

Each round sends a delta over both tables to the other node, and ends (SIGKILL) or stops (SIGSTOP) the node that has the lease
at a random moment after that. The other one must take over and finish. A node that was stopped wakes up then, and must be
refused where it writes; one that was killed is started again. In every third round, by lot, it is the master with the log of deltas
that is killed instead, after its replica was cut off: it has acknowledged the delta, and takes it along. Other content is then sent under
its seq to both nodes until it is refused, which it must be. At the end of each round both nodes must report the same
watermark, every tag must have it, and every row must be the one that the deltas so far say. Ends with status 1 at the first
round that is not so.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tests.engine import scenes
from tests.redis_cluster import RedisCluster, free_ports, redis_cluster, wait_for
from tierstore.tiers.remote.layout import slot_of

ROOT = Path(__file__).parents[1]
WAIT_S = 300.0  # a start may take a minute and more where the machine is busy
CHANGED = 400  # keys of each table that a delta rewrites: drawn at random


class Wrong(AssertionError):
    """What must not be."""


class Node:
    """One `tierstore serve`."""

    def __init__(self, name: str, directory: Path, url: str) -> None:
        self.name, self._directory, self._url = name, directory / name, url
        self.start()

    def start(self) -> None:
        (port,) = free_ports(1)
        self.address = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "tierstore", "serve", "--data", str(self._directory), "--remote", self._url]
        command += ["--port", str(port), "--grpc-port", "off", "--source-root", str(self._directory.parent)]
        settings = {
            "REMOTE_LEASE_S": "1",
            "LOAD_WORKERS": "1",
            "HOST_BUDGET": "8MiB",
            "FOLD_GRACE_S": "0",
            "THREADS": "1",
        }
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self._directory.parent)}
        environment |= {f"TIERSTORE_{name}": value for name, value in settings.items()}
        with (self._directory.parent / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self.client = tierstore.Client(self.address)
        eventually(self.ready, f"node {self.name} is ready")

    def ready(self) -> bool:
        if self.process.poll() is not None:
            raise Wrong(f"node {self.name} ended with status {self.process.returncode}")
        return self.client.ready()

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = self.client.status("ctr")["models"]["ctr"]
        return document

    @property
    def has_lease(self) -> bool:
        return bool(self.status()["remote"]["ingester"])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


def eventually(happened: Callable[[], Any], what: str) -> Any:
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            if value := happened():
                return value
        except tierstore.TierstoreError as error:
            what_else = f" ({error})"
        else:
            what_else = ""
        if time.monotonic() > until_s:
            raise Wrong(f"not within {WAIT_S:.0f} s: {what}{what_else}")
        time.sleep(0.02)


class Chaos:
    """The nodes, and what every row must be: `stamps` by table, -1 for a key that is deleted."""

    def __init__(self, servers: RedisCluster, directory: Path, seed: int) -> None:
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.stamps = {table: np.zeros(rows, np.int64) for table, rows in scenes.ROWS.items()}
        self.servers = servers
        self.nodes = [Node(name, directory, servers.url) for name in ("a", "b")]
        self.nodes[0].client.load_snapshot(str(scenes.write_snapshot(directory)), model="ctr")
        for node in self.nodes:
            eventually(lambda node=node: node.status()["active_version"] == 1, f"node {node.name} serves version 1")

    def round(self, seq: int) -> str:
        old = eventually(lambda: next((node for node in self.nodes if node.has_lease), None), "a node has the lease")
        new = next(node for node in self.nodes if node is not old)
        delta = self._delta(seq)
        if self.random.random() < 1 / 3:
            self._lose_log(new, seq, delta)
            self._compare_all(seq)
            return f"lost the master with the log, node {new.name} had the delta"
        kill = self.random.random() < 0.5
        new.client.apply_delta(delta)
        time.sleep(self.random.random() * 0.03)
        reached = new.status()["remote"]["watermarks"].get("1", 0)
        old.signal(signal.SIGKILL if kill else signal.SIGSTOP)
        eventually(
            lambda: new.status()["remote"]["watermarks"].get("1") == seq, f"node {new.name} finishes delta {seq}"
        )
        if kill:
            old.start()
        else:
            old.signal(signal.SIGCONT)
        self._compare_all(seq)
        return f"{'killed' if kill else 'stopped'} {old.name}, {'after' if reached == seq else 'within'} the delta"

    def _lose_log(self, node: Node, seq: int, delta: bytes) -> None:
        """A delta is acknowledged by a master that ends without its replica having it, and by a node that lives on."""
        servers = self.servers
        master = servers.master_of(slot_of(b"ts:ctr"))
        wait_for(lambda: master.call("WAIT", 1, 1000), "the replica has everything so far")
        replica = servers.cut_replica(master)
        node.client.apply_delta(delta)
        servers.lose(master, replica)
        other = scenes.delta(seq, {"item": ([0], np.full((1, scenes.DIM["item"]), 7777, np.float32))})
        asked = self.random.sample(self.nodes, 2)

        def is_refused() -> bool:
            for one in asked:
                try:
                    one.client.apply_delta(other)
                except tierstore.SequenceGap:
                    return False
                except tierstore.Conflict:
                    continue
                raise Wrong(f"node {one.name} has taken other content as delta {seq}, which was acknowledged")
            return True

        eventually(is_refused, f"both nodes refuse other content as delta {seq}")
        master.start()
        servers.wait_until_ok()

    def _compare_all(self, seq: int) -> None:
        for node in self.nodes:
            eventually(lambda node=node: node.status()["watermark"] == seq, f"node {node.name} has delta {seq}")
            eventually(lambda node=node: node.status()["overlays"] == 0, f"node {node.name} has folded delta {seq}")
            self._compare(node, seq)

    def _delta(self, seq: int) -> bytes:
        upserts, deletes = {}, {}
        for table, stamps in self.stamps.items():
            keys = self.numbers.choice(len(stamps), min(CHANGED, len(stamps)), replace=False)
            gone, put = np.split(keys, [len(keys) // 10])
            stamps[put], stamps[gone] = seq, -1
            upserts[table] = put.tolist(), scenes.vectors(table, seq, put.tolist())
            deletes[table] = gone.tolist()
        return scenes.delta(seq, upserts, deletes)

    def _compare(self, node: Node, seq: int) -> None:
        for table, stamps in self.stamps.items():
            keys = np.arange(len(stamps))
            # a moment of catching up is said with an error, never answered
            rows, found = eventually(
                lambda keys=keys, table=table: node.client.lookup("ctr", f"{table}_id", keys, return_found=True), "rows"
            )
            expected = ((stamps % 16) * 64 + keys % 64).astype(np.float32) * (stamps >= 0)
            if not np.array_equal(found, stamps >= 0) or not (rows == expected[:, None]).all():
                wrong = int(np.count_nonzero((found != (stamps >= 0)) | (rows != expected[:, None]).any(axis=1)))
                raise Wrong(f"delta {seq}: node {node.name} answers {wrong} of {len(keys)} rows of {table} otherwise")

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after so many")
    options = parser.parse_args()
    began_s = time.monotonic()
    with redis_cluster() as servers, tempfile.TemporaryDirectory(prefix="tierstore-chaos-") as directory:
        chaos = Chaos(servers, Path(directory), options.seed)
        done = 0
        try:
            for seq in range(1, options.rounds + 1):
                if time.monotonic() - began_s > options.seconds:
                    break
                print(f"round {seq}: {chaos.round(seq)}", flush=True)
                done = seq
        except Wrong as error:
            print(f"round {done + 1}: {error}", flush=True)
            for node in chaos.nodes:
                print(f"--- node {node.name}\n{(Path(directory) / f'{node.name}.log').read_text()[-3000:]}")
            return 1
        finally:
            chaos.close()
    print(f"{done} rounds, every row right on both nodes after each, {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
