"""Engines of a cluster's servers, and those of their settings that would lose what they have acknowledged.

Any thread. It asks each server with INFO and CONFIG GET; what a server does not say, or must not be asked, is passed over.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from tierstore.errors import TierstoreError
from tierstore.tiers.answers import reading
from tierstore.tiers.cluster.connections import Connections, driver
from tierstore.tiers.cluster.options import ServerAddress

_NAMED_BY = {
    "kvrocks_version": "kvrocks",
    "valkey_version": "valkey",
    "dragonfly_version": "dragonfly",
    "garnet_version": "garnet",
}
_OLDEST = {  # that the commands exist in: XTRIM MINID, and XRANGE with a bound that is left out
    "redis": (6, 2),
    "valkey": (7, 2),
    "kvrocks": (2, 10),
}
_KEEPS_ALL = "noeviction"


class Engine(NamedTuple):
    """What a server runs: `redis`, `valkey`, `kvrocks`, …, and its release as it says it, '' if it does not."""

    name: str
    release: str

    def __str__(self) -> str:
        return f"{self.name} {self.release}".rstrip()

    @property
    def lanes(self) -> int:
        """How many connections to a server one look-up uses at most: several where each is answered by a thread of its own."""
        return 8 if self.name == "kvrocks" else 1

    @property
    def script_bytes(self) -> int:
        """The most rows of a delta, in bytes, that one script writes: a server answers nobody else meanwhile."""
        return 64 << 10 if self.name == "kvrocks" else 1 << 20

    @property
    def is_old(self) -> bool:
        """Whether it is older than the oldest release that has what is needed."""
        numbers = self.release.split(".")[:2]
        if self.name not in _OLDEST or not all(number.isdecimal() for number in numbers) or len(numbers) < 2:
            return False
        return tuple(map(int, numbers)) < _OLDEST[self.name]


class Finding(NamedTuple):
    """What is wrong with a server: `text` names it, `remedy` says what to do. `loses`: rows go away without a word."""

    text: str
    remedy: str
    loses: bool = False


class Inspection(NamedTuple):
    """The servers' engines, and what is wrong with them: `problem` loses rows while all is well, `warnings` when a machine fails."""

    engines: tuple[Engine, ...]
    problem: str | None
    warnings: tuple[str, ...]


def engine_of(said: Mapping[str, str]) -> Engine:
    """The engine in the fields of `INFO server`; most others call themselves a release of Redis as well."""
    for field, name in _NAMED_BY.items():
        if field in said:
            return Engine(name, said[field])
    return Engine("redis", said.get("redis_version", ""))


def look_at_engines(connections: Connections, addresses: list[ServerAddress], deadline_s: float) -> Inspection:
    """Ask each of these servers, until the deadline of `time.monotonic`."""
    engines: dict[Engine, None] = {}
    found: dict[Finding, list[ServerAddress]] = defaultdict(list)
    for address in addresses:
        with (
            suppress(TierstoreError, driver().RedisError, OSError),
            reading(f"what {address} says of itself"),
            connections.borrowed(address, timeout_s=max(0.01, deadline_s - time.monotonic())) as connection,
        ):
            server = _Server(connection)
            engine = engine_of(server.info("server"))
            engines[engine] = None
            for finding in _findings(engine, server):
                found[finding].append(address)
    texts = {one: f"{one.text} ({', '.join(map(str, where))}): {one.remedy}" for one, where in found.items()}
    return Inspection(
        tuple(engines),
        "; ".join(text for one, text in texts.items() if one.loses) or None,
        tuple(text for one, text in texts.items() if not one.loses),
    )


def ask_engine(connection: Any) -> Engine:
    """The engine of the server behind redis-py's connection."""
    return engine_of(_Server(connection).info("server"))


class _Server:
    """One server that is asked about itself over redis-py's connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def _ask(self, *words: str) -> Any:
        """None where the server refuses."""
        self._connection.send_command(*words)
        try:
            return self._connection.read_response()
        except driver().ResponseError:
            return None

    def info(self, section: str) -> dict[str, str]:
        """The fields of a section of INFO; none where it may not be asked."""
        lines = (self._ask("INFO", section) or b"").decode(errors="replace").splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def setting(self, name: str) -> str | None:
        """A setting by CONFIG GET; None where there is none, or it may not be asked."""
        reply = self._ask("CONFIG", "GET", name)
        return reply[1].decode() if reply and len(reply) == 2 else None


def _findings(engine: Engine, server: _Server) -> Iterator[Finding]:
    if engine.is_old:
        oldest = ".".join(map(str, _OLDEST[engine.name]))
        yield Finding(
            f"{engine} is too old", f"expected {oldest} or newer, which has the commands that the log of deltas takes"
        )
    yield from _DURABILITY.get(engine.name, _of_redis)(server)


def _of_redis(server: _Server) -> Iterator[Finding]:
    memory = server.info("memory")
    policy = memory.get("maxmemory_policy", _KEEPS_ALL)
    if policy != _KEEPS_ALL and memory.get("maxmemory", "0") != "0":
        yield Finding(
            f"the cluster removes keys when its memory is full, and so rows and deltas, without a word: maxmemory-policy is {policy}",
            f"on each server: CONFIG SET maxmemory-policy {_KEEPS_ALL}, and the same in its file of settings",
            loses=True,
        )
    has_log = server.setting("appendonly") or {"0": "no", "1": "yes"}.get(
        server.info("persistence").get("aof_enabled", "")
    )
    if has_log == "no":
        kept = "only what its last snapshot has" if server.setting("save") else "nothing"
        yield Finding(
            f"a server that starts again has {kept}: appendonly is no",
            "CONFIG SET appendonly yes and appendfsync always, and the same in its file of settings",
        )
    elif (flushed := server.setting("appendfsync")) in ("everysec", "no"):
        lost = "the last second of" if flushed == "everysec" else "half a minute or more of"
        yield Finding(
            f"{lost} acknowledged deltas may be lost when a machine loses power: appendfsync is {flushed}",
            "CONFIG SET appendfsync always, and the same in its file of settings",
        )


def _of_kvrocks(server: _Server) -> Iterator[Finding]:
    if server.setting("rocksdb.write_options.disable_wal") == "yes":
        yield Finding(
            "a server that is killed loses what it has acknowledged: rocksdb.write_options.disable_wal is yes",
            "set it to no in its file of settings, and start it again",
        )
    elif server.setting("rocksdb.write_options.sync") == "no":
        yield Finding(
            "acknowledged deltas may be lost when a machine loses power: rocksdb.write_options.sync is no",
            "set it to yes in its file of settings, and start it again",
        )


_DURABILITY: dict[str, Callable[[_Server], Iterator[Finding]]] = {"kvrocks": _of_kvrocks}
