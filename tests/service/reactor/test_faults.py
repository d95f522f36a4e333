"""Reactors under clients that go, stall and flood, while models change and the service ends."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine.quick_build import in_process
from tests.service.conftest import eventually, settings_for
from tests.service.raw_clients import many_files, request
from tests.service.reactor.test_reactor import answer, connection, reactor_answers
from tierstore.engine.store import Store
from tierstore.errors import NotFound
from tierstore.service.server import ServerThread

DIM = 4
N = 64  # keys of the usual look-up


def write_twins(root: Path, version: int, value: float, *, rows: int = 100, model: str = "twins") -> Path:
    """Two tables whose rows are all `value`."""
    where = root / f"{model}-{version}"
    with tierstore.SnapshotWriter(where, model=model, version=version) as writer:
        for name in ("left", "right"):
            table = writer.table(name, dim=DIM)
            table.write(np.arange(rows, dtype=np.int64), np.full((rows, DIM), value, np.float32))
            writer.warmup(name, np.arange(rows, dtype=np.int64))
            writer.feature(name, table=name)
    return where


def look_up(keys: np.ndarray, **headers: object) -> bytes:
    """A look-up of the same keys in both tables."""
    n = len(keys)
    names = ("left", "right")
    binary = {"binary_data": True}
    document = {
        "inputs": [
            {"name": name, "datatype": "INT64", "shape": [n], "parameters": {"binary_data_size": 8 * n}}
            for name in names
        ],
        "outputs": [{"name": name, "parameters": binary} for name in names],
    }
    text = json.dumps(document).encode()
    lines = ["POST /v2/models/twins/infer HTTP/1.1", "Host: localhost", f"Content-Length: {len(text) + 16 * n}"]
    lines += [f"Inference-Header-Content-Length: {len(text)}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + text + 2 * keys.astype(np.int64).tobytes()


def numbers(body: bytes) -> list[float]:
    """Every number of the rows of the usual look-up."""
    values: list[float] = np.frombuffer(body[-8 * DIM * N :], np.float32).tolist()
    return values


class Served:
    """The model `twins`, version 1 with 1.0 everywhere, whose usual look-up reactors know how to answer."""

    def __init__(self, store: Store, server: ServerThread) -> None:
        self.store, self.server, self.reactors = store, server, server.service.reactors
        self.message = look_up(np.arange(N))
        with connection(server) as made:
            made.sendall(self.message)
            self.expected = answer(made)
            assert self.expected[0].startswith(b"HTTP/1.1 200"), self.expected

            def by_reactor() -> bool:
                before = reactor_answers(server)
                made.sendall(self.message)
                assert answer(made) == self.expected
                return reactor_answers(server) > before

            eventually(by_reactor, "the plan is known")
        self.remaining()

    def remaining(self) -> None:
        """Wait until no connection is left, and see that nothing else is."""
        eventually(lambda: self.reactors.open == 0, "all connections are gone")
        eventually(lambda: self.server.service.inflight.used_bytes == 0, "no byte is held")
        assert self.reactors.unfinished == 0
        assert not self.reactors.sending
        assert self.reactors.cold_readers.idle, "no job is left"
        assert set(self.reactors._lines["load"].tolist()) == {0}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with in_process(), Store(settings_for(tmp_path, grpc_port="off", keep_versions=9)) as store:
        store.load_snapshot(write_twins(tmp_path, 1, 1.0))
        with ServerThread(store) as server:
            yield Served(store, server)


@contextmanager
def askers(count: int, ask: Callable[[int], None]) -> Iterator[None]:
    """Call `ask` again and again in threads of their own; what it raises is raised here."""
    over, failed = threading.Event(), []

    def work(number: int) -> None:
        try:
            while not over.is_set():
                ask(number)
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]


def reset(made: socket.socket) -> None:
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.close()


LEAVING: dict[str, Callable[[socket.socket], None]] = {
    "closes": socket.socket.close,
    "resets": reset,
    "half-closes": lambda made: made.shutdown(socket.SHUT_WR),
}


# --- clients that go


@pytest.mark.parametrize("go", LEAVING.values(), ids=LEAVING)
def test_a_client_may_go_at_any_byte(served: Served, go: Callable[[socket.socket], None]) -> None:
    cold = look_up(np.arange(N) + 1000)
    kept = []
    for message in (served.message, cold, request("/v2/models/twins/infer", {}), served.message * 3):
        for end in [*range(0, len(message), 37), len(message)]:
            made = socket.create_connection(("127.0.0.1", served.server.port))
            made.sendall(message[:end])
            go(made)
            kept.append(made)
    served.remaining()
    for made in kept:
        made.close()


@pytest.mark.parametrize("count", [1, 3, 100])
def test_a_client_that_ends_its_side_is_answered_and_the_connection_closed(served: Served, count: int) -> None:
    for split in (len(served.message), 50):  # the end comes with the last bytes, mostly
        with connection(served.server) as made:
            data = served.message * count
            made.sendall(data[:-split])
            made.sendall(data[-split:])
            made.shutdown(socket.SHUT_WR)
            made.settimeout(10)
            assert [answer(made) for _ in range(count)] == [served.expected] * count
            assert made.recv(1) == b"", "it is closed, and not kept until it is idle for too long"
    served.remaining()


def test_what_is_left_of_a_request_when_the_client_ends_its_side_is_dropped(served: Served) -> None:
    with connection(served.server) as made:
        made.sendall(served.message + served.message[:-1])
        made.shutdown(socket.SHUT_WR)
        made.settimeout(10)
        assert answer(made) == served.expected
        assert made.recv(1) == b""
    served.remaining()


def test_thousands_of_connections_come_and_go_while_others_ask(served: Served) -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    count = int(os.environ.get("REACTOR_CONNECTIONS", 2000))
    mine = [socket.create_connection(("127.0.0.1", served.server.port), timeout=60) for _ in range(2)]

    def ask(number: int) -> None:
        mine[number].sendall(served.message)
        assert answer(mine[number]) == served.expected

    def come_and_go(times: int) -> None:
        for i in range(times):
            with socket.create_connection(("127.0.0.1", served.server.port)) as made:
                made.sendall((served.message, b"GET ", b"", request("/v2/health/live"))[i % 4])
                if i % 3 == 0:
                    reset(made)

    with askers(2, ask):
        come_and_go(count // 4)
    eventually(lambda: served.reactors.open == 2, "the others are gone")
    gc.collect()
    open_before, size = files(), resident()
    with askers(2, ask):
        come_and_go(count)
    eventually(lambda: served.reactors.open == 2, "the others are gone")
    for each in mine:
        each.close()
    served.remaining()
    assert files() == open_before - 4, "the two that asked had two ends each"
    assert resident() - size < 32 << 20


def test_many_connections_at_once(served: Served) -> None:
    with many_files():
        made = [socket.create_connection(("127.0.0.1", served.server.port), timeout=60) for _ in range(500)]
        for each in made:
            each.sendall(served.message[:100])
        eventually(lambda: served.reactors.unfinished == len(made), "all have begun")
        for each in made:
            each.sendall(served.message[100:])
        assert all(answer(each) == served.expected for each in made)
        for each in made[::2]:
            reset(each)
        for each in made:
            each.close()
        served.remaining()


# --- clients that are slow


def test_thousands_sent_ahead_are_answered_in_order_to_a_client_that_reads_slowly(served: Served) -> None:
    count, sizes = 1200, (1, N, 5)
    messages = [look_up(np.arange(n)) for n in sizes]
    with connection(served.server) as first:
        expected = []
        for message in messages:
            first.sendall(message)
            expected.append(answer(first)[1])
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        made.connect(("127.0.0.1", served.server.port))
        made.settimeout(60)
        sender = threading.Thread(target=made.sendall, args=(b"".join(messages) * (count // len(sizes)),))
        sender.start()
        for i in range(count):
            assert answer(made)[1] == expected[i % len(sizes)]
            if i % 200 == 0:
                time.sleep(0.02)  # it fills what may be sent ahead
        sender.join()
    served.remaining()


def test_a_request_that_comes_byte_by_byte_beside_others_is_answered(served: Served) -> None:
    def ask(number: int) -> None:
        with connection(served.server) as made:
            for begin in range(0, len(served.message), number + 1):
                made.sendall(served.message[begin : begin + number + 1])
            assert answer(made) == served.expected

    with askers(4, ask):
        time.sleep(0.5)
    served.remaining()


def test_the_beginning_of_a_head_behind_one_for_python_is_not_lost(served: Served) -> None:
    """The connection may go back to a reactor only where the full server has read no byte of the next request."""
    strange = request("/v2/health/live", headers={"X-Unknown": "1"})
    for message in (served.message, strange, b"\r\n" + served.message):
        for end in (1, 4, 5, 30, len(message) // 2, len(message) - 1):
            with connection(served.server) as made:
                made.sendall(strange[:-2])
                made.sendall(b"\r\n" + message[:end])
                assert answer(made)[0].startswith(b"HTTP/1.1 200")
                time.sleep(0.002)
                made.sendall(message[end:])
                assert answer(made) == (served.expected if served.message in message else answer_of(served, strange))


def answer_of(served: Served, message: bytes) -> tuple[bytes, bytes]:
    with connection(served.server) as made:
        made.sendall(message)
        return answer(made)


def test_a_head_that_is_too_long_is_refused_however_it_comes(served: Served) -> None:
    long = b"Cookie: " + b"x" * 700_000 + b"\r\nHost:"
    message = served.message.replace(b"Host:", long, 1)
    for size in (len(message), 90_000, 5000):
        with connection(served.server) as made, suppress(ConnectionError):
            for begin in range(0, len(message), size):
                made.sendall(message[begin : begin + size])
            assert made.recv(12) == b"HTTP/1.1 400"
    served.remaining()


# --- while the service changes


def version_of(body: bytes) -> int:
    found = re.search(rb'"model_version":"(\d+)"', body)
    assert found is not None
    return int(found[1])


def test_a_model_that_is_removed_is_gone_with_the_next_request_and_comes_back_as_another(
    served: Served, tmp_path: Path
) -> None:
    store = served.store
    with connection(served.server) as made:

        def status() -> tuple[bytes, bytes]:
            made.sendall(served.message)
            return answer(made)

        for version in (2, 3):
            assert status()[0].startswith(b"HTTP/1.1 200")
            store.deactivate("twins")
            assert not status()[0].startswith(b"HTTP/1.1 200")
            store.load_snapshot(write_twins(tmp_path, version, float(version)))
            for _ in range(3):
                head, body = status()
                assert head.startswith(b"HTTP/1.1 200")
                assert version_of(body) == version
                assert set(numbers(body)) == {float(version)}
        store.deactivate("twins")
        for version in (1, 2, 3):
            with suppress(NotFound):
                store.drop("twins", version)
        assert not status()[0].startswith(b"HTTP/1.1 200")
        store.load_snapshot(write_twins(tmp_path, 4, 4.0, rows=70))
        assert set(numbers(status()[1])) == {4.0}


def test_a_canary_has_its_share_and_an_id_its_version(served: Served, tmp_path: Path) -> None:
    store = served.store
    store.load_snapshot(write_twins(tmp_path, 2, 2.0), activate=False)
    with connection(served.server) as made:

        def ask(message: bytes) -> int:
            made.sendall(message)
            _, body = answer(made)
            version = version_of(body)
            assert set(numbers(body)) == {float(version)}
            return version

        named = [look_up(np.arange(N), **{"X-Request-Id": f"id-{i}"}) for i in range(30)]
        for share, least, most in ((0.0, 0, 0), (0.5, 50, 150), (1.0, 200, 200), (0.5, 50, 150)):
            store.canary("twins", 2, share)
            ask(served.message)  # each version's own plan is learned at its first request
            chosen = Counter(ask(served.message) for _ in range(200))
            assert least <= chosen[2] <= most, chosen
            by_id = [ask(message) for message in named]
            assert by_id == [ask(message) for message in named]
            assert set(by_id) == ({1, 2} if share == 0.5 else {1 if share == 0 else 2})
        store.withdraw("twins")
        assert {ask(message) for message in named} == {1}


def test_each_answer_is_of_one_delta(served: Served, tmp_path: Path) -> None:
    store, last = served.store, [0.0] * 3
    made = [socket.create_connection(("127.0.0.1", served.server.port), timeout=60) for _ in range(3)]

    def ask(number: int) -> None:
        made[number].sendall(served.message)
        head, body = answer(made[number])
        assert head.startswith(b"HTTP/1.1 200"), body
        values = set(numbers(body))
        assert len(values) == 1, f"an answer of several deltas: {sorted(values)}"
        (value,) = values
        assert value >= last[number], "an answer of an older delta than the one before"
        last[number] = value

    before = reactor_answers(served.server)
    with askers(3, ask):
        for seq in range(1, 41):
            path = tmp_path / f"{seq}.arrow"
            with tierstore.DeltaWriter(path, model="twins", seq=seq, event_time=datetime.now(UTC)) as writer:
                for table in ("left", "right"):
                    writer.upsert(table, np.arange(N), np.full((N, DIM), float(seq + 1), np.float32))
            store.apply_delta(path)
            with connection(served.server) as other:
                other.sendall(served.message)
                assert set(numbers(answer(other)[1])) == {float(seq + 1)}, "it was acknowledged before"
    assert reactor_answers(served.server) - before > 60
    for each in made:
        each.close()
    served.remaining()


@pytest.mark.thorough
def test_two_servers_over_one_store_one_after_the_other(tmp_path: Path) -> None:
    with in_process(), Store(settings_for(tmp_path, grpc_port="off")) as store:
        store.load_snapshot(write_twins(tmp_path, 1, 1.0))
        opened = []
        for _ in range(3):
            with ServerThread(store) as server:
                served = Served(store, server)
                with connection(server) as made:
                    made.sendall(served.message + request("/v2/health/live"))
                    assert answer(made) == served.expected
                    answer(made)
            gc.collect()
            opened.append(len(os.listdir("/proc/self/fd")))
        assert opened[0] >= opened[-1], opened


@pytest.mark.thorough
def test_the_service_ends_while_requests_are_in_every_state(tmp_path: Path) -> None:
    """Those that had begun are answered or closed, and no descriptor is left."""
    with in_process(), Store(settings_for(tmp_path, grpc_port="off")) as store:
        store.load_snapshot(write_twins(tmp_path, 1, 1.0, rows=20_000))
        before = 0
        for round_ in range(2):
            server = ServerThread(store).start()
            served = Served(store, server)
            large = look_up(np.arange(2000))
            made = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(40)]
            for i, each in enumerate(made):
                cold = look_up(np.random.default_rng(i).integers(0, 20_000, 200))
                started = [
                    b"",
                    served.message[:40],
                    served.message[:-9],
                    cold,
                    large * 200,
                    request("/v2"),
                    cold * 9,
                    b"GET /v2 HT",
                ]
                each.settimeout(0.2)
                with suppress(TimeoutError):  # of one that does not read
                    each.sendall(started[i % 8])
                each.settimeout(60)
            stop = threading.Thread(target=server.close)
            stop.start()
            eventually(lambda: server._http._handoff.ending, "it is told to end")  # noqa: B023
            for i, each in enumerate(made):
                if i % 8 == 2:
                    with suppress(ConnectionError):
                        each.sendall(served.message[-9:])
                        head, body = answer(each)
                        assert head.startswith(b"HTTP/1.1 200")
                        assert set(numbers(body)) == {1.0}
            for each in made:
                each.close()
            stop.join(timeout=60)
            assert not stop.is_alive(), "it ends"
            gc.collect()
            opened = len(os.listdir("/proc/self/fd"))
            if round_:
                assert opened == before
            before = opened


def test_files_are_closed_and_opened_again_under_look_ups_that_read_them(tmp_path: Path) -> None:
    with in_process(), Store(settings_for(tmp_path, grpc_port="off", host_budget="1KiB")) as store:
        store.load_snapshot(write_twins(tmp_path, 1, 1.0))
        with ServerThread(store) as server:
            served = Served(store, server)
            current = store.model("twins").publisher.current
            assert current is not None
            disk, answered = current.open_version.disk, Counter[int]()

            def ask(number: int) -> None:
                with connection(server) as made:
                    made.sendall(served.message)
                    assert answer(made) == served.expected
                    answered[number] += 1

            with askers(3, ask):
                for _ in range(30):
                    before, by_reactors = answered.total(), reactor_answers(server)
                    disk.close_idle_files(store.epochs.once_unread)
                    eventually(lambda: answered.total() > before, "they are answered")  # noqa: B023
                    eventually(lambda: reactor_answers(server) > by_reactors, "by reactors again")  # noqa: B023
            served.remaining()
