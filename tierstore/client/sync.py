"""`Client`: the verbs of a store over HTTP, for threads.

Any thread may use one `Client`, and many should share one: it keeps its connections open. The calling thread carries
its own requests. The client holds no state of the service; an acknowledged verb is as durable as the
service made it.

Made of `aio.py`: `python tools/make_client.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from tierstore.client.base import ClientBase
from tierstore.client.operations import BagOptions, Floats, Found, LookupOptions, PredictOptions
from tierstore.client.settings import ClientSettings
from tierstore.client.sync_models import RemoteModel
from tierstore.client.transport import Transport
from tierstore.logs import LogLevel
from tierstore.types import BackupReport, DeltaResult, ExportReport, KeysLike, ProgressFn

if TYPE_CHECKING:
    import numpy.typing as npt

    from tierstore.status import ServiceStatus


class Client(ClientBase[Transport]):
    __doc__ = f"{ClientBase.__doc__}\n\n    Every verb blocks until it is done."

    def _make_transport(self, settings: ClientSettings) -> Transport:
        return Transport(settings, self._budget, self._balancer)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; verbs that other threads have started still end. May be called twice."""
        self._transport.close()

    def model(self, name: str) -> RemoteModel:
        """The model of that name. Nothing is sent: a name that the service does not have fails at the first look-up."""
        return RemoteModel(name, self._operations, self._transport)

    @contextmanager
    def pinned(self, model: str, version: int | str | None = None) -> Iterator[RemoteModel]:
        """The model, pinned to one version in the block: each request names it, and goes to a node that serves it.

        version: number or label; by default the version that is active now at one of the nodes. Once no node serves it
        any more, requests raise NotFound. A version is served while it is active or the canary.
        """
        number = self._transport.run(self._operations.served_version(model, version))
        yield RemoteModel(model, self._operations, self._transport, version=number)

    # --- look-ups and predictions: those of `RemoteModel`, with the name of the model first

    @overload
    def lookup(
        self,
        model: str,
        feature: str,
        keys: KeysLike,
        *,
        return_found: Literal[False] = False,
        **options: Unpack[LookupOptions],
    ) -> Floats: ...
    @overload
    def lookup(
        self, model: str, feature: str, keys: KeysLike, *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> tuple[Floats, Found]: ...
    @overload
    def lookup(
        self, model: str, feature: str, keys: KeysLike, *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Floats | tuple[Floats, Found]: ...
    def lookup(
        self, model: str, feature: str, keys: KeysLike, *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any:
        """See `RemoteModel.lookup`."""
        return self._transport.run(self._operations.lookup(model, feature, keys, return_found, options))

    @overload
    def lookup_bags(
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
    def lookup_bags(
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
    def lookup_bags(
        self,
        model: str,
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike,
        *,
        return_found: bool = False,
        **options: Unpack[BagOptions],
    ) -> Floats | tuple[Floats, Found]: ...
    def lookup_bags(
        self,
        model: str,
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike,
        *,
        return_found: bool = False,
        **options: Unpack[BagOptions],
    ) -> Any:
        """See `RemoteModel.lookup_bags`."""
        bags = self._operations.lookup_bags(model, feature, keys, offsets, return_found, options)
        return self._transport.run(bags)

    @overload
    def lookup_many(
        self,
        model: str,
        keys: Mapping[str, Any],
        *,
        return_found: Literal[False] = False,
        **options: Unpack[LookupOptions],
    ) -> dict[str, Floats]: ...
    @overload
    def lookup_many(
        self, model: str, keys: Mapping[str, Any], *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> dict[str, tuple[Floats, Found]]: ...
    @overload
    def lookup_many(
        self, model: str, keys: Mapping[str, Any], *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> dict[str, Floats] | dict[str, tuple[Floats, Found]]: ...
    def lookup_many(
        self, model: str, keys: Mapping[str, Any], *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any:
        """See `RemoteModel.lookup_many`."""
        return self._transport.run(self._operations.lookup_many(model, keys, return_found, options))

    @overload
    def predict(
        self, model: str, inputs: Mapping[str, Any], *, outputs: Sequence[str], **options: Unpack[PredictOptions]
    ) -> dict[str, npt.NDArray[Any]]: ...
    @overload
    def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        **options: Unpack[PredictOptions],
    ) -> npt.NDArray[Any] | Any: ...
    def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        **options: Unpack[PredictOptions],
    ) -> Any:
        """See `RemoteModel.predict`."""
        return self._transport.run(self._operations.predict(model, inputs, outputs, options))

    # --- state, versions and deltas

    def ready(self) -> bool:
        """Whether the service accepts requests."""
        return self._transport.run(self._operations.ready())

    def models(self) -> list[str]:
        """Names of the service's models, sorted."""
        return self._transport.run(self._operations.models())

    def status(self, model: str | None = None) -> ServiceStatus:
        """`{"models": {name: …}, …}`, the document of the embedded store's `status`. NotFound for an unknown `model`.

        Without `model` it has the store's own limits too, and under `service` those of the
        service; with it, `models` alone.
        """
        return self._transport.run(self._operations.status(model))

    def metrics(self) -> str:
        """The service's metrics, in the text format of Prometheus. With several nodes: those of one of them."""
        return self._transport.run(self._operations.metrics())

    def load_snapshot(
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
        return self._transport.run(self._operations.load_snapshot(source, model, activate, progress))

    def start_load(self, source: str | Path, *, model: str, activate: bool = True) -> str:
        """Send a snapshot if need be, start what `load_snapshot` does, and return the job's id for `job`."""
        return self._transport.run(self._operations.start_load(source, model, activate))

    def export(
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
        return self._transport.run(self._operations.export(model, directory, version, as_version, partitions, progress))

    def backup(
        self, model: str, directory: str | Path, *, keep: int = 1, progress: ProgressFn | None = None
    ) -> BackupReport:
        """Have the service back a model up as it is at one moment, and wait for it; it goes on serving.

        See `Store.backup`.

        `directory` is as the service sees it: below its `export_root`, in which a relative one is; or a URL below one.
        """
        return self._transport.run(self._operations.backup(model, directory, keep, progress))

    def job(self, job: str) -> dict[str, Any]:
        """The `state` of a load, export or backup (`running`, `done`, `failed`), `phase`, `done`, `total`, `rate`,
        `eta_s`, `waits_for`, `error`.
        """
        return self._transport.run(self._operations.job(job))

    def jobs(self) -> list[dict[str, Any]]:
        """Loads, exports and backups that run, wait, or ended lately, the latest first; each as of `job`."""
        return self._transport.run(self._operations.jobs())

    def apply_delta(
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
        return self._transport.run(self._operations.apply_delta(source, model, timeout_s))

    def cancel(self, job: str) -> None:
        """Stop a load or export; it ends as failed.

        Another load of the same snapshot can continue from what was finished.
        """
        self._transport.run(self._operations.cancel(job))

    def acknowledge(self, job: str) -> None:
        """Tell the service that somebody knows of a failed load, which then is no problem in its status any more."""
        self._transport.run(self._operations.acknowledge(job))

    def sample(
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
        return self._transport.run(self._operations.sample(model, version, keys, rows, expired_at_s))

    def digests(
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
        return self._transport.run(self._operations.digests(model, wanted))

    def explain(self, model: str, feature: str, keys: KeysLike, *, version: int | str | None = None) -> dict[str, Any]:
        """Why a few keys are answered as they are: what each tier holds of them, which
        delta wrote or deleted them last.

        Looking changes nothing. `version`: number or label of a version that is served; by default the active one.
        """
        return self._transport.run(self._operations.explain(model, feature, keys, version))

    def activate(self, model: str, version: int, *, force: bool = False, expected_active: int | None = None) -> None:
        """Serve a kept version. Conflict for a stale one, unless `force`.

        With `expected_active` also a Conflict where neither that version nor `version` is active.
        """
        self._transport.run(self._operations.activate(model, version, force, expected_active))

    def deactivate(self, model: str) -> None:
        """Stop serving a model; its versions are kept."""
        self._transport.run(self._operations.deactivate(model))

    def rollback(
        self, model: str, *, to_seq: int | None = None, force: bool = False, expected_active: int | None = None
    ) -> int:
        """Serve the version before the active one, and return it.

        Conflict if there is none, or it is stale and not `force`.

        With `to_seq` the active version stays, and all deltas above that seq are undone: it is what it was right
        after delta `to_seq` was applied. With `expected_active` also a Conflict where another version is active: one
        that is sent again goes back once.
        """
        return self._transport.run(self._operations.rollback(model, to_seq, force, expected_active))

    def parked(self, all_states: bool = False) -> list[dict[str, Any]]:
        """Messages of a source that could not be applied; with `all_states` also those that were retried or skipped."""
        return self._transport.run(self._operations.parked(all_states))

    def parked_message(self, name: str) -> dict[str, Any]:
        """One parked message of a source, by its id. NotFound."""
        return self._transport.run(self._operations.parked_message(name))

    def parked_payload(self, name: str) -> bytes:
        """The bytes of a parked message, as they came."""
        return self._transport.run(self._operations.parked_payload(name))

    def retry_parked(self, name: str) -> dict[str, Any]:
        """Apply a parked message now; one that fails stays parked. Returns it, with `applied`."""
        return self._transport.run(self._operations.decide_parked(name, "retry"))

    def skip_parked(self, name: str) -> dict[str, Any]:
        """Skip a parked message: a delta without rows gets its seq.

        Conflict if an earlier delta is still missing.
        """
        return self._transport.run(self._operations.decide_parked(name, "skip"))

    def log_level(self, level: LogLevel) -> LogLevel:
        """See `Client.log_level`."""
        before: LogLevel = self._transport.run(self._operations.log_level(level))
        return before

    def drop(self, model: str, version: int) -> None:
        """Remove a version from disk. Conflict for the active one."""
        self._transport.run(self._operations.drop(model, version))

    def canary(self, model: str, version: int, share: float = 0.05, *, force: bool = False) -> None:
        """Serve a kept version to `share` (0 to 1) of the requests that name none; for the
        canary, only change the share.
        """
        self._transport.run(self._operations.canary(model, version, share, force))

    def promote(self, model: str) -> int:
        """Make the canary the active version, and return it. Conflict where there is none."""
        return self._transport.run(self._operations.promote(model))

    def withdraw(self, model: str) -> int:
        """Stop serving the canary, and return its version, which is kept. Conflict where there is none."""
        return self._transport.run(self._operations.withdraw(model))

    def label(self, model: str, name: str, version: int) -> None:
        """Give a serving version a label, which it has until it stops serving."""
        self._transport.run(self._operations.label(model, name, version))

    def unlabel(self, model: str, name: str) -> None:
        """Remove a label."""
        self._transport.run(self._operations.label(model, name, None))
