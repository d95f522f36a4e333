"""A connected cluster: which server has which slot, and connections to the servers. redis-py's own client is `client`.

Any thread may call anything. The map of slots is replaced as a whole when the cluster has changed; only look-ups whose keys have moved wait for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from tierstore.errors import ConfigError, RemoteUnavailable, StorageError
from tierstore.tiers.answers import reading
from tierstore.tiers.cluster.connections import Connections, driver, explain_error
from tierstore.tiers.cluster.engines import Engine, Inspection, ask_engine, look_at_engines
from tierstore.tiers.cluster.options import Endpoints, ServerAddress, parse_server_urls, port_of
from tierstore.tiers.cluster.redis_keys import SLOTS, choose_tags
from tierstore.tiers.connection_pools import Options

log = logging.getLogger(__name__)

_REFRESH_EVERY_S = 0.1  # at most one refresh in this time
_MOST_SERVERS = 100  # of a slot

Topology = dict[int, tuple[ServerAddress, ...]]  # slot → its master, then its replicas


def connect(urls: str, options: Options | None = None) -> Cluster:
    """Connect to the cluster that has any of these servers (`redis://h1:6379,h2:6379`, see `parse_server_urls`).

    Raises ConfigError (addresses, user, password, TLS; a server without cluster mode), RemoteUnavailable
    (none answers), MissingExtra.
    """
    return Cluster(parse_server_urls(urls), options or Options())


class Cluster:
    """A cluster and its connections. `close` ends them; look-ups under way then end with Closed."""

    def __init__(self, endpoints: Endpoints, options: Options) -> None:
        # constant after construction
        self.endpoints, self.options = endpoints, options
        self.connections = Connections(endpoints, options)
        self.pools = self.connections.pools
        # guarded by _connecting
        self._connecting = threading.Lock()
        self._client: Any = None
        # replaced as a whole, guarded by _refreshing
        self._refreshing = threading.Lock()
        self._refreshed_s, self.refreshes = 0.0, 0
        self._refresh_error: ConfigError | RemoteUnavailable | None = None
        self._topology: Topology = {}
        self.engine = Engine("redis", "")
        try:
            self.refresh()
            self.engine = self._read_engine()
            if missing := SLOTS - len(self._topology):
                log.warning("the cluster at %s does not serve %d of its %d slots", endpoints, missing, SLOTS)
        except BaseException:
            self.pools.close()
            raise

    @property
    def client(self) -> Any:
        """redis-py's client of the cluster, with replies as bytes, for everything but look-ups of rows."""
        with self._connecting:
            self.pools.check_open()
            if self._client is None:
                self._client = self._new_client()
            return self._client

    def _new_client(self) -> Any:
        module, redis = driver("redis.cluster"), driver()
        nodes = [module.ClusterNode(one.host, one.port) for one in self._servers()]
        try:
            with reading(f"what the cluster at {self.endpoints} answers"):
                return module.RedisCluster(
                    startup_nodes=nodes, ssl=self.endpoints.tls, protocol=2, require_full_coverage=False,
                    socket_timeout=max(5.0, self.options.timeout_s),
                    socket_connect_timeout=self.options.connect_timeout_s, **self.endpoints.credentials,
                )  # fmt: skip
        except StorageError:
            raise
        except (redis.RedisError, OSError) as error:
            raise explain_error(self.endpoints, error) from error

    def call(self, *words: Any) -> Any:
        """The reply to a command other than a look-up, by redis-py's client, which finds the server; text as bytes.

        RemoteUnavailable if the cluster cannot be reached.
        """
        redis = driver()
        try:
            with reading(f"what the cluster at {self.endpoints} answers"):
                return self.client.execute_command(*words)
        except StorageError:
            raise
        except (redis.RedisError, OSError) as error:
            raise explain_error(self.endpoints, error) from error

    def master_of(self, slot: int) -> ServerAddress:
        """The master of a slot. Raises RemoteUnavailable if no server has it."""
        try:
            return self._topology[slot][0]
        except KeyError:
            raise RemoteUnavailable(
                f"no server of the cluster at {self.endpoints} has slot {slot}: check `redis-cli --cluster check`"
            ) from None

    def replicas_of(self, slot: int) -> tuple[ServerAddress, ...]:
        return self._topology.get(slot, ())[1:]

    def masters(self) -> dict[ServerAddress, list[int]]:
        """The slots of each master that has some, in a stable order."""
        found: dict[ServerAddress, list[int]] = {}
        for slot, servers in sorted(self._topology.items()):
            found.setdefault(servers[0], []).append(slot)
        return found

    def tags(self, per_master: int) -> list[bytes]:
        """Tags for a new version, `per_master` of them on each master; see `redis_keys.choose_tags`."""
        self.refresh()
        if missing := SLOTS - len(self._topology):
            raise RemoteUnavailable(
                f"the cluster at {self.endpoints} does not serve {missing} of its {SLOTS} slots: repair it before a "
                "load"
            )
        return choose_tags(list(self.masters().values()), per_master)

    def refresh(self, seen: Topology | None = None, deadline_s: float | None = None) -> None:
        """Read again which server has which slot.

        With `seen`: unless that was done, or has failed, since `seen` was the map. Keeps the old map and raises RemoteUnavailable if no server
        answers by the deadline, ConfigError if they refuse.
        """
        if not self._refreshing.acquire(timeout=_remaining(deadline_s)):
            raise RemoteUnavailable(
                f"no server of the cluster at {self.endpoints} has said in time which server has which slot"
            )
        try:
            since_s = time.monotonic() - self._refreshed_s
            if seen is not None:
                if seen is not self._topology:
                    return
                if self._refresh_error is not None and since_s < self.options.suspect_s:
                    raise self._refresh_error
                time.sleep(max(0.0, min(_REFRESH_EVERY_S - since_s, _remaining(deadline_s))))
            self._refresh_error = None
            try:
                self._topology = self._read_any(deadline_s)
                self.refreshes += 1
            except (RemoteUnavailable, ConfigError) as error:
                self._refresh_error = error
                raise
            finally:
                self._refreshed_s = time.monotonic()
        finally:
            self._refreshing.release()

    def _read_any(self, deadline_s: float | None) -> Topology:
        """The map of slots of the first server that answers."""
        error: ConfigError | RemoteUnavailable | None = None
        for address in self._servers():
            if error is not None and _remaining(deadline_s) == 0:
                break
            try:
                return self._read_topology(address, max(0.01, _remaining(deadline_s)))
            except (RemoteUnavailable, ConfigError) as failed:
                error = error if isinstance(error, ConfigError) else failed
                self.pools.suspect(address)
        assert error is not None
        raise error

    @property
    def topology(self) -> Topology:
        """The current map of slots; a map is never changed, but replaced."""
        return self._topology

    def moved(self, slot: int, target: ServerAddress) -> None:
        """Note that a server has named the new server of a slot; valid until the next refresh."""
        with self._refreshing:
            if self._topology.get(slot, (None,))[0] != target:
                self._topology = self._topology | {slot: (target, *self._topology.get(slot, ())[1:])}

    def stats(self) -> dict[str, Any]:
        return self.pools.stats() | {"topology_reads": self.refreshes}

    def close(self) -> None:
        self.pools.close()
        with self._connecting:
            if self._client is not None:
                self._client.close()

    def _servers(self) -> list[ServerAddress]:
        """All servers that may be asked about the cluster; servers that failed lately come last."""
        found = dict.fromkeys(self.endpoints.addresses)
        found.update(dict.fromkeys(_distinct(self._topology.values())))
        return sorted(found, key=self.pools.is_suspect)

    def inspect(self, deadline_s: float) -> Inspection:
        """What the masters run, and what of their settings would lose rows or deltas, as far as they say."""
        return look_at_engines(self.connections, list(self.masters()), deadline_s)

    def _read_engine(self) -> Engine:
        """What the first master that says it runs; Redis if none does."""
        for address in self.masters():
            with suppress(StorageError, driver().RedisError, OSError), self.connections.borrowed(address) as connection:
                return ask_engine(connection)
        return self.engine

    def _read_topology(self, address: ServerAddress, timeout_s: float) -> Topology:
        redis = driver()
        try:
            with (
                reading(f"what {address} says of slots"),
                self.connections.borrowed(address, timeout_s=timeout_s) as connection,
            ):
                connection.send_command("CLUSTER", "SLOTS")
                found = _topology(connection.read_response(), address.host)
        except (redis.RedisError, OSError) as error:
            raise error if isinstance(error, StorageError) else explain_error(address, error) from error
        if not found:
            raise RemoteUnavailable(
                f"{address} reports no slots: the cluster was not created yet, or the server was reset"
            )
        return found


def _topology(reply: Any, host: str) -> Topology:
    """The map in the reply to `CLUSTER SLOTS`. A server without a name is the one that replied, `host`."""
    found: Topology = {}
    for low, high, *servers in reply:
        if not (0 <= int(low) <= int(high) < SLOTS and 1 <= len(servers) <= _MOST_SERVERS):
            raise ValueError(f"expected slots of 0 to {SLOTS - 1} and their servers, got {low} to {high}")
        addresses = tuple(ServerAddress(of[0].decode() if of[0] else host, port_of(of[1])) for of in servers)
        found.update(dict.fromkeys(range(low, high + 1), addresses))
    return found


def _remaining(deadline_s: float | None) -> float:
    """Seconds until a deadline; a day if there is none."""
    return 86400.0 if deadline_s is None else max(0.0, deadline_s - time.monotonic())


def _distinct(groups: Iterable[tuple[ServerAddress, ...]]) -> Iterable[ServerAddress]:
    return dict.fromkeys(one for group in dict.fromkeys(groups) for one in group)
