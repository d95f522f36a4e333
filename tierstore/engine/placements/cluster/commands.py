"""Commands to a cluster that are no look-up of rows: through the driver's own client, which finds the server. Any thread."""

from __future__ import annotations

from typing import Any

from tierstore.errors import StorageError
from tierstore.tiers.remote.cluster import Cluster
from tierstore.tiers.remote.connections import driver, explain


class ClusterCommands:
    """Of one cluster that is connected."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def call(self, *words: Any) -> Any:
        """The reply, with text as bytes. RemoteUnavailable (a StorageError) where the cluster cannot be reached."""
        redis = driver()
        try:
            return self._cluster.client.execute_command(*words)
        except StorageError:
            raise
        except (redis.RedisError, OSError) as error:
            raise explain(self._cluster.endpoints, error) from error
