from abc import ABCMeta
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np
import numpy.typing as npt

from tierstore.client.face import Face
from tierstore.client.remote import LookupOptions, RemoteModel
from tierstore.client.steps import Version
from tierstore.types import DeltaResult, ProgressFn

Floats = npt.NDArray[np.floating[Any]]
Found = npt.NDArray[np.bool_]

class BlockingModel(RemoteModel):
    @property
    def ready(self) -> bool: ...
    def metadata(self, *, version: Version = None) -> dict[str, Any]: ...
    @overload
    def lookup(
        self, feature: str, keys: Any, *, return_found: Literal[False] = False, **options: Unpack[LookupOptions]
    ) -> Floats: ...
    @overload
    def lookup(
        self, feature: str, keys: Any, *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> tuple[Floats, Found]: ...
    @overload
    def lookup(
        self, feature: str, keys: Any, *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any: ...
    @overload
    def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: Literal[False] = False,
        **options: Unpack[LookupOptions],
    ) -> Floats: ...
    @overload
    def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: Literal[True],
        **options: Unpack[LookupOptions],
    ) -> tuple[Floats, Found]: ...
    @overload
    def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: bool = False,
        **options: Unpack[LookupOptions],
    ) -> Any: ...
    @overload
    def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: Literal[False] = False, **options: Unpack[LookupOptions]
    ) -> dict[str, Floats]: ...
    @overload
    def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> dict[str, tuple[Floats, Found]]: ...
    @overload
    def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any: ...
    @overload
    def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: None = None,
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> Any: ...
    @overload
    def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str],
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> dict[str, npt.NDArray[Any]]: ...
    @overload
    def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> Any: ...

class BlockingVerbs(Face, metaclass=ABCMeta):
    def model(self, name: str) -> BlockingModel: ...
    @overload
    def lookup(
        self,
        model: str,
        feature: str,
        keys: Any,
        *,
        return_found: Literal[False] = False,
        **options: Unpack[LookupOptions],
    ) -> Floats: ...
    @overload
    def lookup(
        self, model: str, feature: str, keys: Any, *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> tuple[Floats, Found]: ...
    @overload
    def lookup(
        self, model: str, feature: str, keys: Any, *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any: ...
    @overload
    def lookup_bags(
        self,
        model: str,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: Literal[False] = False,
        **options: Unpack[LookupOptions],
    ) -> Floats: ...
    @overload
    def lookup_bags(
        self,
        model: str,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: Literal[True],
        **options: Unpack[LookupOptions],
    ) -> tuple[Floats, Found]: ...
    @overload
    def lookup_bags(
        self,
        model: str,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: bool = False,
        **options: Unpack[LookupOptions],
    ) -> Any: ...
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
    ) -> Any: ...
    @overload
    def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: None = None,
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> Any: ...
    @overload
    def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str],
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> dict[str, npt.NDArray[Any]]: ...
    @overload
    def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> Any: ...
    def ready(self) -> bool: ...
    def models(self) -> list[str]: ...
    def status(self, model: str | None = None) -> dict[str, Any]: ...
    def load_snapshot(
        self,
        source: str | Path,
        *,
        model: str | None = None,
        activate: bool = True,
        progress: ProgressFn | None = None,
    ) -> int: ...
    def start_load(self, source: str | Path, *, model: str, activate: bool = True) -> str: ...
    def job(self, job: str) -> dict[str, Any]: ...
    def apply_delta(
        self,
        source: bytes | bytearray | memoryview | str | Path,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> DeltaResult: ...
    def activate(self, model: str, version: int, *, force: bool = False) -> None: ...
    def rollback(self, model: str, *, force: bool = False) -> int: ...
    def drop(self, model: str, version: int) -> None: ...
    def canary(self, model: str, version: int, share: float = 0.05, *, force: bool = False) -> None: ...
    def promote(self, model: str) -> int: ...
    def withdraw(self, model: str) -> int: ...
    def label(self, model: str, name: str, version: int) -> None: ...
    def unlabel(self, model: str, name: str) -> None: ...

class AwaitedModel(RemoteModel):
    @property
    def ready(self) -> Awaitable[bool]: ...
    async def metadata(self, *, version: Version = None) -> dict[str, Any]: ...
    @overload
    async def lookup(
        self, feature: str, keys: Any, *, return_found: Literal[False] = False, **options: Unpack[LookupOptions]
    ) -> Floats: ...
    @overload
    async def lookup(
        self, feature: str, keys: Any, *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> tuple[Floats, Found]: ...
    @overload
    async def lookup(
        self, feature: str, keys: Any, *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any: ...
    @overload
    async def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: Literal[False] = False,
        **options: Unpack[LookupOptions],
    ) -> Floats: ...
    @overload
    async def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: Literal[True],
        **options: Unpack[LookupOptions],
    ) -> tuple[Floats, Found]: ...
    @overload
    async def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: bool = False,
        **options: Unpack[LookupOptions],
    ) -> Any: ...
    @overload
    async def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: Literal[False] = False, **options: Unpack[LookupOptions]
    ) -> dict[str, Floats]: ...
    @overload
    async def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> dict[str, tuple[Floats, Found]]: ...
    @overload
    async def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any: ...
    @overload
    async def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: None = None,
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> Any: ...
    @overload
    async def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str],
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> dict[str, npt.NDArray[Any]]: ...
    @overload
    async def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> Any: ...

