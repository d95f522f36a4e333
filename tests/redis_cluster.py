"""A real Redis Cluster for tests: three masters with a replica each, on free loopback ports, in a temporary directory.

    @pytest.fixture(scope="module")
    def cluster() -> Iterator[RedisCluster]:
        with redis_cluster() as cluster:
            yield cluster

TIERSTORE_TEST_REDIS names another server than that on the PATH, such as Valkey's (`make test-valkey`) or Kvrocks's (`make test-kvrocks`,
`tests/kvrocks_cluster.py`). `cluster.url` is what `--remote` and `connect` take. Start and restart servers from the main thread: the kernel ends each
of them when the thread that started it ends, so that none is left behind by a test run that was killed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.certificates import Authority, Pair

# taken out of the environment, where settings of the store begin like this
SERVER = os.environ.pop("TIERSTORE_TEST_REDIS", None) or shutil.which("redis-server") or shutil.which("valkey-server")
SLOTS = 16384
WAIT_S = 60.0
NODE_TIMEOUT_MS = 2000
PORTS_TRIED = 5
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@functools.cache
def engine(program: str | None = SERVER) -> str:
    """What a program of servers is: `redis`, `valkey` or `kvrocks`."""
    said = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=60).stdout.lower()
    return next((name for name in ("kvrocks", "valkey") if name in said), "redis")


def needs_engine(*names: str, reason: str) -> pytest.MarkDecorator:
    """Marks a test of what only these engines have."""
    return pytest.mark.skipif(SERVER is not None and engine() not in names, reason=reason)


class ServerEnded(RuntimeError):
    """A server that ended while it was started, most often as another process has one of its ports."""


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Distinct ports that nothing listens on at this moment, below those that the system gives to clients."""
    held: dict[int, socket.socket] = {}
    with ExitStack() as stack:
        while len(held) < count:
            one, port = stack.enter_context(socket.socket()), random.SystemRandom().randrange(10_000, 32_000)
            with suppress(OSError):  # somebody has it
                one.bind(("127.0.0.1", port))
                held[port] = one
        return list(held)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    """The first true value of `condition`, asked 20 times a second. An error of the client counts as false."""
    import redis

    deadline = time.monotonic() + seconds
    while True:
        with suppress(redis.RedisError, OSError):
            if value := condition():
                return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds:.0f} s still waiting for {what}")
        time.sleep(0.05)


