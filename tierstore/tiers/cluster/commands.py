"""Commands to the server that has a slot, tried again where the cluster has changed. For writes and admin, not for look-ups.

Any thread may call anything. A command may arrive twice: every write of ours has the same effect then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from tierstore.errors import ConfigError, RemoteUnavailable, StorageError
from tierstore.tiers.answers import reading
from tierstore.tiers.cluster.connections import driver
from tierstore.tiers.cluster.options import ServerAddress
from tierstore.tiers.cluster.topology import Cluster

_PAUSE_S = 0.05
_ASKING = b"*1\r\n$6\r\nASKING\r\n"
_MOST_CHANGES = 100  # of a watched key, while a write waits for a moment without one

Packed = bytes | bytearray | memoryview
T = TypeVar("T")


def command(*words: bytes) -> bytes:
    """One command as it is sent."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def call(cluster: Cluster, slot: int, packed: Sequence[Packed], *, timeout_s: float) -> list[Any]:
    """Send commands (see `command`) to the master of `slot` over one connection. Returns their replies.

    Follows the slot to another server, and waits for a new master, for at most `timeout_s`; then it raises RemoteUnavailable. Raises StorageError
    with the server's words if it refuses a command (no memory, no permission, wrong type).
    """
    return _at_master(cluster, slot, lambda connection, asking: _send(connection, packed, asking=asking), timeout_s)


def call_if(
    cluster: Cluster,
    slot: int,
    key: bytes,
    field: bytes,
    expected: bytes | None,
    packed: Sequence[Packed],
    *,
    timeout_s: float,
) -> tuple[list[Any] | None, bytes | None]:
    """Send commands as one transaction, if `field` of the hash `key` is as expected when they are executed.

    Returns their replies, None if it is not, and the field's value. Errors as `call`. While the slot is being migrated the field is compared
    before the commands alone: its keys may be on two servers, which take no transaction.
    """
    there, redis = command(b"HGET", key, field), driver()

    def exchange(connection: Any, asking: bool) -> tuple[list[Any] | None, bytes | None]:
        try:
            for _ in range(_MOST_CHANGES):
                value = _send(connection, [command(b"WATCH", key), there], asking=False)[1]
                if value != expected:
                    _send(connection, [command(b"UNWATCH")], asking=False)
                    return None, value
                replies = _send(connection, [command(b"MULTI"), *packed, command(b"EXEC")], asking=False)[-1]
                if replies is not None:
                    if failed := [one for one in replies if isinstance(one, redis.ResponseError)]:
                        raise failed[0]  # the driver raises only an error of EXEC itself
                    return replies, value
        except (redis.exceptions.AskError, redis.exceptions.TryAgainError) as error:
            raise _Migrating from error
        raise RemoteUnavailable(f"slot {slot}: {key.decode()} is changed all the time")

    try:
        return _at_master(cluster, slot, exchange, timeout_s)
    except _Migrating:
        value = call(cluster, slot, [there], timeout_s=timeout_s)[0]
        return (call(cluster, slot, packed, timeout_s=timeout_s) if value == expected else None), value


class _Migrating(Exception):
    """A slot is on its way to another server."""


def _at_master(cluster: Cluster, slot: int, exchange: Callable[[Any, bool], T], timeout_s: float) -> T:
    """`exchange(connection, asking)` with the master of a slot, repeated where the cluster has changed; see `call`."""
    redis = driver()
    deadline_s = time.monotonic() + timeout_s
    target: ServerAddress | None = None
    problem: Exception
    while True:
        seen = cluster.topology
        try:
            address = target or cluster.master_of(slot)
            with reading(f"what {address} answers"), cluster.connections.borrowed(address) as connection:
                return exchange(connection, target is not None)
        except redis.exceptions.AskError as error:
            target, problem = ServerAddress(error.host, error.port), error
            if time.monotonic() <= deadline_s:
                continue
        except redis.exceptions.MovedError as error:
            problem = error
            with suppress(RemoteUnavailable):
                cluster.refresh(seen)
            cluster.moved(slot, ServerAddress(error.host, error.port))
        except (
            redis.exceptions.TryAgainError,
            redis.exceptions.ClusterDownError,
            redis.exceptions.BusyLoadingError,
            redis.exceptions.MasterDownError,
        ) as error:
            problem = error
        except redis.ResponseError as error:
            if not str(error).startswith("READONLY") and not isinstance(error, redis.exceptions.ReadOnlyError):
                raise StorageError(f"the cluster refuses a command for slot {slot}: {error}") from error
            problem = error
        except ConfigError:
            raise
        except (redis.RedisError, OSError) as error:
            problem = error
            with suppress(RemoteUnavailable):
                cluster.pools.suspect(cluster.master_of(slot))
        target = None
        if time.monotonic() > deadline_s:
            raise RemoteUnavailable(f"slot {slot} could not be written within {timeout_s:g} s: {problem}") from problem
        time.sleep(_PAUSE_S)
        with suppress(RemoteUnavailable):
            cluster.refresh(seen)


def _send(connection: Any, packed: Sequence[Packed], *, asking: bool) -> list[Any]:
    """Send the commands and read all replies. Returns them, or the first error among them."""
    redis = driver()
    parts = [part for one in packed for part in ((_ASKING, one) if asking else (one,))]
    connection.send_packed_command(parts, check_health=False)
    replies: list[Any] = []
    failed: Exception | None = None
    for number in range(len(parts)):
        try:
            reply = connection.read_response()
        except redis.ResponseError as error:
            failed = failed or error
            continue
        if not asking or number % 2:
            replies.append(reply)
    if failed is not None:
        raise failed
    return replies