class AwaitedVerbs(Face, metaclass=ABCMeta):
    def model(self, name: str) -> AwaitedModel: ...
    @overload
    async def lookup(
        self,
        model: str,
        feature: str,
        keys: Any,
        *,
        return_found: Literal[False] = False,
        **options: Unpack[LookupOptions],
    ) -> Floats: ...
    @overload
    async def lookup(
        self, model: str, feature: str, keys: Any, *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> tuple[Floats, Found]: ...
    @overload
    async def lookup(
        self, model: str, feature: str, keys: Any, *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any: ...
    @overload
    async def lookup_bags(
        self,
        model: str,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: Literal[False] = False,
        **options: Unpack[LookupOptions],
    ) -> Floats: ...
    @overload
    async def lookup_bags(
        self,
        model: str,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: Literal[True],
        **options: Unpack[LookupOptions],
    ) -> tuple[Floats, Found]: ...
    @overload
    async def lookup_bags(
        self,
        model: str,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: bool = False,
        **options: Unpack[LookupOptions],
    ) -> Any: ...
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
    ) -> Any: ...
    @overload
    async def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: None = None,
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> Any: ...
    @overload
    async def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str],
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> dict[str, npt.NDArray[Any]]: ...
    @overload
    async def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        version: Version = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        split_items: int | Literal["client"] | None = "client",
    ) -> Any: ...
    async def ready(self) -> bool: ...
    async def models(self) -> list[str]: ...
    async def status(self, model: str | None = None) -> dict[str, Any]: ...
    async def load_snapshot(
        self,
        source: str | Path,
        *,
        model: str | None = None,
        activate: bool = True,
        progress: ProgressFn | None = None,
    ) -> int: ...
    async def start_load(self, source: str | Path, *, model: str, activate: bool = True) -> str: ...
    async def job(self, job: str) -> dict[str, Any]: ...
    async def apply_delta(
        self,
        source: bytes | bytearray | memoryview | str | Path,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> DeltaResult: ...
    async def activate(self, model: str, version: int, *, force: bool = False) -> None: ...
    async def rollback(self, model: str, *, force: bool = False) -> int: ...
    async def drop(self, model: str, version: int) -> None: ...
    async def canary(self, model: str, version: int, share: float = 0.05, *, force: bool = False) -> None: ...
    async def promote(self, model: str) -> int: ...
    async def withdraw(self, model: str) -> int: ...
    async def label(self, model: str, name: str, version: int) -> None: ...
    async def unlabel(self, model: str, name: str) -> None: ...