@dataclass
class Server:
    """One `redis-server` process."""

    number: int
    port: int
    bus_port: int
    directory: Path
    password: str | None = None
    in_cluster: bool = True
    tls: Pair | None = None
    authority: Path | None = None
    program: str | None = SERVER
    process: subprocess.Popen[bytes] | None = None
    node_id: str = ""
    _has_port: bool = field(default=False, repr=False)  # others have been told of it
    _client: Any = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def client(self) -> Any:
        """redis-py's client of this server alone."""
        if self._client is None:
            self._client = self._new_client(socket_timeout=10)
        return self._client

    def _new_client(self, **options: Any) -> Any:
        import redis

        where = {"host": "127.0.0.1", "port": self.port, "password": self.password, "protocol": 2}
        return redis.Redis(**where, **self._tls_options(), **options)

    def _tls_options(self) -> dict[str, Any]:
        return {"ssl": True, "ssl_ca_certs": str(self.authority)} if self.tls else {}

    def call(self, *words: Any) -> Any:
        return self.client.execute_command(*words)

    def _command(self) -> list[str]:
        command = [
            str(self.program),
            "--tls-port" if self.tls else "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.directory),
        ]
        command += ["--cluster-enabled", "yes" if self.in_cluster else "no", "--cluster-port", str(self.bus_port)]
        command += ["--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--cluster-config-file", "nodes.conf"]
        command += ["--save", "", "--appendonly", "no", "--enable-debug-command", "yes", "--daemonize", "no"]
        command += ["--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0", "--loglevel", "notice"]
        command += ["--logfile", str(self.directory / "log"), "--protected-mode", "no"]
        if self.password:
            command += ["--requirepass", self.password, "--masterauth", self.password]
        if self.tls:
            command += ["--port", "0", "--tls-cluster", "yes", "--tls-replication", "yes", "--tls-auth-clients", "no"]
            command += ["--tls-cert-file", str(self.tls.cert), "--tls-key-file", str(self.tls.key)]
            command += ["--tls-ca-cert-file", str(self.authority)]
        return command

    def start(self) -> None:
        """Start it; for the first time on other ports, where another process has taken one of its own meanwhile."""
        for _ in range(0 if self._has_port else PORTS_TRIED - 1):
            with suppress(ServerEnded):
                return self._start()
            self.port, self.bus_port = free_ports(2)
        return self._start()

    def _start(self) -> None:
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        process = self.process = subprocess.Popen(
            self._command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=end_with_parent,
        )

        def answers() -> bool:
            """Whether it answers itself: somebody else may have its port, who says nothing, or is another server."""
            if process.poll() is not None:
                self.process = None
                raise ServerEnded(f"the server on {self.address} ended with {process.returncode}: {self._said()}")
            with self._new_client(socket_timeout=2, retry=Retry(NoBackoff(), 0)) as client:
                return int(client.info("server")["process_id"]) == process.pid

        wait_for(answers, f"the server on {self.address}; its log is in {self.directory}")
        self._has_port = True

    def _said(self) -> str:
        """The end of its log."""
        log = self.directory / "log"
        return log.read_text(errors="replace")[-500:] if log.exists() else "it has no log"

    def kill(self) -> None:
        """End it at once (SIGKILL), as a crash does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """Stop the process: it is connected but answers nothing, until `resume`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def is_master(self) -> bool:
        return self.call("ROLE")[0] == b"master"

    def slots(self) -> list[int]:
        """The slots that it serves."""
        for line in self.nodes():
            if "myself" in line[2].split(","):
                ranges = [part.partition("-") for part in line[8:] if not part.startswith("[")]
                return [slot for low, _, high in ranges for slot in range(int(low), int(high or low) + 1)]
        return []

    def master_id(self) -> str:
        """The id of the master that it is a replica of."""
        return next(line[3] for line in self.nodes() if "myself" in line[2].split(","))

    def nodes(self) -> list[list[str]]:
        """The lines of `CLUSTER NODES`, as words."""
        return [line.split() for line in raw(self, "CLUSTER", "NODES").decode().splitlines()]


