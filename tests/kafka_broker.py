"""A Kafka cluster for tests: librdkafka's mock in a process of its own, or the brokers that TIERSTORE_TEST_KAFKA names.

Run as a program it is the mock: it prints its address, then obeys lines on standard input (`down N`, `up N`, `rtt N MS`,
`topic NAME PARTITIONS`, `delete NAME`) and answers each with `ok`. It ends when its input does.

The mock keeps about 5 MB a partition, and answers no question for an offset by time.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

# taken out of the environment, where settings of the store begin like this
REAL = os.environ.pop("TIERSTORE_TEST_KAFKA", "")


class Brokers:
    """A cluster: `address`, topics of fresh names, and, where it is the mock, faults."""

    def __init__(self) -> None:
        self.address = REAL
        self.is_mock = not self.address
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        if self.is_mock:
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert self._process.stdout is not None
            self.address = self._process.stdout.readline().strip()
            assert self.address, "the mock cluster did not start"

    def new_topic(self, partitions: int = 1, name: str | None = None) -> str:
        name = name or f"tierstore-test-{uuid.uuid4().hex[:12]}"
        if self.is_mock:
            self.command(f"topic {name} {partitions}")
            return name
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.address})  # named: what it was asked ends with it
        admin.create_topics([NewTopic(name, partitions)])[name].result(60)
        while (
            len(admin.list_topics(name, timeout=60).topics[name].partitions) < partitions
        ):  # told to all brokers later
            time.sleep(0.05)
        return name

    def delete_topic(self, name: str) -> None:
        if self.is_mock:
            self.command(f"delete {name}")
        else:
            delete_topic(self.address, name)

    def command(self, line: str) -> None:
        """Have the mock do something."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline().strip()
        assert answer == "ok", f"{line}: {answer}"

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(60)
            assert self._process.stdout is not None
            self._process.stdout.close()


def delete_topic(address: str, name: str) -> None:
    """Delete a topic of real brokers, and wait until they no longer name it."""
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    admin.delete_topics([name], operation_timeout=60)[name].result(120)
    while name in admin.list_topics(timeout=60).topics:
        time.sleep(0.05)


def _library() -> Any:
    import confluent_kafka  # noqa: F401 - so that what it is linked with is there

    spec = importlib.util.find_spec("confluent_kafka")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parents[1] / "confluent_kafka.libs"
    library = ctypes.CDLL(str(next(folder.glob("librdkafka-*.so*"))))
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    for name, result, arguments in (
        ("rd_kafka_conf_new", pointer, []),
        ("rd_kafka_new", pointer, [ctypes.c_int, pointer, text, ctypes.c_size_t]),
        ("rd_kafka_mock_cluster_new", pointer, [pointer, ctypes.c_int]),
        ("rd_kafka_mock_cluster_bootstraps", text, [pointer]),
        ("rd_kafka_mock_topic_create", ctypes.c_int, [pointer, text, ctypes.c_int, ctypes.c_int]),
        ("rd_kafka_mock_topic_delete", ctypes.c_int, [pointer, text]),
        ("rd_kafka_mock_set_controller_id", ctypes.c_int, [pointer, ctypes.c_int32]),
        ("rd_kafka_mock_broker_set_down", ctypes.c_int, [pointer, ctypes.c_int32]),
        ("rd_kafka_mock_broker_set_up", ctypes.c_int, [pointer, ctypes.c_int32]),
        ("rd_kafka_mock_broker_set_rtt", ctypes.c_int, [pointer, ctypes.c_int32, ctypes.c_int]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _serve() -> None:
    library = _library()
    why = ctypes.create_string_buffer(512)
    client = library.rd_kafka_new(0, library.rd_kafka_conf_new(), why, len(why))  # 0: a producer
    assert client, why.value
    cluster = library.rd_kafka_mock_cluster_new(client, 3)
    assert not library.rd_kafka_mock_set_controller_id(cluster, 1)  # without one it answers no question for topic ids
    print(library.rd_kafka_mock_cluster_bootstraps(cluster).decode(), flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        match verb:
            case "topic":
                failed = library.rd_kafka_mock_topic_create(cluster, words[0].encode(), int(words[1]), 1)
            case "delete":
                failed = library.rd_kafka_mock_topic_delete(cluster, words[0].encode())
            case "down":
                failed = library.rd_kafka_mock_broker_set_down(cluster, int(words[0]))
            case "up":
                failed = library.rd_kafka_mock_broker_set_up(cluster, int(words[0]))
            case "rtt":
                failed = library.rd_kafka_mock_broker_set_rtt(cluster, int(words[0]), int(words[1]))
            case _:
                failed = -1
        print(f"error {failed}" if failed else "ok", flush=True)
    os._exit(0)


if __name__ == "__main__":
    _serve()
