"""Traces what a module does with its tables: runs of it, unchanged, and what a service would look up in its place.

For the thread that trains.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from tierstore.arguments import as_bags
from tierstore.errors import InvalidInput
from tierstore.torch.hashing import HashKeys
from tierstore.torch.tables import (
    Collection,
    check_collections,
    check_mode,
    check_table,
    collections_of,
    padding_of,
    scoring,
    weight_rows,
)
from tierstore.types import KeyHash, KeyType

_DRAWN, _MOST_RUNS = 64, 16  # items with keys that the example did not name, and runs of the module for them
_OF_ROWS = 1e-4  # between rows of a module and of its weight, of the largest


@dataclass(slots=True)
class UsedFeature:
    """An argument of `forward` that goes into a table; `rows` is what a service looks up or pools for the example."""

    name: str
    table: str
    combiner: str | None
    padding: int | None
    rows: torch.Tensor
    dtype: torch.dtype  # of the rows that the module computes with
    parts: tuple[str, ...]  # the arguments with offsets and weights of its bags, or that which the bags are in
    bags: JaggedKeys
    hash: KeyHash | None = None  # by which a HashKeys makes row numbers of the argument
    pooled: Any = None  # the type that a collection of TorchRec returns, where one has the feature


@dataclass(slots=True)
class JaggedKeys:
    """Keys, and where each bag begins, without an end; None where keys are no bags, or a bag is a row of a matrix."""

    keys: torch.Tensor
    offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None

    def as_request(self, keys: Any) -> Any:
        """What a request has for the feature, `keys` being those of the table."""
        offsets, weights = self.offsets, self.weights
        if weights is not None and offsets is None:
            offsets, keys = torch.arange(len(keys)) * keys.shape[1], keys.reshape(-1)
        others = [one.reshape(-1).numpy(force=True) for one in (offsets, weights) if one is not None]
        return (keys, *others) if others else keys


@dataclass(slots=True)
class ModuleRun:
    """One run of the unchanged module."""

    inputs: Mapping[str, Any]
    features: dict[str, UsedFeature]  # by argument, or by their names in a collection
    outputs: list[torch.Tensor]


def runs_of(module: nn.Module, inputs: Mapping[str, Any], tables: Mapping[str, Any]) -> list[ModuleRun]:
    """Runs on the example and, in its shapes, on keys drawn from all rows of each table.

    The example shows what goes where. Others are there because what a module does to some keys alone (one that it
    takes for unknown, rows that it shortens as they are read) does not show in a few that were chosen.
    """
    check_collections(module)
    for name, table in tables.items():
        check_table(name, table)
    runs, rng = [run_of(module, inputs, tables)], np.random.default_rng(0)
    features = runs[0].features
    items = min((len(feature.rows) for feature in features.values()), default=_DRAWN)
    for number in range(min(math.ceil(_DRAWN / max(items, 1)), _MOST_RUNS) if features else 0):
        drawn = _drawn(features, inputs, tables, rng, edges=number == 0)
        try:
            runs.append(run_of(module, drawn, tables))
        except InvalidInput:
            raise
        except Exception as error:  # of the user's own code
            raise InvalidInput(
                f"forward fails on rows of its tables that the example does not name, drawn from all of each: {error}"
            ) from error
        if runs[-1].features.keys() != features.keys():
            raise InvalidInput(
                f"forward reads {', '.join(features)} for the example, and {', '.join(runs[-1].features)} for keys "
                "drawn from its tables: expected the same for all keys"
            )
    return runs


def run_of(module: nn.Module, inputs: Mapping[str, Any], tables: Mapping[str, Any]) -> ModuleRun:
    """Run a module once, and note which arguments go into which tables."""
    finder, collections = _Finder(inputs, tables), collections_of(module)
    collected = {id(table) for one in collections for _, table in one.tables}
    # Registered last, hooks are given what hooks of the user's own have made of the rows.
    hooks = [
        table.register_forward_hook(finder.of_table(name), with_kwargs=True)
        for name, table in tables.items()
        if id(table) not in collected
    ]
    hooks += [one.module.register_forward_hook(finder.of_collection(one), with_kwargs=True) for one in collections]
    hooks += [one.register_forward_hook(finder.hashed) for one in module.modules() if isinstance(one, HashKeys)]
    try:
        with scoring(module):
            outputs = module(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    outputs = list(outputs.values()) if isinstance(outputs, dict) else outputs
    return ModuleRun(inputs, finder.found, list(outputs) if isinstance(outputs, (list, tuple)) else [outputs])


def _drawn(
    features: Mapping[str, UsedFeature], inputs: Mapping[str, Any], tables: Mapping[str, Any], rng: Any, *, edges: bool
) -> dict[str, Any]:
    """The example with other keys. edges: the first and the last row and the padding are among them."""

    def like(keys: torch.Tensor, feature: UsedFeature) -> torch.Tensor:
        table = tables[feature.table]
        if feature.hash is None:
            drawn = rng.integers(0, len(table.weight), keys.numel())
            if edges:
                first = [0, len(table.weight) - 1, *([] if table.padding_idx is None else [table.padding_idx])]
                drawn[: len(first)] = first[: len(drawn)]
        else:
            limits, most = torch.iinfo(keys.dtype), (1 << 63) - 1
            drawn = rng.integers(limits.min, min(limits.max, most), keys.numel(), endpoint=True, dtype=np.int64)
        return torch.from_numpy(drawn).to(keys).reshape(keys.shape)

    others = dict(inputs)
    for name, feature in features.items():
        if feature.pooled is None:
            others[name] = like(inputs[name], feature)
    for argument in {feature.parts[0] for feature in features.values() if feature.pooled is not None}:
        jagged = inputs[argument]
        values = [
            like(one.values(), features[name]) if name in features else one.values()
            for name, one in jagged.to_dict().items()
        ]
        others[argument] = type(jagged)(
            jagged.keys(), torch.cat(values), weights=jagged.weights_or_none(), lengths=jagged.lengths()
        )
    return others


class _Finder:
    """Hooks that note which of the arguments `inputs` go into tables and collections, and what comes out of them."""

    def __init__(self, inputs: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
        self._given = {name: value for name, value in inputs.items() if _is_tensor(value)}
        self._tables = tables
        self.found: dict[str, UsedFeature] = {}
        self._hashed: list[tuple[Any, str, KeyHash]] = []  # what a HashKeys has made, and of which argument

    def hashed(self, by: HashKeys, arguments: tuple[Any, ...], rows: Any) -> None:
        """A hook of a HashKeys."""
        keys = arguments[0].values() if hasattr(arguments[0], "to_dict") else arguments[0]
        how = replace(by.how, key=KeyType.UINT64) if keys.dtype is torch.uint64 else by.how
        self._hashed.append((rows, self._argument(arguments[0], "HashKeys is called")[0], how))

    def _name_of(self, value: Any) -> str | None:
        return next((name for name, one in self._given.items() if value is one), None)

    def _argument(self, value: Any, what: str) -> tuple[str, KeyHash | None]:
        """The argument that goes in, and how it was hashed before."""
        if (name := self._name_of(value)) is not None:
            return name, None
        for rows, name, how in self._hashed:
            if rows is value:
                return name, how
        raise InvalidInput(
            f"{what} with a value that is no argument of forward: expected one of {', '.join(self._given)}, "
            "unchanged, or what a tierstore.torch.HashKeys makes of one"
        )

    def of_table(self, name: str) -> Any:
        def hook(table: Any, arguments: tuple[Any, ...], options: dict[str, Any], rows: Any) -> None:
            given = inspect.signature(table.forward).bind(*arguments, **options).arguments
            argument, how = self._argument(given["input"], f"table {name!r} is looked up")
            combiner = None
            if isinstance(table, nn.EmbeddingBag):
                combiner = table.mode
                check_mode(f"table {name!r}", combiner)
            parts = {part: given[part] for part in ("offsets", "per_sample_weights") if given.get(part) is not None}
            names = tuple(map(self._name_of, parts.values()))
            if None in names:
                raise InvalidInput(
                    f"table {name!r} is looked up with {list(parts)[names.index(None)]} that forward computes: "
                    "expected an argument of forward, unchanged, as a request has to bring them"
                )
            if (before := self.found.get(argument)) is not None and (before.table, before.hash) != (name, how):
                raise InvalidInput(
                    f"argument {argument!r} is read by two tables, {before.table!r} and {name!r}, or hashed in two "
                    "ways: give forward an argument for each"
                )
            offsets = parts.get("offsets")
            if offsets is not None and table.include_last_offset:
                offsets = offsets[:-1]
            bags = JaggedKeys(self._given[argument], offsets, parts.get("per_sample_weights"))
            self._add(argument, name, combiner, rows, names, bags, how)

        return hook

    def of_collection(self, one: Collection) -> Any:
        def hook(_: Any, arguments: tuple[Any, ...], options: dict[str, Any], pooled: Any) -> None:
            given = (*arguments, *options.values())[0]
            argument, how = self._argument(given, f"a {type(one.module).__name__} is called")
            jagged = self._given[argument]
            if getattr(jagged, "variable_stride_per_key", bool)():
                raise InvalidInput(
                    f"{argument!r}: expected a KeyedJaggedTensor with one batch for all features, got one whose "
                    "features have batches of their own: a request names each item's keys"
                )
            rows, by_feature = pooled if isinstance(pooled, dict) else pooled.to_dict(), jagged.to_dict()
            weighted = getattr(one.module, "is_weighted", bool)()
            for config, _ in one.tables:
                pooling = getattr(config, "pooling", None)
                combiner = None if pooling is None else pooling.value.lower()
                for name in config.feature_names:
                    if name not in rows or name in self.found or name in self._given:
                        raise InvalidInput(
                            f"feature {name!r} is read by two tables, or is an argument too: rename one of them"
                        )
                    keys, offsets, weights = as_bags(name, by_feature[name])
                    its = rows[name] if combiner else rows[name].values()
                    bags = JaggedKeys(keys, offsets, weights if weighted else None)
                    self._add(name, config.name, combiner, its, (argument,), bags, how, type(pooled))

        return hook

    def _add(
        self,
        name: str,
        table: str,
        combiner: str | None,
        rows: torch.Tensor,
        parts: tuple[Any, ...],
        bags: JaggedKeys,
        how: KeyHash | None,
        pooled: Any = None,
    ) -> None:
        """Note a feature. InvalidInput where the module's `rows` are not what the weight alone gives."""
        of = self._tables[table]
        padding = padding_of(of)
        served = _served(of, bags, combiner, padding, how)
        rows = rows.detach()
        if served.shape != rows.shape or not _alike(rows.float(), served, _OF_ROWS, epsilon_of([of.weight])):
            raise InvalidInput(
                f"table {table!r} answers feature {name!r} with something else than the rows of its weight, as "
                "a service would: a hook or a part in between changes them. Have the module around the table do that, "
                "after the look-up"
            )
        self.found[name] = UsedFeature(name, table, combiner, padding, served, rows.dtype, parts, bags, how, pooled)


