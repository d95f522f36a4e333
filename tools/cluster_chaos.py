"""Servers of a cluster that are killed within writes: deltas, loads and switches of two nodes, with rows compared after each.

    TIERSTORE_TEST_REDIS=/path/to/server python -m tools.cluster_chaos --kills 300

Three masters without replicas, which flush each write before they acknowledge it (Redis, Valkey: `appendfsync always`; Kvrocks:
`rocksdb.write_options.sync yes`). In each round one node of two changes the model, and at a random moment of that a master is killed
(SIGKILL) and started again. What was not acknowledged is asked for again. Beside it a thread asks the other node: each answer has to be of
one state, before the change or after it. Then all rows of both nodes have to be those that a NumPy array says. Now and then a node loses
its directory and begins anew. Exit code 1 after the first wrong row.
"""

from __future__ import annotations

import argparse
import collections
import io
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tierstore
from tests.kvrocks_cluster import KvrocksCluster, KvrocksServer
from tests.redis_cluster import RedisCluster, Server, engine
from tierstore.engine.store import Store
from tierstore.errors import Conflict, Overloaded, StorageError

KEYS, DIM, ROWS = 12_000, 8, 6_000
WAIT_S = 120.0
keys = np.arange(KEYS)


class Flushing(Server):
    def _command(self) -> list[str]:
        return [*super()._command(), "--appendonly", "yes", "--appendfsync", "always"]


class FlushingKvrocks(KvrocksServer):
    def _command(self) -> list[str]:
        command = super()._command()
        with (self.directory / "kvrocks.conf").open("a") as file:
            file.write("rocksdb.write_options.sync yes\n")
        return command


class Redis(RedisCluster):
    kind = Flushing


class Kvrocks(KvrocksCluster):
    kind = FlushingKvrocks


