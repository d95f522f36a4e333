"""Other clients of a Redis cluster, each as a function of keys that gives their rows.

redis-py is a dependency; valkey-glide (its core in Rust, its face for programs without asyncio) and coredis (asyncio) are measured
where they are installed (`make bench-tools`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np

from tierstore.formats.keys import partition_of
from tierstore.tiers.remote.cluster import Cluster
from tierstore.types import Keys, Rows

Call = Callable[[Keys], Rows]
STRING = b"s:"  # before the key of a row that is a string of its own


def hash_of(tag: bytes) -> bytes:
    """The name of the hash with the rows of a tag."""
    return b"ts:{%s}:bench:1:t" % tag


def names(keys: Keys) -> list[bytes]:
    return list(keys.view("V8").tolist())


def _strings(keys: Keys) -> list[bytes]:
    return [STRING + key for key in names(keys)]


class _Peers:
    """What they share: how keys are split by tag, and values put together."""

    def __init__(self, tags: list[bytes], row_bytes: int) -> None:
        self._tags, self._row_bytes = tags, row_bytes

    def joined(self, values: Any) -> Rows:
        return np.frombuffer(b"".join(values), np.uint8).reshape(-1, self._row_bytes)

    def by_tag(self, keys: Keys, ask: Callable[[list[tuple[bytes, list[bytes]]]], Any]) -> Rows:
        """`ask` gets (hash, fields) of each tag and gives the values of each."""
        of, out = partition_of(keys, len(self._tags)), np.empty((len(keys), self._row_bytes), np.uint8)
        asked = [(hash_of(name), names(keys[of == tag])) for tag, name in enumerate(self._tags)]
        for tag, values in enumerate(ask(asked)):
            out[of == tag] = self.joined(values)
        return out


def _redis_py(cluster: Cluster, peers: _Peers) -> dict[str, Call]:
    client = cluster.client

    def pipeline(keys: Keys) -> Rows:
        with client.pipeline(transaction=False) as pipe:
            for key in _strings(keys):
                pipe.get(key)
            return peers.joined(pipe.execute())

    def ask(asked: list[tuple[bytes, list[bytes]]]) -> Any:
        with client.pipeline(transaction=False) as pipe:
            for name, fields in asked:
                pipe.hmget(name, fields)
            return pipe.execute()

    return {
        "redis-py mget_nonatomic": lambda keys: peers.joined(client.mget_nonatomic(_strings(keys))),
        "redis-py pipeline of GET": pipeline,
        "redis-py pipeline of HMGET, tagged": lambda keys: peers.by_tag(keys, ask),
    }


@contextmanager
def _glide(cluster: Cluster, peers: _Peers) -> Iterator[dict[str, Call]]:
    import glide_sync as glide

    address = cluster.endpoints.addresses[0]
    client = glide.GlideClusterClient.create(
        glide.GlideClusterClientConfiguration([glide.NodeAddress(address.host, address.port)], request_timeout=30_000)
    )

    def ask(asked: list[tuple[bytes, list[bytes]]]) -> Any:
        batch = glide.ClusterBatch(is_atomic=False)
        for name, fields in asked:
            batch.hmget(name, fields)
        return client.exec(batch, raise_on_error=True)

    try:
        yield {
            "valkey-glide mget": lambda keys: peers.joined(client.mget(_strings(keys))),
            "valkey-glide batch of HMGET, tagged": lambda keys: peers.by_tag(keys, ask),
        }
    finally:
        client.close()


@contextmanager
def _coredis(cluster: Cluster, peers: _Peers) -> Iterator[dict[str, Call]]:
    import coredis
    from anyio.from_thread import start_blocking_portal

    address = cluster.endpoints.addresses[0]
    made = coredis.RedisCluster(address.host, address.port, decode_responses=False)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(made) as client:

        async def all_of(asked: list[tuple[bytes, list[bytes]]]) -> Any:
            return await asyncio.gather(*(client.hmget(name, fields) for name, fields in asked))

        yield {
            "coredis HMGET side by side, tagged": lambda keys: peers.by_tag(
                keys, lambda asked: portal.call(all_of, asked)
            )
        }


@contextmanager
def peers(cluster: Cluster, tags: list[bytes], row_bytes: int) -> Iterator[dict[str, Call]]:
    """The peers that are installed, by name."""
    shared = _Peers(tags, row_bytes)
    calls = _redis_py(cluster, shared)
    with ExitStack() as stack:
        for begin in (_glide, _coredis):
            with suppress(ImportError):
                calls |= stack.enter_context(begin(cluster, shared))
        yield calls