class RedisCluster:
    """Servers 0 to 2 are masters at first, 3 to 5 their replicas in this order."""

    kind: type[Server] = Server

    def __init__(
        self,
        directory: Path,
        *,
        masters: int = 3,
        replicas: int = 1,
        password: str | None = None,
        authority: Authority | None = None,
        program: str | None = SERVER,
    ) -> None:
        self.directory, self.password, self.masters_count = directory, password, masters
        self.authority = authority.ca if authority else None
        pair = authority.issue("redis") if authority else None
        count = masters * (1 + replicas)
        ports = free_ports(2 * count)
        self.servers = []
        for number in range(count):
            home = directory / f"server-{number}"
            home.mkdir()
            self.servers.append(
                self.kind(
                    number,
                    ports[2 * number],
                    ports[2 * number + 1],
                    home,
                    password,
                    tls=pair,
                    authority=self.authority,
                    program=program,
                )
            )

    @property
    def url(self) -> str:
        """As `--remote` takes it: all servers, with the password if there is one."""
        who = f":{quote(self.password, safe='')}@" if self.password else ""
        addresses = ",".join(server.address for server in self.servers)
        return (
            f"rediss://{who}{addresses}?ssl_ca_certs={self.authority}"
            if self.authority
            else f"redis://{who}{addresses}"
        )

    def start(self) -> None:
        for server in self.servers:
            server.start()
            server.node_id = server.call("CLUSTER", "MYID").decode()
        masters, replicas = self.servers[: self.masters_count], self.servers[self.masters_count :]
        for number, server in enumerate(masters):
            low, high = SLOTS * number // len(masters), SLOTS * (number + 1) // len(masters) - 1
            server.call("CLUSTER", "ADDSLOTSRANGE", low, high)
        for number, server in enumerate(self.servers):
            server.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            self.servers[0].call("CLUSTER", "MEET", "127.0.0.1", server.port, server.bus_port)
        ids = {server.node_id for server in self.servers}
        for server in self.servers:
            wait_for(lambda server=server: ids <= {line[0] for line in server.nodes()}, "all servers to have met")
        for number, replica in enumerate(replicas):
            replica.call("CLUSTER", "REPLICATE", masters[number % len(masters)].node_id)
        self.wait_until_ok()

    def wait_until_ok(self, seconds: float = WAIT_S) -> None:
        """Until all slots are served, every running server knows it, and every replica is connected to its master."""

        def ok() -> bool:
            for server in self.servers:
                if server.process is None:
                    continue
                if b"cluster_state:ok" not in raw(server, "CLUSTER", "INFO"):
                    return False
                lines = server.nodes()
                masters = [line for line in lines if "master" in line[2] and "fail" not in line[2] and len(line) > 8]
                if len(masters) < self.masters_count:
                    return False
                role = server.call("ROLE")
                if role[0] == b"slave" and role[3] != b"connected":
                    return False
                is_alone = role[0] == b"master" and not role[2] and len(self.servers) > self.masters_count
                if is_alone and all(one.process for one in self.servers):
                    return False
            return True

        wait_for(ok, "the cluster to be whole", seconds)

    def running(self) -> list[Server]:
        return [server for server in self.servers if server.process is not None]

    def masters(self) -> list[Server]:
        """Those that serve slots now."""
        return [server for server in self.running() if server.is_master() and server.slots()]

    def master_of(self, slot: int) -> Server:
        return next(server for server in self.masters() if slot in server.slots())

    def move_slot(self, slot: int, target: Server, *, before_end: Callable[[], None] | None = None) -> None:
        """Migrate a slot with its keys, one at a time. `before_end` is called after each."""
        source = self.master_of(slot)
        assert source is not target
        target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", source.node_id)
        source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", target.node_id)
        auth = ("AUTH", self.password) if self.password else ()
        while keys := source.call("CLUSTER", "GETKEYSINSLOT", slot, 1):
            source.call("MIGRATE", "127.0.0.1", target.port, "", 0, 10_000, *auth, "KEYS", *keys)
            if before_end is not None:
                before_end()
        for server in (target, source, *(one for one in self.masters() if one not in (source, target))):
            server.call("CLUSTER", "SETSLOT", slot, "NODE", target.node_id)

    def replicate(self, masters: Sequence[Server] | None = None) -> None:
        """Until a replica of each of these masters (all, if none are named) has everything that was written so far."""
        for master in self.masters() if masters is None else masters:
            wait_for(lambda master=master: master.call("WAIT", 1, 1000), "a replica to have everything so far")

    def cut_replica(self, master: Server) -> Server:
        """From now on the replica of a master gets nothing of what is written to it. Returns the replica."""
        replica = next(one for one in self.running() if not one.is_master() and one.master_id() == master.node_id)
        replica.call("CONFIG", "SET", "masteruser", "nobody", "masterauth", "nothing")
        master.call("CLIENT", "KILL", "TYPE", "REPLICA")
        wait_for(lambda: replica.call("ROLE")[3] != b"connected", "the replica to be cut off")
        return replica

    def join_replica(self, replica: Server) -> None:
        """The end of `cut_replica`."""
        replica.call("CONFIG", "SET", "masteruser", "", "masterauth", "")

    def lose(self, master: Server, replica: Server) -> None:
        """End a master whose replica was cut off. Returns once the replica is the master, without what was written since."""
        master.kill()
        wait_for(lambda: replica.is_master() and replica.slots(), "the failover")
        self.join_replica(replica)

    def flush(self) -> None:
        for server in self.masters():
            server.call("FLUSHALL")

    def stop(self) -> None:
        for server in self.servers:
            if server._client is not None:
                server._client.close()
            server.kill()


