"""Apache Kafka for tests: brokers in KRaft mode on free loopback ports, in a temporary directory.

    with real_brokers(3) as cluster:
        topic = cluster.new_topic(4)

`make client-venvs` fetches Kafka's jars into `.clients/kafka`. `cluster.address` is what `--kafka` takes. A broker may be killed, and
started again on its port and its data. Start brokers from the main thread: the kernel ends each of them when the thread that
started it ends, so that none is left behind by a test run that was killed.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kafka_broker import delete_topic
from tests.redis_cluster import end_with_parent, free_ports

JARS = Path(__file__).parents[1] / ".clients/kafka"
WAIT_S = 180.0
# a broker for tests is small, and starts in a third of the time without the second compiler
_JAVA = ("java", "-Xmx320m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", f"{JARS}/*")
_CLUSTER = "MkU3OEVBNTcwNTJENDM2Qk"
_PROPERTIES = """
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
log.dirs={data}
auto.create.topics.enable=false
default.replication.factor={replicas}
min.insync.replicas={in_sync}
offsets.topic.num.partitions=1
offsets.topic.replication.factor={replicas}
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor={replicas}
transaction.state.log.min.isr={in_sync}
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
log.retention.check.interval.ms=500
log.initial.task.delay.ms=500
log.cleaner.backoff.ms=200
log.cleaner.dedupe.buffer.size=2097152
log.cleaner.threads=1
num.network.threads=1
num.io.threads=2
"""


def why_not() -> str | None:
    """Why there can be no broker here; None where there can."""
    if shutil.which("java") is None:
        return "Java is not installed"
    if not (JARS / ".installed").exists():
        return "Kafka's jars are not here: make client-venvs"
    return None


class RealBrokers:
    """A cluster that runs. `is_mock`: as `kafka_broker.Brokers` has it."""

    is_mock = False

    def __init__(self, root: Path, count: int) -> None:
        self._root, self._count = root, count
        self._ports, controllers = free_ports(2 * count)[:count], free_ports(2 * count)[count:]
        self.address = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        voters = ",".join(f"{node}@127.0.0.1:{port}" for node, port in enumerate(controllers, 1))
        for node in self.nodes:
            home = root / str(node)
            home.mkdir()
            text = _PROPERTIES.format(
                node=node, voters=voters, port=self._ports[node - 1], controller=controllers[node - 1],
                data=home / "data", replicas=count, in_sync=min(count, 2),
            )  # fmt: skip
            (home / "server.properties").write_text(text)
        formats = [self._java(node, "kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c") for node in self.nodes]
        failed = [process.wait(WAIT_S) for process in formats]
        if any(failed):
            raise RuntimeError(f"the brokers' directories cannot be made: {self._said(1)}")
        for node in self.nodes:
            self.start(node)
        self.await_brokers()

    @property
    def nodes(self) -> range:
        return range(1, self._count + 1)

    def _java(self, node: int, program: str, *words: str) -> subprocess.Popen[bytes]:
        home = self._root / str(node)
        with (home / "output").open("ab") as output:
            return subprocess.Popen(
                [*_JAVA, program, *words, str(home / "server.properties")],
                cwd=home, stdout=output, stderr=output, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent,
            )  # fmt: skip

    def _said(self, node: int) -> str:
        return (self._root / str(node) / "output").read_text(errors="replace")[-2000:]

    def start(self, node: int) -> None:
        self._processes[node] = self._java(node, "kafka.Kafka")

    def kill(self, node: int) -> None:
        """SIGKILL. Its data stays for `start`."""
        process = self._processes.pop(node)
        process.kill()
        process.wait(WAIT_S)

    def pid(self, node: int) -> int:
        return self._processes[node].pid

    @property
    def admin(self) -> Any:
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    def await_brokers(self) -> None:
        """Until every broker that was started is a member."""
        admin = self.admin

        def members() -> bool:
            for node, process in self._processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"broker {node} ended: {self._said(node)}")
            return len(admin.list_topics(timeout=5).brokers) >= len(self._processes)

        self._until(members, f"{len(self._processes)} brokers")

    def await_in_sync(self, topic: str, replicas: int | None = None) -> None:
        """Until every partition has a leader and so many replicas in sync, by default as there are brokers that run."""
        admin, count = self.admin, replicas or len(self._processes)

        def in_sync() -> bool:
            partitions = admin.list_topics(topic, timeout=5).topics[topic].partitions.values()
            return all(one.leader > 0 and len(one.isrs) >= count for one in partitions)

        self._until(in_sync, f"the replicas of {topic}")

    @staticmethod
    def _until(condition: Callable[[], bool], what: str) -> None:
        from confluent_kafka import KafkaException

        until = time.monotonic() + WAIT_S
        while True:
            try:
                if condition():
                    return
            except KafkaException:
                pass
            if time.monotonic() > until:
                raise TimeoutError(f"after {WAIT_S:.0f} s still waiting for {what}")
            time.sleep(0.1)

    def delete_topic(self, name: str) -> None:
        delete_topic(self.address, name)

    def new_topic(
        self, partitions: int = 1, name: str | None = None, *, replicas: int | None = None, **config: str
    ) -> str:
        """A topic, of a fresh name by default, over all brokers; `config` with _ for each dot of the property's name."""
        from confluent_kafka.admin import NewTopic

        name = name or f"tierstore-test-{uuid.uuid4().hex[:12]}"
        properties = {key.replace("_", "."): value for key, value in config.items()}
        topic = NewTopic(name, partitions, replicas or self._count, config=properties)
        admin = self.admin  # named: what it was asked ends with it
        admin.create_topics([topic], operation_timeout=60)[name].result(120)
        self.await_in_sync(name, replicas)
        return name

    def leader(self, topic: str, partition: int = 0) -> int:
        return int(self.admin.list_topics(topic, timeout=30).topics[topic].partitions[partition].leader)

    def replicas(self, topic: str) -> set[int]:
        return set(self.admin.list_topics(topic, timeout=30).topics[topic].partitions[0].replicas)

    def in_sync(self, topic: str) -> set[int]:
        return set(self.admin.list_topics(topic, timeout=30).topics[topic].partitions[0].isrs)

    def close(self) -> None:
        for node in list(self._processes):
            self.kill(node)


@contextmanager
def real_brokers(count: int = 1) -> Iterator[RealBrokers]:
    """So many brokers, or a skipped test with the reason."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    root = Path(tempfile.mkdtemp(prefix="tierstore-kafka-"))
    cluster = None
    try:
        cluster = RealBrokers(root, count)
        yield cluster
    finally:
        if cluster is not None:
            cluster.close()
        shutil.rmtree(root, ignore_errors=True)
