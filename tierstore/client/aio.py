"""`AsyncClient`: the verbs of a store over HTTP, for asyncio.

One client belongs to one event loop; any number of its tasks may share it. A verb that is cancelled closes the
connections that it was using. The client holds no state of the service; an acknowledged verb is as durable as the
service made it.

`sync.py` is made of this file, and `sync_models.py` of `aio_models.py`: `python tools/make_client.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from tierstore.client.aio_models import AsyncRemoteModel
from tierstore.client.async_transport import AsyncTransport
from tierstore.client.base import ClientBase
from tierstore.client.operations import BagOptions, Floats, Found, LookupOptions, PredictOptions
from tierstore.client.settings import ClientSettings
from tierstore.logs import LogLevel
from tierstore.types import BackupReport, DeltaResult, ExportReport, KeysLike, ProgressFn

if TYPE_CHECKING:
    import numpy.typing as npt

    from tierstore.status import ServiceStatus


class AsyncClient(ClientBase[AsyncTransport]):
    __doc__ = f"{ClientBase.__doc__}\n\n    Every verb is to be awaited; `model` and `figures` are not."

    def _make_transport(self, settings: ClientSettings) -> AsyncTransport:
        return AsyncTransport(settings, self._budget, self._balancer)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; verbs that have started still end. May be called twice."""
        await self._transport.close()

    def model(self, name: str) -> AsyncRemoteModel:
        """The model of that name. Nothing is sent: a name that the service does not have fails at the first look-up."""
        return AsyncRemoteModel(name, self._operations, self._transport)

    @asynccontextmanager
    async def pinned(self, model: str, version: int | str | None = None) -> AsyncIterator[AsyncRemoteModel]:
        """The model, pinned to one version in the block: each request names it, and goes to a node that serves it.

        version: number or label; by default the version that is active now at one of the nodes. Once no node serves it
        any more, requests raise NotFound. A version is served while it is active or the canary.
        """
        number = await self._transport.run(self._operations.served_version(model, version))
        yield AsyncRemoteModel(model, self._operations, self._transport, version=number)

    # --- look-ups and predictions: those of `AsyncRemoteModel`, with the name of the model first

    @overload
    async def lookup(
        self,
        model: str,
        feature: str,
        keys: KeysLike,
        *,
        return_found: Literal[False] = False,
        **options: Unpack[LookupOptions],
    ) -> Floats: ...
    @overload
    async def lookup(
        self, model: str, feature: str, keys: KeysLike, *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> tuple[Floats, Found]: ...
    @overload
    async def lookup(
        self, model: str, feature: str, keys: KeysLike, *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Floats | tuple[Floats, Found]: ...
    async def lookup(
        self, model: str, feature: str, keys: KeysLike, *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any:
        """See `AsyncRemoteModel.lookup`."""
        return await self._transport.run(self._operations.lookup(model, feature, keys, return_found, options))

    @overload
    async def lookup_bags(
        self,
        model: str,
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike,
        *,
        return_found: Literal[False] = False,
        **options: Unpack[BagOptions],
    ) -> Floats: ...
    @overload
    async def lookup_bags(
        self,
        model: str,
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike,
        *,
        return_found: Literal[True],
        **options: Unpack[BagOptions],
    ) -> tuple[Floats, Found]: ...
    @overload
    async def lookup_bags(
        self,
        model: str,
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike,
        *,
        return_found: bool = False,
        **options: Unpack[BagOptions],
    ) -> Floats | tuple[Floats, Found]: ...
    async def lookup_bags(
        self,
        model: str,
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike,
        *,
        return_found: bool = False,
        **options: Unpack[BagOptions],
    ) -> Any:
        """See `AsyncRemoteModel.lookup_bags`."""
        bags = self._operations.lookup_bags(model, feature, keys, offsets, return_found, options)
        return await self._transport.run(bags)

    @overload
    async def lookup_many(
        self,
        model: str,
        keys: Mapping[str, Any],
        *,
        return_found: Literal[False] = False,
        **options: Unpack[LookupOptions],
    ) -> dict[str, Floats]: ...
    @overload
    async def lookup_many(
        self, model: str, keys: Mapping[str, Any], *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> dict[str, tuple[Floats, Found]]: ...
    @overload
    async def lookup_many(
        self, model: str, keys: Mapping[str, Any], *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> dict[str, Floats] | dict[str, tuple[Floats, Found]]: ...
    async def lookup_many(
        self, model: str, keys: Mapping[str, Any], *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any:
        """See `AsyncRemoteModel.lookup_many`."""
        return await self._transport.run(self._operations.lookup_many(model, keys, return_found, options))

    @overload
    async def predict(
        self, model: str, inputs: Mapping[str, Any], *, outputs: Sequence[str], **options: Unpack[PredictOptions]
    ) -> dict[str, npt.NDArray[Any]]: ...
    @overload
    async def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        **options: Unpack[PredictOptions],
    ) -> npt.NDArray[Any] | Any: ...
    async def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        **options: Unpack[PredictOptions],
    ) -> Any:
        """See `AsyncRemoteModel.predict`."""
        return await self._transport.run(self._operations.predict(model, inputs, outputs, options))

    # --- state, versions and deltas

    async def ready(self) -> bool:
        """Whether the service accepts requests."""
        return await self._transport.run(self._operations.ready())

    async def models(self) -> list[str]:
        """Names of the service's models, sorted."""
        return await self._transport.run(self._operations.models())

    async def status(self, model: str | None = None) -> ServiceStatus:
        """`{"models": {name: …}, …}`, the document of the embedded store's `status`. NotFound for an unknown `model`.

        Without `model` it has the store's own limits too, and under `service` those of the
        service; with it, `models` alone.
        """
        return await self._transport.run(self._operations.status(model))

    async def metrics(self) -> str:
        """The service's metrics, in the text format of Prometheus. With several nodes: those of one of them."""
        return await self._transport.run(self._operations.metrics())

    async def load_snapshot(
        self, source: str | Path, *, model: str | None = None, activate: bool = True, progress: ProgressFn | None = None
    ) -> int:
        """Have the service load a snapshot, and wait until that is done.

        Args:
            source: as the service sees it, under one of its source roots; or a directory here,
                which is sent in pieces if the service cannot read it.
            model: whose snapshot it is; read from `snapshot.json` (or `built.json`) in
                `source` if that can be read here.
            activate: serve it once it is loaded, caught up and warm.
            progress: called now and then, on the calling thread.

        Returns the version. Raises SnapshotError when it is refused; nothing that served before changes then.
        """
        return await self._transport.run(self._operations.load_snapshot(source, model, activate, progress))

    async def start_load(self, source: str | Path, *, model: str, activate: bool = True) -> str:
        """Send a snapshot if need be, start what `load_snapshot` does, and return the job's id for `job`."""
        return await self._transport.run(self._operations.start_load(source, model, activate))

    async def export(
        self,
        model: str,
        directory: str | Path,
        *,
        version: int | str | None = None,
        as_version: int | None = None,
        partitions: int | None = None,
        progress: ProgressFn | None = None,
    ) -> ExportReport:
        """Have the service write what a model serves now, with all deltas up to one seq, as
        a snapshot, and wait for it.

        Args:
            directory: to be made, as the service sees it: below its `export_root`, in which a
                relative one is; or a URL below one.
            version: number or label of a version that is served; by default the active one.
            as_version: number of the snapshot; by default the version's own.
            partitions: write a built version, in so many partitions; by default a snapshot.
            progress: called now and then, on the calling thread.
        """
        return await self._transport.run(
            self._operations.export(model, directory, version, as_version, partitions, progress)
        )

    async def backup(
        self, model: str, directory: str | Path, *, keep: int = 1, progress: ProgressFn | None = None
    ) -> BackupReport:
        """Have the service back a model up as it is at one moment, and wait for it; it goes on serving.

        See `Store.backup`.

        `directory` is as the service sees it: below its `export_root`, in which a relative one is; or a URL below one.
        """
        return await self._transport.run(self._operations.backup(model, directory, keep, progress))

    async def job(self, job: str) -> dict[str, Any]:
        """The `state` of a load, export or backup (`running`, `done`, `failed`), `phase`, `done`, `total`, `rate`,
        `eta_s`, `waits_for`, `error`.
        """
        return await self._transport.run(self._operations.job(job))

    async def jobs(self) -> list[dict[str, Any]]:
        """Loads, exports and backups that run, wait, or ended lately, the latest first; each as of `job`."""
        return await self._transport.run(self._operations.jobs())

    async def apply_delta(
        self,
        source: bytes | bytearray | memoryview | str | Path,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> DeltaResult:
        """Send a delta: the Arrow stream itself, or the path of a file that holds it.

        On return it is durable, and every look-up that starts then sees all of it. SequenceGap names the expected seq.
        `model` defaults to the one in the stream's metadata. `applied` is False also where an earlier copy of this
        call had arrived and only its answer was lost.
        """
        return await self._transport.run(self._operations.apply_delta(source, model, timeout_s))

    async def cancel(self, job: str) -> None:
        """Stop a load or export; it ends as failed.

        Another load of the same snapshot can continue from what was finished.
        """
        await self._transport.run(self._operations.cancel(job))

    async def acknowledge(self, job: str) -> None:
        """Tell the service that somebody knows of a failed load, which then is no problem in its status any more."""
        await self._transport.run(self._operations.acknowledge(job))

    async def sample(
        self,
        model: str,
        *,
        version: int | str | None = None,
        keys: Mapping[str, Sequence[int]] | None = None,
        rows: int = 256,
        expired_at_s: int | None = None,
    ) -> dict[str, Any]:
        """Digests of some rows of every table, as they are answered now: nodes with the same
        rows at one seq have the same.

        Args:
            version: number or label of a version that is served; by default the active one.
            keys: codes of keys by table, as another answer lists them. By default the node
                chooses `rows` of each table.
            expired_at_s: seconds since 1970; rows that are expired then count as absent, whether the
                node has removed them or not.

        Returns `{"version", "seq", "tables": {table: {"keys", "found", "digest", "ttl_s"}}}`.
        """
        return await self._transport.run(self._operations.sample(model, version, keys, rows, expired_at_s))

    async def digests(
        self,
        model: str,
        *,
        version: int | str | None = None,
        seq: int | None = None,
        buckets: int = 1024,
        listed: Mapping[str, Sequence[int]] | None = None,
        expired_at_s: int | None = None,
    ) -> dict[str, Any]:
        """Digests of all rows of a version at one seq, as `POST /admin/models/{m}/digests` answers; the node
        reads every row for it.
        """
        wanted = {"version": version, "seq": seq, "buckets": buckets, "listed": listed, "expired_at_s": expired_at_s}
        return await self._transport.run(self._operations.digests(model, wanted))

    async def explain(
        self, model: str, feature: str, keys: KeysLike, *, version: int | str | None = None
    ) -> dict[str, Any]:
        """Why a few keys are answered as they are: what each tier holds of them, which
        delta wrote or deleted them last.

        Looking changes nothing. `version`: number or label of a version that is served; by default the active one.
        """
        return await self._transport.run(self._operations.explain(model, feature, keys, version))

    async def activate(
        self, model: str, version: int, *, force: bool = False, expected_active: int | None = None
    ) -> None:
        """Serve a kept version. Conflict for a stale one, unless `force`.

        With `expected_active` also a Conflict where neither that version nor `version` is active.
        """
        await self._transport.run(self._operations.activate(model, version, force, expected_active))

    async def deactivate(self, model: str) -> None:
        """Stop serving a model; its versions are kept."""
        await self._transport.run(self._operations.deactivate(model))

    async def rollback(
        self, model: str, *, to_seq: int | None = None, force: bool = False, expected_active: int | None = None
    ) -> int:
        """Serve the version before the active one, and return it.

        Conflict if there is none, or it is stale and not `force`.

        With `to_seq` the active version stays, and all deltas above that seq are undone: it is what it was right
        after delta `to_seq` was applied. With `expected_active` also a Conflict where another version is active: one
        that is sent again goes back once.
        """
        return await self._transport.run(self._operations.rollback(model, to_seq, force, expected_active))

    async def parked(self, all_states: bool = False) -> list[dict[str, Any]]:
        """Messages of a source that could not be applied; with `all_states` also those that were retried or skipped."""
        return await self._transport.run(self._operations.parked(all_states))

    async def parked_message(self, name: str) -> dict[str, Any]:
        """One parked message of a source, by its id. NotFound."""
        return await self._transport.run(self._operations.parked_message(name))

    async def parked_payload(self, name: str) -> bytes:
        """The bytes of a parked message, as they came."""
        return await self._transport.run(self._operations.parked_payload(name))

    async def retry_parked(self, name: str) -> dict[str, Any]:
        """Apply a parked message now; one that fails stays parked. Returns it, with `applied`."""
        return await self._transport.run(self._operations.decide_parked(name, "retry"))

    async def skip_parked(self, name: str) -> dict[str, Any]:
        """Skip a parked message: a delta without rows gets its seq.

        Conflict if an earlier delta is still missing.
        """
        return await self._transport.run(self._operations.decide_parked(name, "skip"))

    async def log_level(self, level: LogLevel) -> LogLevel:
        """See `Client.log_level`."""
        before: LogLevel = await self._transport.run(self._operations.log_level(level))
        return before

    async def drop(self, model: str, version: int) -> None:
        """Remove a version from disk. Conflict for the active one."""
        await self._transport.run(self._operations.drop(model, version))

    async def canary(self, model: str, version: int, share: float = 0.05, *, force: bool = False) -> None:
        """Serve a kept version to `share` (0 to 1) of the requests that name none; for the
        canary, only change the share.
        """
        await self._transport.run(self._operations.canary(model, version, share, force))

    async def promote(self, model: str) -> int:
        """Make the canary the active version, and return it. Conflict where there is none."""
        return await self._transport.run(self._operations.promote(model))

    async def withdraw(self, model: str) -> int:
        """Stop serving the canary, and return its version, which is kept. Conflict where there is none."""
        return await self._transport.run(self._operations.withdraw(model))

    async def label(self, model: str, name: str, version: int) -> None:
        """Give a serving version a label, which it has until it stops serving."""
        await self._transport.run(self._operations.label(model, name, version))

    async def unlabel(self, model: str, name: str) -> None:
        """Remove a label."""
        await self._transport.run(self._operations.label(model, name, None))