def raw(server: Server, *words: str) -> bytes:
    """A reply as it came, not parsed by the client."""
    connection = server.client.connection_pool.get_connection()
    try:
        connection.send_command(*words)
        reply = connection.read_response()
    finally:
        server.client.connection_pool.release(connection)
    return reply if isinstance(reply, bytes) else str(reply).encode()


# One step: the words of commands, each behind how many they are.
_REPLACE = """
for _, key in ipairs(KEYS) do redis.call('DEL', key) end
local at = 1
while at <= #ARGV do
  local count = tonumber(ARGV[at])
  redis.call(unpack(ARGV, at + 1, at + count))
  at = at + count + 1
end"""
_FIELDS = 500  # of a hash, in one command
Call = Callable[..., Any]  # a command to the cluster: `Cluster.call`


def contents(call: Call, keys: Sequence[str]) -> dict[str, list[list[Any]]]:
    """What keys hold, as the commands that write it: for `put_back`, as not all engines have DUMP and RESTORE."""
    return {key: _commands_of(call, key) for key in keys}


def _commands_of(call: Call, key: str) -> list[list[Any]]:
    kind = call("TYPE", key)
    match kind.decode() if isinstance(kind, bytes) else kind:
        case "none":
            return []
        case "string":
            return [["SET", key, call("GET", key)]]
        case "hash":
            words = [word for pair in call("HGETALL", key).items() for word in pair]
            return [["HSET", key, *words[at : at + 2 * _FIELDS]] for at in range(0, len(words), 2 * _FIELDS)]
        case "stream":
            return _entries(call, key, "+")
    raise AssertionError(f"{key} holds a {kind!r}")


def _entries(call: Call, log: str, last: str) -> list[list[Any]]:
    """The entries of a stream up to one. Kvrocks answers nil for an empty value."""
    found = call("XRANGE", log, "-", last)
    return [["XADD", log, at, *(word or b"" for pair in of.items() for word in pair)] for at, of in found]


def put_back(call: Call, kept: dict[str, list[list[Any]]]) -> None:
    """Have keys of one slot hold what they held before, in one step, as a server that has lost what came after."""
    words = [word for commands in kept.values() for command in commands for word in (len(command), *command)]
    call("EVAL", _REPLACE, len(kept), *kept, *words)


def cut_log(call: Call, log: str, seq: int) -> None:
    """Have a stream end with an entry, as if the later ones had never been."""
    put_back(call, {log: _entries(call, log, f"{seq}-0")})


@contextmanager
def redis_cluster(
    *,
    masters: int = 3,
    replicas: int = 1,
    password: str | None = None,
    authority: Authority | None = None,
    program: str | None = SERVER,
) -> Iterator[RedisCluster]:
    """A running cluster. Skips the test if there is no `redis-server` (Debian's package of that name) or no redis-py."""
    if program is None:
        pytest.skip("needs redis-server or valkey-server (Debian: apt-get install redis-server)")
    if authority is not None and b"SSL_" not in Path(program).read_bytes():
        pytest.skip(f"{program} was built without TLS")
    pytest.importorskip("redis", reason="needs redis-py: pip install 'tierstore[redis]'")
    from tests.kvrocks_cluster import KvrocksCluster

    kind = KvrocksCluster if engine(program) == "kvrocks" else RedisCluster
    with tempfile.TemporaryDirectory(prefix="tierstore-redis-") as directory:
        cluster = kind(
            Path(directory), masters=masters, replicas=replicas, password=password, authority=authority, program=program
        )
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
