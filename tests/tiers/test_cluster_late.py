"""Writers of a version in a real cluster that are late, or of another content: what others have done since stays."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.redis_cluster import redis_cluster
from tests.tiers.backing_contract import ROW_BYTES, some_rows
from tests.tiers.test_cluster import PATIENT
from tierstore.errors import Conflict, StorageError
from tierstore.tiers.cluster.redis_keys import before_key, rows_key, watermark_key
from tierstore.tiers.cluster.topology import Cluster, connect
from tierstore.tiers.cluster.write import Change, Writer

KEYS = np.arange(200)
_models = (f"late-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with redis_cluster() as servers:
        connected = connect(servers.url, PATIENT)
        yield connected
        connected.close()


class Model:
    """A model of one table `t` under six tags, and its writers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.name, self.tags = cluster, next(_models), cluster.tags(2)
        self.opened: list[Writer] = []

    def writer(self, load: str = "") -> Writer:
        self.opened.append(Writer(self.cluster, self.name, 1, {"t": ROW_BYTES}, self.tags, load=load, timeout_s=60))
        return self.opened[-1]

    def load(self, load: str, stamp: int) -> None:
        writer = self.writer(load)
        writer.begin()
        writer.write_rows("t", KEYS, some_rows(KEYS, stamp))
        writer.finish(seq=0)

    def has(self, stamp: int) -> bool:
        """Whether every row is there, and every tag can be read."""
        rows, found = self.writer().read_rows("t", KEYS)
        whole = all(state is not None for state in self.writer().states())
        return whole and bool(found.all()) and bool((rows == some_rows(KEYS, stamp)).all())


@pytest.fixture
def model(cluster: Cluster) -> Iterator[Model]:
    made = Model(cluster)
    yield made
    for writer in made.opened:
        writer.close()


def change(keys: range, stamp: int) -> Change:
    codes = np.array(keys, np.int64)
    return Change("t", codes, some_rows(codes, stamp), np.zeros(len(codes), np.bool_))


class Late(Exception):
    pass


@pytest.mark.parametrize("earlier", [None, "", "-zero"])
@pytest.mark.parametrize("remove_only", [False, True])
def test_a_load_that_others_have_begun_and_ended_is_not_begun_again(
    model: Model, earlier: str | None, remove_only: bool
) -> None:
    for tag in model.tags if earlier is not None else ():  # what an earlier load has left
        model.cluster.client.hset(watermark_key(tag, model.name, 1), "load", earlier)
    lock, done = threading.Lock(), threading.Event()

    def check() -> None:
        with lock:
            if done.is_set():
                raise Late
            model.load("one", 3)  # while the late one stands still, before it sends what it has decided on
            done.set()

    with pytest.raises(Late):
        model.writer("one").begin(check, remove_only=remove_only)
    assert model.has(3)


def test_a_version_that_was_loaded_anew_is_not_removed(model: Model) -> None:
    model.load("one", 3)
    model.writer("one").drop(pause_s=0)
    assert model.writer().states() == [None] * 6
    model.load("two", 4)
    with pytest.raises(Conflict, match="another load has begun under this number"):
        model.writer("one").drop(pause_s=0)
    assert model.has(4)
    begun: list[int] = []

    def begin() -> None:
        if not begun:
            begun.append(1)
            model.load("three", 5)

    with pytest.raises(Conflict, match="another load has begun under this number"):
        model.writer("two").drop(pause_s=0, check=begin)
    assert model.has(5)


def test_a_load_of_an_earlier_release_is_ended_and_removed(model: Model) -> None:
    model.load("one", 3)
    for tag in model.tags:
        model.cluster.client.hset(watermark_key(tag, model.name, 1), "load", "")
    model.writer("one").finish(seq=0)
    with pytest.raises(Conflict, match="not being loaded by this load any more"):
        model.writer("one").write_rows("t", KEYS, some_rows(KEYS, 4))
    assert model.has(3)
    model.writer("one").drop(pause_s=0)
    assert model.writer().states() == [None] * 6
    assert sum(model.writer().counts("t")) == 0


def test_a_command_that_a_server_refuses_within_a_transaction_is_an_error(model: Model) -> None:
    writer = model.writer("one")
    writer.begin()
    for tag in model.tags:
        model.cluster.client.set(rows_key(tag, model.name, 1, "t"), "no hash")
    with pytest.raises(StorageError, match=r"the cluster refuses a command.*WRONGTYPE"):
        writer.write_rows("t", KEYS, some_rows(KEYS, 3))


def test_what_is_put_back_is_what_the_delta_replaced_that_came(model: Model) -> None:
    model.load("one", 3)
    writer = model.writer()
    writer.fence(1)
    writer.keep_before(1, 1, [change(range(50), 7)], "aaaa")  # the log loses this one, and takes another
    real = change(range(40, 150), 8)
    writer.keep_before(1, 1, [real], "bbbb")
    writer.apply_delta(1, 1, [real], "bbbb")
    writer.keep_before(1, 1, [real], "bbbb")  # a node that has ended before it has noted that does both again
    writer.keep_before(1, 1, [change(range(50), 7)], "aaaa")
    assert writer.lack_before([1]) == []
    with writer.replace_line(1, 0) as later:
        writer.put_before(1, 1)
        later.end_line(1, 1, "bbbb")
    rows, found = writer.read_rows("t", KEYS)
    assert found.all()
    np.testing.assert_array_equal(rows, some_rows(KEYS, 3))


def test_a_delta_that_was_kept_and_not_applied_is_kept_as_of_the_deltas_before_it(model: Model) -> None:
    """The log has lost two deltas, and the second one comes again after another first one."""
    model.load("one", 3)
    writer, second = model.writer(), change(range(50), 8)
    writer.fence(1)
    writer.keep_before(1, 2, [second], "bbbb")
    first = change(range(30), 7)
    writer.keep_before(1, 1, [first], "cccc")
    writer.apply_delta(1, 1, [first], "cccc")
    writer.keep_before(1, 2, [second], "bbbb")
    writer.apply_delta(1, 2, [second], "bbbb")
    with writer.replace_line(1, 1):
        writer.put_before(1, 2)
    rows, _ = writer.read_rows("t", KEYS)
    np.testing.assert_array_equal(rows[:30], some_rows(KEYS[:30], 7))
    np.testing.assert_array_equal(rows[30:], some_rows(KEYS[30:], 3))


def test_everything_up_to_a_delta_is_forgotten(model: Model) -> None:
    model.load("one", 3)
    writer = model.writer()
    writer.fence(1)
    for seq in range(1, 12):
        writer.keep_before(1, seq, [change(range(seq), seq)], f"{seq:04}")
        writer.apply_delta(1, seq, [change(range(seq), seq)], f"{seq:04}")
    writer.forget_before(9)
    assert writer.lack_before([*range(1, 12)]) == [*range(1, 10)]
    for tag in model.tags:
        left = model.cluster.client.hkeys(before_key(tag, model.name, 1))
        assert sorted(left) == [b"10", b"10 of", b"11", b"11 of"]