class Chaos:
    def __init__(self, root: Path, cluster: RedisCluster, seed: int) -> None:
        self.root, self.cluster, self.chance = root, cluster, random.Random(seed)
        self.generator = np.random.default_rng(seed)
        self.stamps: dict[int, np.ndarray] = {}  # by version, of each key; 0: there is no row
        self.version, self.seq, self.stamp, self.rounds = 0, 0, 0, 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.took: dict[str, float] = {}  # by change, the seconds of one that was not refused
        self.answers = self.refused = 0
        self.nodes = [self.open("a"), self.open("b")]

    def open(self, name: str) -> Store:
        return tierstore.open(
            self.root / name, remote=self.cluster.url, host_budget="1MiB", load_workers=1, disk_threads=1,
            keep_versions=3, remote_timeout_s=10.0, remote_lease_s=2.0,
        )  # fmt: skip

    # --- what is right

    def rows(self, stamps: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(stamps), DIM), np.float32)
        rows[:, 0], rows[:, 1:] = stamps, np.where(stamps, keys[: len(stamps)], 0)[:, None]
        return rows

    def changed(self) -> tuple[Callable[[Store], Any], Callable[[], None], str]:
        """A change, what makes the reference follow it, and its name."""
        kind = self.chance.choices(["delta", "load", "switch"], [12, 2, 3])[0]
        if kind == "load" or not self.stamps:
            return self.load()
        if kind == "switch" and len(self.stamps) > 1:
            other = self.chance.choice([number for number in self.stamps if number != self.version])
            return lambda node: node.activate("ctr", other), lambda: setattr(self, "version", other), "switch"
        return self.delta()

    def delta(self) -> tuple[Callable[[Store], Any], Callable[[], None], str]:
        self.stamp += 1
        few = self.chance.random() < 0.3
        touched = self.generator.choice(KEYS, 50 if few else ROWS, replace=False)
        new, gone = touched[: -len(touched) // 10], touched[-len(touched) // 10 :]
        after = {number: stamps.copy() for number, stamps in self.stamps.items()}
        for stamps in after.values():
            stamps[new], stamps[gone] = self.stamp, 0
        delta = tierstore.DeltaWriter(io.BytesIO(), model="ctr", seq=self.seq + 1)
        some = np.zeros(KEYS, np.int64)
        some[new] = self.stamp
        delta.upsert("item", new, self.rows(some)[new])
        delta.delete("item", gone)
        data = delta.to_bytes()

        def follow() -> None:
            self.seq, self.stamps = self.seq + 1, after

        return lambda node: node.apply_delta(data), follow, "delta"

    def load(self) -> tuple[Callable[[Store], Any], Callable[[], None], str]:
        self.stamp += 1
        number, where = self.stamp, self.root / f"snapshot-{self.stamp}"
        stamps = np.where(self.generator.random(KEYS) < 0.9, self.stamp, 0)
        there = np.flatnonzero(stamps)
        with tierstore.SnapshotWriter(where, model="ctr", version=number, delta_seq=self.seq) as writer:
            writer.table("item", dim=DIM).write(there, self.rows(stamps)[there])
            writer.feature("item_id", table="item")

        def change(node: Store) -> None:
            try:
                node.load_snapshot(where)
            except Conflict:  # it is there: only the acknowledgement was lost
                if node.model("ctr").active_version != number:
                    node.activate("ctr", number)

        def follow() -> None:
            self.version = number
            self.stamps = dict([*self.stamps.items()][-2:]) | {number: stamps}
            shutil.rmtree(where)

        return change, follow, "load"

    # --- a round

    def go_on(self) -> None:
        self.rounds += 1
        change, follow, name = self.changed()
        turn = self.chance.randrange(2)
        before = self.rows(self.stamps[self.version]) if self.stamps else None
        saved = dict(self.stamps), self.version, self.seq
        node, other = self.nodes[turn], self.nodes[1 - turn]
        seen: list[tuple[np.ndarray, np.ndarray]] = []
        stopping = threading.Event()
        asking = threading.Thread(target=self._ask, args=(other, stopping, seen))
        if before is not None:
            asking.start()
        self._do(node, change, name)
        stopping.set()
        if before is not None:
            asking.join()
        follow()
        after = self.rows(self.stamps[self.version])
        for asked, answered in seen:
            if not ((before is not None and (answered == before[asked]).all()) or (answered == after[asked]).all()):
                raise AssertionError(
                    f"round {self.rounds}: an answer beside a {name} is of neither state ({saved[1:]})"
                )
        self.answers += len(seen)
        for each in self.nodes:
            self._compare(each, after, name)
        if self.chance.random() < 0.03:
            self.nodes[turn].close()
            shutil.rmtree(self.root / "ab"[turn])
            self.nodes[turn] = self.open("ab"[turn])
            self._compare(self.nodes[turn], after, "new directory")

    def _do(self, node: Store, change: Callable[[Store], Any], name: str) -> None:
        """The change on a node. Within it a master is killed and started again."""
        failed: list[BaseException] = []
        done = threading.Event()

        def work() -> None:
            try:
                change(node)
            except (Overloaded, StorageError, Conflict) as error:
                failed.append(error)
            done.set()

        victim = self.chance.choice(self.cluster.servers)
        # as long as such a change takes, a little more
        delay_s = self.chance.random() * 1.1 * self.took.get(name, 0.05)
        began_s = time.monotonic()
        thread = threading.Thread(target=work)
        thread.start()
        if done.wait(delay_s):
            self.counts[f"{name}: done before"] += 1
        else:
            victim.kill()
            self.counts[f"{name}: killed within"] += 1
            victim.start()
            self.cluster.wait_until_ok()
        thread.join()
        if not failed:
            self.took[name] = min(self.took.get(name, 10.0) * 1.2, time.monotonic() - began_s)
            return
        self.counts[f"{name}: asked for again"] += 1
        until = time.monotonic() + WAIT_S
        while True:
            try:
                change(node)
                return
            except (Overloaded, StorageError, Conflict):
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def _ask(self, node: Store, stopping: threading.Event, seen: list[tuple[np.ndarray, np.ndarray]]) -> None:
        generator = np.random.default_rng(self.rounds)
        while not stopping.wait(0.002):
            asked = generator.choice(KEYS, 40, replace=False)
            try:
                seen.append((asked, node.model("ctr").lookup("item_id", asked)))
            except (Overloaded, StorageError):
                self.refused += 1

    def _compare(self, node: Store, rows: np.ndarray, name: str) -> None:
        until, wrong = time.monotonic() + WAIT_S, -1
        while time.monotonic() < until:
            try:
                model = node.model("ctr")
                if model.active_version == self.version and min(view.seq for view in model.served.views) >= self.seq:
                    wrong = int((node.model("ctr").lookup("item_id", keys) != rows).any(axis=1).sum())
                    break
            except (tierstore.NotFound, Overloaded, StorageError, ValueError):
                pass
            time.sleep(0.02)
        if wrong:
            raise AssertionError(
                f"round {self.rounds}: after a {name} {wrong} of {KEYS:,} rows are wrong (-1: never there)"
            )

    def killed(self) -> int:
        return sum(count for name, count in self.counts.items() if name.endswith("within"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    kind = Kvrocks if engine() == "kvrocks" else Redis
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "servers").mkdir()
        cluster = kind(root / "servers", replicas=0)
        try:
            cluster.start()
            chaos = Chaos(root, cluster, arguments.seed)
            said = 0
            try:
                while chaos.killed() < arguments.kills:
                    chaos.go_on()
                    if chaos.killed() >= said + 20:
                        said = chaos.killed()
                        print(f"{engine()}: {chaos.rounds} rounds, {said} kills, {chaos.answers:,} answers beside, {chaos.refused:,} refused, {dict(chaos.counts)}", flush=True)  # fmt: skip
            except AssertionError as error:
                print(f"WRONG: {error}", flush=True)
                return 1
            finally:
                for node in chaos.nodes:
                    node.close()
        finally:
            cluster.stop()
    print(f"{engine()}: {chaos.rounds} rounds, {chaos.killed()} kills, nothing wrong, {chaos.answers:,} answers beside")
    return 0


if __name__ == "__main__":
    sys.exit(main())
