"""`AsyncRemoteModel`: the verbs of one model of a service, for asyncio. Use one wherever its client may be used.

`sync_models.py` is made of this file: `python tools/make_client.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from tierstore.client.async_transport import AsyncTransport
from tierstore.client.inference import Version
from tierstore.client.inputs import pin_version
from tierstore.client.operations import BagOptions, Floats, Found, LookupOptions, Operations, PredictOptions
from tierstore.types import KeysLike

if TYPE_CHECKING:
    import numpy.typing as npt


class AsyncRemoteModel:
    """One model of a service. Holds nothing but its name, so it stays valid across version switches.

    `version`: where the model is pinned (see `AsyncClient.pinned`), the version that answers all of its requests.

    A request beyond the client's `split_keys` is sent as several, side by side. One version answers all of them, but a
    delta may become visible between them.
    """

    def __init__(
        self, name: str, operations: Operations, transport: AsyncTransport, *, version: int | None = None
    ) -> None:
        self.name, self.version, self._operations, self._transport = name, version, operations, transport

    @property
    async def ready(self) -> bool:
        """Whether a version of the model is served; to be awaited."""
        return await self._transport.run(self._operations.ready(self.name))

    async def metadata(self, *, version: Version = None) -> dict[str, Any]:
        """The protocol's model metadata: `inputs` and `outputs` with their datatypes and shapes."""
        return await self._transport.run(
            self._operations.metadata(self.name, self.version if version is None else version)
        )

    async def cache(self, table: str, limit: int = 20) -> dict[str, Any]:
        """What caches of the node do for a table: `curve` of its hit rate by size, `history` by the
        minute, the `limit` `hottest` keys.
        """
        return await self._transport.run(self._operations.cache(self.name, table, limit))

    @overload
    async def lookup(
        self, feature: str, keys: KeysLike, *, return_found: Literal[False] = False, **options: Unpack[LookupOptions]
    ) -> Floats: ...
    @overload
    async def lookup(
        self, feature: str, keys: KeysLike, *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> tuple[Floats, Found]: ...
    @overload
    async def lookup(
        self, feature: str, keys: KeysLike, *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Floats | tuple[Floats, Found]: ...
    async def lookup(
        self, feature: str, keys: KeysLike, *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any:
        """Rows of `keys`, in their order.

        Args:
            feature: a feature of the model.
            keys: n keys: integers, or strings for a string table; a list, an array, an Arrow array, a column, a tensor.
            return_found: also return which keys the table holds. A key that it does not hold has the table's default.
            options: see `LookupOptions`: `dtype`, `version`, `timeout_s`, `request_id`.

        Returns vectors [n, dim], or (vectors [n, dim], found bool[n]).
        """
        pin_version(options, self.version)
        return await self._transport.run(self._operations.lookup(self.name, feature, keys, return_found, options))

    @overload
    async def lookup_bags(
        self,
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
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike,
        *,
        return_found: bool = False,
        **options: Unpack[BagOptions],
    ) -> Floats | tuple[Floats, Found]: ...
    async def lookup_bags(
        self,
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike,
        *,
        return_found: bool = False,
        **options: Unpack[BagOptions],
    ) -> Any:
        """Embedding bags, pooled.

        Args:
            keys: n keys, as in `lookup`.
            offsets: int64[bags], the start of each bag in `keys`: the first 0, never descending, no end entry.
            options: see `BagOptions`: `weights`, `combiner`, and those of `lookup`.

        Returns vectors [bags, dim], zeros for an empty bag; with `return_found` also found bool[n].
        """
        pin_version(options, self.version)
        bags = self._operations.lookup_bags(self.name, feature, keys, offsets, return_found, options)
        return await self._transport.run(bags)

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
    ) -> dict[str, Floats] | dict[str, tuple[Floats, Found]]: ...
    async def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any:
        """Several features at once, in one request and so of one moment.

        Args:
            keys: by feature: keys as in `lookup`, or for bags a tuple `(keys, offsets)` or `(keys, offsets, weights)`.
            options: as for `lookup`.

        Returns {feature: what `lookup` or `lookup_bags` returns}.
        """
        pin_version(options, self.version)
        return await self._transport.run(self._operations.lookup_many(self.name, keys, return_found, options))

    @overload
    async def predict(
        self, inputs: Mapping[str, Any], *, outputs: Sequence[str], **options: Unpack[PredictOptions]
    ) -> dict[str, npt.NDArray[Any]]: ...
    @overload
    async def predict(
        self, inputs: Mapping[str, Any], *, outputs: Sequence[str] | None = None, **options: Unpack[PredictOptions]
    ) -> npt.NDArray[Any] | Any: ...
    async def predict(
        self, inputs: Mapping[str, Any], *, outputs: Sequence[str] | None = None, **options: Unpack[PredictOptions]
    ) -> Any:
        """Outputs of the model's dense part for a batch of items.

        Args:
            inputs: by name: keys of features and the dense part's own inputs, an array each, converted to the datatype
                that the model declares; for ragged features `(keys, offsets)` or `(keys, offsets, weights)`. Axis 0, or
                the bag, is the item; an input with one entry (the user) counts for all items.
            outputs: names; by default those of the dense part.
            options: see `PredictOptions`: `version`, `timeout_s`, `request_id`, `split_items`. Set `split_items=None`
                for a model whose answer for an item depends on the other items of the batch.

        Returns {name: array}, or the array itself where no outputs are named and the model answers one.
        """
        pin_version(options, self.version)
        return await self._transport.run(self._operations.predict(self.name, inputs, outputs, options))