def _served(
    table: Any, bags: JaggedKeys, combiner: str | None, padding: int | None, how: KeyHash | None
) -> torch.Tensor:
    """What a service answers, float32: of the weight and what is written of a feature, and nothing of the module."""
    keys = bags.keys if how is None else HashKeys(how.mod, how.seed)(bags.keys)
    flat = keys.reshape(-1).long()
    ignored = torch.zeros_like(flat, dtype=torch.bool) if padding is None else flat == padding
    rows = weight_rows(table, flat).float().masked_fill(ignored[:, None], 0)
    if combiner is None:
        return rows.reshape(*keys.shape, rows.shape[1])
    starts = torch.arange(len(keys), device=keys.device) * keys.shape[1] if bags.offsets is None else bags.offsets
    owners = torch.searchsorted(starts.long(), torch.arange(len(flat), device=keys.device), right=True) - 1
    factors = (~ignored).float()
    if bags.weights is not None:
        factors = factors * bags.weights.reshape(-1)
    sums = rows.new_zeros(len(starts), rows.shape[1]).index_add_(0, owners, rows * factors[:, None])
    if combiner == "sum":
        return sums
    return sums / factors.new_zeros(len(starts)).index_add_(0, owners, factors).clamp(min=1)[:, None]


def example_request(
    features: Mapping[str, UsedFeature], inputs: Mapping[str, Any], keys: Mapping[str, Any]
) -> dict[str, Any]:
    """The example as a request to the served model."""
    request: dict[str, Any] = {
        name: value.numpy(force=True)
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and not any(name in feature.parts for feature in features.values())
    }
    for name, feature in features.items():
        rows = feature.bags.keys.numpy(force=True)
        request[name] = feature.bags.as_request(keys[feature.table][rows] if feature.table in keys else rows)
    return request


def epsilon_of(weights: Iterable[torch.Tensor]) -> float:
    """What the coarsest of these numbers round by."""
    return max((torch.finfo(one.dtype).eps for one in weights if one.is_floating_point()), default=0.0)


def _alike(got: torch.Tensor, wanted: torch.Tensor, of_largest: float, epsilon: float) -> bool:
    if not wanted.numel():
        return True
    limit = max(of_largest, 8 * epsilon) * wanted.abs().max()
    return bool(torch.isclose(got, wanted, rtol=0, atol=float(limit), equal_nan=True).all())


def _is_tensor(value: Any) -> bool:
    """Whether it may be what a table or a collection is called with."""
    return isinstance(value, torch.Tensor) or hasattr(value, "to_dict")
