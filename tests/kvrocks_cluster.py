"""A real cluster of Apache Kvrocks for tests, in place of Redis's (`tests/redis_cluster.py`): its servers take their topology from outside.

Where it is deployed kvrocks-controller does that; here a thread does: it gives every server that starts the topology, and puts the
replica of a master that was killed in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tests.redis_cluster import NODE_TIMEOUT_MS, SLOTS, RedisCluster, Server, free_ports, raw, wait_for


class KvrocksServer(Server):
    """One `kvrocks` process."""

    def _command(self) -> list[str]:
        assert self.tls is None, "tests of TLS look into the server for OpenSSL"
        settings = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": self.directory,
            "log-dir": self.directory,
            "pidfile": self.directory / "pid",
            "daemonize": "no",
            "workers": 2,
            "cluster-enabled": "yes" if self.in_cluster else "no",
            "rocksdb.block_cache_size": 64,
            "rocksdb.write_buffer_size": 16,
        }
        if self.password:
            settings |= {"requirepass": self.password, "masterauth": self.password}
        file = self.directory / "kvrocks.conf"
        file.write_text("".join(f"{name} {_quoted(str(value))}\n" for name, value in settings.items()))
        return [str(self.program), "-c", str(file)]

    def is_master(self) -> bool:
        return self.call("ROLE")[0] == b"master"

    @property
    def written(self) -> int:
        """The number of its last write, or of its master's that it has."""
        role = self.call("ROLE")
        return int(role[1] if role[0] == b"master" else role[4])


class KvrocksCluster(RedisCluster):
    """The topology is guarded by `_lock`: by server the slots that it has, or the server that it is a replica of."""

    kind = KvrocksServer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._version = 0
        self._slots: dict[int, set[int]] = {}
        self._master_of: dict[int, int] = {}
        self._watching = threading.Thread(target=self._watch, name="kvrocks-controller", daemon=True)

    def start(self) -> None:
        count = self.masters_count
        for number, server in enumerate(self.servers):
            server.start()
            server.node_id = f"{number:040x}"
            server.call("CLUSTERX", "SETNODEID", server.node_id)
        for number in range(count):
            self._slots[number] = {*range(SLOTS * number // count, SLOTS * (number + 1) // count)}
        self._master_of = {number: number % count for number in range(count, len(self.servers))}
        self._publish()
        self.wait_until_ok()
        self._watching.start()

    def stop(self) -> None:
        self._ended.set()
        if self._watching.is_alive():
            self._watching.join()
        super().stop()

    def wait_until_ok(self, seconds: float = 60.0) -> None:
        def ok() -> bool:
            with self._lock:
                for server in self.running():
                    if int(server.call("CLUSTERX", "VERSION")) != self._version:
                        return False
                    role = server.call("ROLE")
                    if role[0] == b"slave" and role[3] != b"connected":
                        return False
                return len(self.masters()) == self.masters_count

        wait_for(ok, "the cluster to be whole", seconds)

    def move_slot(self, slot: int, target: Server, *, before_end: Callable[[], None] | None = None) -> None:
        """Kvrocks moves all keys of a slot as one: `before_end` is called until they have arrived, at least twice."""
        source, done = self.master_of(slot), False
        source.call("CLUSTERX", "MIGRATE", slot, target.node_id, "ASYNC")
        steps = 0
        while not done or (before_end is not None and steps < 2):
            said = raw(source, "CLUSTER", "INFO")
            assert b"migrating_state: fail" not in said, said
            done = f"migrating_slot(s): {slot}".encode() in said and b"migrating_state: success" in said
            if before_end is not None:
                before_end()
            steps += 1
        with self._lock:
            self._slots[source.number].remove(slot)
            self._slots[target.number].add(slot)
            self._publish()

    def replicate(self, masters: Sequence[Server] | None = None) -> None:
        for master in self.masters() if masters is None else masters:
            replica, upto = self._replica_of(master), master.written  # type: ignore[attr-defined]
            wait_for(
                lambda replica=replica, upto=upto: replica.written >= upto, "the replica to have everything so far"
            )

    def cut_replica(self, master: Server) -> Server:
        """The replica is told that its master is where nothing listens."""
        replica = self._replica_of(master)
        with self._lock:
            self._version += 1
            replica.call("CLUSTERX", "SETNODES", self._topology({master.number: free_ports(1)[0]}), self._version)
        wait_for(lambda: replica.call("ROLE")[3] != b"connected", "the replica to be cut off")
        return replica

    def join_replica(self, replica: Server) -> None:
        with self._lock:
            self._publish()

    def _replica_of(self, master: Server) -> Server:
        return next(one for one in self.running() if self._master_of.get(one.number) == master.number)

    def _topology(self, ports: dict[int, int] | None = None) -> str:
        """As CLUSTERX SETNODES takes it. `ports`: other ones than those of the servers."""
        lines = []
        for server in self.servers:
            here = f"{server.node_id} 127.0.0.1 {(ports or {}).get(server.number, server.port)}"
            if server.number in self._master_of:
                lines.append(f"{here} slave {self.servers[self._master_of[server.number]].node_id}")
            else:
                lines.append(f"{here} master - {_ranges(self._slots[server.number])}".rstrip())
        return "\n".join(lines)

    def _publish(self) -> None:
        with self._lock:
            self._version += 1
            for server in self.running():
                server.call("CLUSTERX", "SETNODES", self._topology(), self._version)

    def _watch(self) -> None:
        """Failover, and the topology for servers that have started again."""
        while not self._ended.wait(NODE_TIMEOUT_MS / 4000):
            with suppress(Exception), self._lock:  # a server that is stopped, or ends just now, is asked again
                self._fail_over()
                for server in self.running():
                    if int(server.call("CLUSTERX", "VERSION")) < self._version:
                        server.call("CLUSTERX", "SETNODEID", server.node_id)
                        server.call("CLUSTERX", "SETNODES", self._topology(), self._version)

    def _fail_over(self) -> None:
        for gone in [self.servers[number] for number, slots in self._slots.items() if slots]:
            heirs = [one for one in self.running() if self._master_of.get(one.number) == gone.number]
            if gone.process is None and heirs:
                heir = heirs[0]
                self._slots[heir.number] = self._slots.pop(gone.number)
                del self._master_of[heir.number]
                self._master_of |= {one.number: heir.number for one in (gone, *heirs[1:])}
                self._publish()


def _ranges(slots: set[int]) -> str:
    """Slots as `0-99 101 200-300`."""
    ends = [slot for slot in sorted(slots) if slot + 1 not in slots]
    begins = [slot for slot in sorted(slots) if slot - 1 not in slots]
    return " ".join(f"{low}-{high}" if low < high else str(low) for low, high in zip(begins, ends, strict=True))


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if set(value) & set(' "\\') else value
