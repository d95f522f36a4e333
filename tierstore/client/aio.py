"""`AsyncClient`: the verbs of a store over HTTP, for asyncio.

They are those of `tierstore.client.sync`, to be awaited. One client belongs to one event loop; any number of its tasks
may share it. A verb that is cancelled closes the connections that it was using.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack, overload

import numpy.typing as npt

from tierstore.client.async_transport import AsyncTransport
from tierstore.client.base import ClientBase
from tierstore.client.inputs import KeysLike
from tierstore.client.operations import BagOptions, Floats, Found, LookupOptions, PredictOptions
from tierstore.client.remote_models import AsyncRemoteModel
from tierstore.client.settings import Settings
from tierstore.logs import LogLevel
from tierstore.types import BackupReport, DeltaResult, ExportReport, ProgressFn


class AsyncClient(ClientBase[AsyncTransport]):
    __doc__ = f"{ClientBase.__doc__}\n\n    Every verb is to be awaited; `model` and `figures` are not."

    def _make_transport(self, settings: Settings) -> AsyncTransport:
        return AsyncTransport(settings, self._budget, self._balancer)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; verbs that have started still end. May be called twice."""
        await self._transport.close()

    def model(self, name: str) -> AsyncRemoteModel:
        """The model of that name; see `Client.model`."""
        return AsyncRemoteModel(name, self._operations, self._transport)

    @asynccontextmanager
    async def pinned(self, model: str, version: int | str | None = None) -> AsyncIterator[AsyncRemoteModel]:
        """The model, of one version in the whole block; see `Client.pinned`."""
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
        """See `RemoteModel.lookup`."""
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
        """See `RemoteModel.lookup_bags`."""
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
        """See `RemoteModel.lookup_many`."""
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
        """See `RemoteModel.predict`."""
        return await self._transport.run(self._operations.predict(model, inputs, outputs, options))

    # --- state, versions and deltas

    async def ready(self) -> bool:
        """See `Client.ready`."""
        return await self._transport.run(self._operations.ready())

    async def models(self) -> list[str]:
        """See `Client.models`."""
        return await self._transport.run(self._operations.models())

    async def status(self, model: str | None = None) -> dict[str, Any]:
        """See `Client.status`."""
        return await self._transport.run(self._operations.status(model))

    async def metrics(self) -> str:
        """See `Client.metrics`."""
        return await self._transport.run(self._operations.metrics())

    async def load_snapshot(
        self, source: str | Path, *, model: str | None = None, activate: bool = True, progress: ProgressFn | None = None
    ) -> int:
        """See `Client.load_snapshot`."""
        return await self._transport.run(self._operations.load_snapshot(source, model, activate, progress))

    async def start_load(self, source: str | Path, *, model: str, activate: bool = True) -> str:
        """See `Client.start_load`."""
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
        """See `Client.export`."""
        return await self._transport.run(
            self._operations.export(model, directory, version, as_version, partitions, progress)
        )

    async def backup(
        self, model: str, directory: str | Path, *, keep: int = 1, progress: ProgressFn | None = None
    ) -> BackupReport:
        """See `Client.backup`."""
        return await self._transport.run(self._operations.backup(model, directory, keep, progress))

    async def job(self, job: str) -> dict[str, Any]:
        """See `Client.job`."""
        return await self._transport.run(self._operations.job(job))

    async def jobs(self) -> list[dict[str, Any]]:
        """See `Client.jobs`."""
        return await self._transport.run(self._operations.jobs())

    async def apply_delta(
        self,
        source: bytes | bytearray | memoryview | str | Path,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> DeltaResult:
        """See `Client.apply_delta`."""
        return await self._transport.run(self._operations.apply_delta(source, model, timeout_s))

    async def cancel(self, job: str) -> None:
        """See `Client.cancel`."""
        await self._transport.run(self._operations.cancel(job))

    async def sample(
        self,
        model: str,
        *,
        version: int | str | None = None,
        keys: Mapping[str, Sequence[int]] | None = None,
        rows: int = 256,
        expired_at_s: int | None = None,
    ) -> dict[str, Any]:
        """See `Client.sample`."""
        return await self._transport.run(self._operations.sample(model, version, keys, rows, expired_at_s))

    async def explain(
        self, model: str, feature: str, keys: KeysLike, *, version: int | str | None = None
    ) -> dict[str, Any]:
        """See `Client.explain`."""
        return await self._transport.run(self._operations.explain(model, feature, keys, version))

    async def activate(
        self, model: str, version: int, *, force: bool = False, expected_active: int | None = None
    ) -> None:
        """See `Client.activate`."""
        await self._transport.run(self._operations.activate(model, version, force, expected_active))

    async def deactivate(self, model: str) -> None:
        """See `Client.deactivate`."""
        await self._transport.run(self._operations.deactivate(model))

    async def rollback(
        self, model: str, *, to_seq: int | None = None, force: bool = False, expected_active: int | None = None
    ) -> int:
        """See `Client.rollback`."""
        return await self._transport.run(self._operations.rollback(model, to_seq, force, expected_active))

    async def parked(self, all_states: bool = False) -> list[dict[str, Any]]:
        """See `Client.parked`."""
        return await self._transport.run(self._operations.parked(all_states))

    async def parked_message(self, name: str) -> dict[str, Any]:
        """See `Client.parked_message`."""
        return await self._transport.run(self._operations.parked_message(name))

    async def parked_payload(self, name: str) -> bytes:
        """See `Client.parked_payload`."""
        return await self._transport.run(self._operations.parked_payload(name))

    async def retry_parked(self, name: str) -> dict[str, Any]:
        """See `Client.retry_parked`."""
        return await self._transport.run(self._operations.decide_parked(name, "retry"))

    async def skip_parked(self, name: str) -> dict[str, Any]:
        """See `Client.skip_parked`."""
        return await self._transport.run(self._operations.decide_parked(name, "skip"))

    async def log_level(self, level: LogLevel) -> LogLevel:
        """See `Client.log_level`."""
        before: LogLevel = await self._transport.run(self._operations.log_level(level))
        return before

    async def drop(self, model: str, version: int) -> None:
        """See `Client.drop`."""
        await self._transport.run(self._operations.drop(model, version))

    async def canary(self, model: str, version: int, share: float = 0.05, *, force: bool = False) -> None:
        """See `Client.canary`."""
        await self._transport.run(self._operations.canary(model, version, share, force))

    async def promote(self, model: str) -> int:
        """See `Client.promote`."""
        return await self._transport.run(self._operations.promote(model))

    async def withdraw(self, model: str) -> int:
        """See `Client.withdraw`."""
        return await self._transport.run(self._operations.withdraw(model))

    async def label(self, model: str, name: str, version: int) -> None:
        """See `Client.label`."""
        await self._transport.run(self._operations.label(model, name, version))

    async def unlabel(self, model: str, name: str) -> None:
        """See `Client.unlabel`."""
        await self._transport.run(self._operations.label(model, name, None))
