"""`TierstoreOnlineStore`: Feast's interface of online stores, in front of a running service.

One store may be used by any number of threads and event loops. It holds connections and nothing of the service's
state, so it may be copied to other processes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

from feast.infra.online_stores.online_store import OnlineStore
from feast.infra.supported_async_methods import SupportedAsyncMethods
from feast.repo_config import FeastConfigBaseModel, RepoConfig
from pydantic import StrictStr

from tierstore.client import AsyncClient, Client
from tierstore.client.environment import client_options
from tierstore.feast import steps
from tierstore.feast.rows import Answer, Row
from tierstore.feast.views import held_view, held_views, model_name

_TYPE = "tierstore.feast.TierstoreOnlineStore"


class TierstoreOnlineStoreConfig(FeastConfigBaseModel):  # type: ignore[misc]
    """The section `online_store` of `feature_store.yaml`.

    url: of one service. token: that it asks for; by default what the variable TIERSTORE_TOKEN says. ca, cert, key,
    allow_insecure_token, timeout_s: as for `tierstore.Client`. round_float64: round numbers of Array(Float64) to
    float32; otherwise one that float32 does not have is refused.
    """

    type: Literal["tierstore.feast.TierstoreOnlineStore"] = _TYPE  # type: ignore[assignment]
    url: StrictStr
    token: StrictStr | None = None
    ca: StrictStr | None = None
    cert: StrictStr | None = None
    key: StrictStr | None = None
    allow_insecure_token: bool = False
    timeout_s: float = 30.0
    round_float64: bool = False


class TierstoreOnlineStore(OnlineStore):  # type: ignore[misc]
    """An online store whose rows a tierstore service holds: views with one join key and one field of embeddings.

    - **A view** is a model `<project>-<view>` with the tables `<field>` and `<field>-event_time`. `update` makes it,
      and refuses views that cannot be held; `teardown`, or the removal of a view, drops it with its rows.
    - **A write** is numbered deltas, each durable before the call returns. A row that is older than the one that the
      key has, by its event time, changes nothing; of two with one event time the later write counts. Two writers
      cannot overwrite each other's newer rows: a delta that was made beside another one is refused and made anew.
    - **Nulls and rows older than the view's ttl** have the time of their event and no value, and Feast's status
      NOT_FOUND. A key without a row has neither.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for both
        self._client: tuple[dict[str, Any], Client] | None = None
        self._async_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[dict[str, Any], AsyncClient]] = (
            WeakKeyDictionary()
        )

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        TierstoreOnlineStore.__init__(self)

    @property
    def async_supported(self) -> SupportedAsyncMethods:
        return SupportedAsyncMethods(read=True, write=True)

    def online_write_batch(
        self, config: RepoConfig, table: Any, data: Sequence[Row], progress: Callable[[int], Any] | None
    ) -> None:
        """Write rows. On return they are durable, and every read that starts then sees them."""
        steps.run(_write(config, table, data, progress), self._client_of(config))

    async def online_write_batch_async(
        self, config: RepoConfig, table: Any, data: Sequence[Row], progress: Callable[[int], Any] | None
    ) -> None:
        """As `online_write_batch`."""
        await steps.run_async(_write(config, table, data, progress), self._async_client_of(config))

    def online_read(
        self, config: RepoConfig, table: Any, entity_keys: Sequence[Any], requested_features: list[str] | None = None
    ) -> list[Answer]:
        """The event time and the value of each key, see the class."""
        return steps.run(steps.read(held_view(config.project, table), entity_keys), self._client_of(config))

    async def online_read_async(
        self, config: RepoConfig, table: Any, entity_keys: Sequence[Any], requested_features: list[str] | None = None
    ) -> list[Answer]:
        """As `online_read`."""
        reading = steps.read(held_view(config.project, table), entity_keys)
        return await steps.run_async(reading, self._async_client_of(config))

    def update(
        self,
        config: RepoConfig,
        tables_to_delete: Sequence[Any],
        tables_to_keep: Sequence[Any],
        entities_to_delete: Sequence[Any],
        entities_to_keep: Sequence[Any],
        partial: bool,
    ) -> None:
        """Make the models of views that have none, and drop those of views that are gone.

        InvalidInput, before anything is changed, if one of the views cannot be held. Conflict if one has changed so
        that what is held of it does not fit any more.
        """
        client = self._client_of(config)
        for view in held_views(config.project, tables_to_keep):
            steps.run(steps.ensure(view), client)
        self._drop(config, tables_to_delete)

    def teardown(self, config: RepoConfig, tables: Sequence[Any], entities: Sequence[Any]) -> None:
        """Drop the models of the views, with all rows, and close the connections."""
        self._drop(config, tables)
        with self._lock:
            held, self._client = self._client, None
        if held is not None:
            held[1].close()

    async def close(self) -> None:
        """Close the connections of this event loop, and those of threads."""
        with self._lock:
            held, self._client = self._client, None
            of_loop = self._async_clients.pop(asyncio.get_running_loop(), None)
        if held is not None:
            held[1].close()
        if of_loop is not None:
            await of_loop[1].close()

    def _drop(self, config: RepoConfig, tables: Sequence[Any]) -> None:
        for table in tables:
            steps.run(steps.drop(model_name(config.project, table.name)), self._client_of(config))

    def _client_of(self, config: RepoConfig) -> Client:
        options = _client_options(config.online_store)
        with self._lock:
            if self._client is None or self._client[0] != options:
                self._client = options, Client(**options)
            return self._client[1]

    def _async_client_of(self, config: RepoConfig) -> AsyncClient:
        options, loop = _client_options(config.online_store), asyncio.get_running_loop()
        with self._lock:
            held = self._async_clients.get(loop)
            if held is None or held[0] != options:
                held = self._async_clients[loop] = options, AsyncClient(**options)
            return held[1]


def _write(config: RepoConfig, table: Any, data: Sequence[Row], progress: Any) -> steps.Steps[None]:
    view = held_view(config.project, table)
    return steps.write(view, data, progress, round_float64=config.online_store.round_float64)


def _client_options(config: TierstoreOnlineStoreConfig) -> dict[str, Any]:
    """A look-up goes out as one request, so that vectors and times are of one moment: `steps` splits it."""
    given = {name: getattr(config, name) for name in ("token", "ca", "cert", "key")}
    options = client_options([config.url]) | {name: value for name, value in given.items() if value is not None}
    insecure = config.allow_insecure_token or options["allow_insecure_token"]
    timeout = {"timeout_s": config.timeout_s, "split_keys": None}
    return options | {"url": config.url, "allow_insecure_token": insecure, **timeout}
