"""What the servers of a cluster say of themselves: engine and release by name, and the settings that lose rows or deltas."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.redis_cluster import RedisCluster, engine, needs_engine, redis_cluster
from tierstore.errors import ConfigError
from tierstore.tiers.cluster.engines import Inspection
from tierstore.tiers.cluster.topology import connect
from tierstore.tiers.connection_pools import Options
from tools.raw_server import RawServer, words_of

pytest.importorskip("redis", reason="the extra `redis` is not installed")

PATIENT = Options(timeout_s=20.0, connect_timeout_s=20.0)
SOUND = {"appendonly": "yes", "appendfsync": "always", "save": ""}


def bulk(*words: str) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words)


@contextmanager
def server(
    info: Mapping[str, Mapping[str, str]], settings: Mapping[str, str] | None, auth: bytes = b"+OK\r\n"
) -> Iterator[RawServer]:
    """A server that is a cluster of one and says this of itself. `settings`: None where nobody may ask for them."""

    def answer(request: bytes) -> bytes:
        replies = []
        for words in words_of(request) or []:
            verb, *rest = (word.decode() for word in words)
            match verb.upper():
                case "AUTH":
                    replies.append(auth)
                case "CLUSTER":
                    replies.append(b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % made.port)
                case "INFO":
                    text = "".join(f"{name}:{value}\r\n" for name, value in info.get(rest[0], {}).items())
                    replies.append(b"$%d\r\n%s\r\n" % (len(text), text.encode()))
                case "CONFIG" if settings is None:
                    replies.append(b"-NOPERM this user has no permissions\r\n")
                case "CONFIG":
                    name = rest[1]
                    replies.append(bulk(name, settings[name]) if name in settings else b"*0\r\n")
                case _:
                    replies.append(b"+OK\r\n")
        return b"".join(replies)

    made = RawServer(answer, lambda request: words_of(request) is not None, lambda _: True)
    with made:
        yield made


def inspected(info: Mapping[str, Mapping[str, str]], settings: Mapping[str, str] | None) -> Inspection:
    with server(info, settings) as made:
        cluster = connect(f"redis://127.0.0.1:{made.port}", PATIENT)
        try:
            found = cluster.inspect(time.monotonic() + 20)
        finally:
            cluster.close()
        assert all(f"(127.0.0.1:{made.port})" in text for text in found.warnings)
        return found


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"redis_version": "7.0.15"}, "redis 7.0.15"),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "8.1.8"}, "valkey 8.1.8"),
        ({"version": "2.10.1", "kvrocks_version": "2.10.1", "redis_version": "4.0.0"}, "kvrocks 2.10.1"),
        ({}, "redis"),
    ],
)
def test_an_engine_is_named_as_what_it_is_and_not_as_the_redis_that_it_says_to_be(
    said: Mapping[str, str], name: str
) -> None:
    found = inspected({"server": said}, SOUND)
    assert [str(engine) for engine in found.engines] == [name]
    assert (found.problem, found.warnings) == (None, ())


@pytest.mark.parametrize(
    ("said", "oldest"),
    [
        ({"redis_version": "6.0.16"}, "6.2"),
        ({"redis_version": "5.0.7"}, "6.2"),
        ({"redis_version": "4.0.0", "kvrocks_version": "2.9.0"}, "2.10"),
    ],
)
def test_a_release_that_is_too_old_is_a_warning(said: Mapping[str, str], oldest: str) -> None:
    (warning,) = inspected({"server": said}, SOUND).warnings
    assert "is too old" in warning
    assert f"expected {oldest} or newer" in warning


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"appendonly": "no", "save": ""}, ("has nothing", "CONFIG SET appendonly yes")),
        ({"appendonly": "no", "save": "3600 1"}, ("only what its last snapshot has", "CONFIG SET appendonly yes")),
        ({"appendonly": "yes", "appendfsync": "everysec"}, ("the last second", "appendfsync always")),
        ({"appendonly": "yes", "appendfsync": "no"}, ("half a minute", "appendfsync always")),
    ],
)
def test_what_redis_loses_when_a_machine_fails_is_a_warning(
    settings: Mapping[str, str], words: tuple[str, ...]
) -> None:
    (warning,) = inspected({"server": {"redis_version": "7.0.15"}}, settings).warnings
    for word in words:
        assert word in warning


def test_a_server_that_answers_no_config_is_judged_by_info(caplog: pytest.LogCaptureFixture) -> None:
    info = {"server": {"redis_version": "7.0.15"}, "persistence": {"aof_enabled": "0"}}
    (warning,) = inspected(info, None).warnings
    assert "appendonly is no" in warning
    assert inspected(info | {"persistence": {"aof_enabled": "1"}}, None).warnings == ()
    evicting = info | {"memory": {"maxmemory_policy": "allkeys-lru", "maxmemory": "5"}}
    assert "maxmemory-policy is allkeys-lru" in str(inspected(evicting, None).problem)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"rocksdb.write_options.sync": "no", "rocksdb.write_options.disable_wal": "no"}, "rocksdb.write_options.sync is no"),
        ({"rocksdb.write_options.sync": "no", "rocksdb.write_options.disable_wal": "yes"}, "disable_wal is yes"),
        ({"rocksdb.write_options.sync": "yes", "rocksdb.write_options.disable_wal": "no"}, None),
    ],
)  # fmt: skip
def test_what_kvrocks_loses_when_a_machine_fails_is_a_warning(settings: Mapping[str, str], word: str | None) -> None:
    warnings = inspected({"server": {"kvrocks_version": "2.10.1", "redis_version": "4.0.0"}}, settings).warnings
    assert len(warnings) == (word is not None)
    assert word is None or word in warnings[0]


@pytest.mark.parametrize(
    "refusal", [b"-ERR Invalid password\r\n", b"-ERR Client sent AUTH, but no password is set\r\n"]
)
def test_a_password_that_kvrocks_refuses_is_named(refusal: bytes) -> None:
    with (
        server({}, {}, refusal) as made,
        pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{made.port} refuses the user or the password"),
    ):
        connect(f"redis://:secret@127.0.0.1:{made.port}", PATIENT)


def test_a_user_name_for_an_engine_that_has_none_says_to_leave_it_out() -> None:
    with (
        server({}, {}, b"-ERR wrong number of arguments\r\n") as made,
        pytest.raises(ConfigError, match=r"leave the user out: redis://:password@host:port") as refused,
    ):
        connect(f"redis://somebody:secret@127.0.0.1:{made.port}", PATIENT)
    assert "secret" not in str(refused.value)


@pytest.fixture(scope="module")
def servers() -> Iterator[RedisCluster]:
    with redis_cluster(masters=1) as running:
        yield running


def test_a_real_server_is_named_with_its_release(servers: RedisCluster) -> None:
    cluster = connect(servers.url, PATIENT)
    (found,) = cluster.inspect(time.monotonic() + 20).engines
    cluster.close()
    assert found.name == engine()
    assert found.release.split(".")[0].isdecimal()
    assert not found.is_old


@needs_engine("redis", "valkey", reason="its settings can be changed while it runs")
def test_warnings_of_a_real_server_end_with_their_reasons(servers: RedisCluster) -> None:
    cluster, (master,) = connect(servers.url, PATIENT), servers.masters()
    try:
        for settings, word in (
            ({"appendonly": "no"}, "appendonly is no"),
            ({"appendonly": "yes", "appendfsync": "everysec"}, "appendfsync is everysec"),
            ({"appendfsync": "always"}, None),
        ):
            for name, value in settings.items():
                master.call("CONFIG", "SET", name, value)
            warnings = cluster.inspect(time.monotonic() + 20).warnings
            assert len(warnings) == (word is not None)
            assert word is None or (word in warnings[0] and master.address in warnings[0])
    finally:
        master.call("CONFIG", "SET", "appendonly", "no")
        cluster.close()
