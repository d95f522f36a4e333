"""Modules that read a served model's rows where a PyTorch program had tables of its own. For scoring, not for training.

    net.load_state_dict(torch.load("dense.pt"), strict=False)
    swap_embeddings(net, store.model("ctr"))
    net(user_id, item_id)

`source` is a model of a store in this process (`store.model("ctr")`) or of a service (`client.model("ctr")`). Keys on
the GPU of a store that has a device tier are answered there; otherwise rows come as CPU tensors over the memory that
they were looked up into, and are copied only where the keys lie on another device. Any thread may call a module.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from tierstore.arguments import check_end
from tierstore.errors import InvalidInput
from tierstore.formats.managed_collisions import MCH, MCH_FREE, MCH_IDS
from tierstore.torch import operators
from tierstore.torch.hashing import HashKeys
from tierstore.torch.tables import check_forward, check_mode, managed_collisions_of, padding_of, tables_of, unwrapped
from tierstore.types import GpuArray, KeyType

_DTYPES = ("float32", "float16")
_IDS_TRIED = 64  # of a module with managed collisions
# types that look-ups take on the GPU
_TAKEN = {getattr(torch, name): np.dtype(name) for name in ("int64", "int32", *_DTYPES)}


class RowSource(Protocol):
    """What rows are read from: `tierstore.Model`, a model of `tierstore.Client`, or a view of a model."""

    @property
    def lookup(self) -> Callable[..., Any]: ...
    @property
    def lookup_bags(self) -> Callable[..., Any]: ...


class _Rows(nn.Module):  # type: ignore[misc, unused-ignore]
    """What the modules below have in common. `dtype`: of the rows, `float32` or `float16`."""

    def __init__(self, source: RowSource, dtype: str) -> None:
        super().__init__()
        if dtype not in _DTYPES:
            raise InvalidInput(f"dtype: expected float32 or float16, got {dtype!r}")
        self.source, self.dtype, self.rows_dtype = source, dtype, getattr(torch, dtype)
        self.scope = _Scope()
        self.number = operators.number_of(self)  # type: ignore[arg-type, unused-ignore]

    def _check(self) -> None:
        if self.training and torch.is_grad_enabled():
            raise InvalidInput(
                "rows of a store are not trained, and no gradient would reach them: call eval() on the module, or run "
                "it within torch.inference_mode()"
            )

    def _dim_of(self, feature: str) -> int:
        """How many numbers a row has."""
        return int(self.scope.of(self.source).lookup(feature, np.empty(0, np.int64)).shape[1])

    def _rows(self, feature: str, keys: torch.Tensor) -> torch.Tensor:
        """Rows, [n, dim], on the device of `keys`."""
        source = self.scope.of(self.source)
        if (number := _gpu_of(source, keys)) is not None:
            with _view_of(source) as view:
                rows = self._room(view, feature, len(keys), keys)
                view.lookup(feature, _there(keys, keys), out=_there(rows, keys), dtype=self.dtype, **_on(number))
            return rows
        return _tensor(source.lookup(feature, _array(keys), dtype=self.dtype), keys)

    def _room(self, view: Any, feature: str, rows: int, like: torch.Tensor) -> torch.Tensor:
        """Room for an answer, in PyTorch's memory: no other library keeps some for itself."""
        return torch.empty((rows, view.table_of(feature).dim), dtype=self.rows_dtype, device=like.device)

    def _bags(
        self, feature: str, keys: torch.Tensor, offsets: Any, weights: Any, mode: str | None, *, ends: bool
    ) -> torch.Tensor:
        """Pooled rows, [bags, dim], on the device of `keys`; mode None: as the feature's combiner says.

        `ends`: `offsets` have one entry more than there are bags. On the GPU that is a bag of its own, which is left
        out: to look at it would wait for the stream.
        """
        source, options = self.scope.of(self.source), {"dtype": self.dtype, "combiner": mode}
        factors = None if weights is None else weights.detach().contiguous()
        if (number := _gpu_of(source, keys)) is not None:
            with _view_of(source) as view:
                rows = self._room(view, feature, len(offsets), keys)
                options |= {"weights": _there(factors, keys), "out": _there(rows, keys)} | _on(number)
                view.lookup_bags(feature, _there(keys, keys), _there(offsets, keys), **options)
            return rows[:-1] if ends else rows
        if ends:
            check_end(feature, offsets, len(keys))
            offsets = offsets[:-1]
        options["weights"] = None if factors is None else _array(factors)
        return _tensor(source.lookup_bags(feature, _array(keys), _array(offsets), **options), keys)


class Embedding(_Rows):
    """Rows of one feature, in place of `nn.Embedding`.

    A key is what the table is keyed by, any 64-bit integer; one that the table lacks gives its default, where
    `nn.Embedding` raises IndexError.
    """

    def __init__(self, source: RowSource, feature: str, *, dtype: str = "float32") -> None:
        super().__init__(source, dtype)
        self.feature = feature

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows, `[*, dim]`, of integer keys of any shape `[*]`, on the device of the keys."""
        self._check()
        return operators.rows(input, self.number)

    @property
    def dim(self) -> int:
        return self._dim_of(self.feature)

    def read(self, keys: torch.Tensor) -> torch.Tensor:
        """What `forward` answers, when its operator runs."""
        if keys.ndim == 1:
            return self._rows(self.feature, keys)
        rows = self._rows(self.feature, keys.reshape(-1))
        return rows.reshape(*keys.shape, rows.shape[1])

    def extra_repr(self) -> str:
        return f"feature={self.feature!r}, dtype={self.dtype!r}"


class EmbeddingBag(_Rows):
    """Pooled rows of one feature, in place of `nn.EmbeddingBag`. They are pooled where they lie, in one pass.

    mode: `sum` or `mean`; None takes the feature's combiner. Weights are for `sum`, as there; with a feature's own
    combiner they are what tierstore says of it. An empty bag is zeros.
    """

    def __init__(
        self,
        source: RowSource,
        feature: str,
        *,
        mode: str | None = None,
        include_last_offset: bool = False,
        dtype: str = "float32",
    ) -> None:
        super().__init__(source, dtype)
        check_mode(f"feature {feature!r}", mode)
        self.feature, self.mode, self.include_last_offset = feature, mode, include_last_offset

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[bags, dim]` of keys `[bags, k]`, or of keys `[n]` whose bags begin at `offsets`."""
        self._check()
        if per_sample_weights is not None and self.mode == "mean":
            raise InvalidInput("per_sample_weights: expected mode sum, as nn.EmbeddingBag does")
        if (offsets is None) != (input.ndim == 2):
            raise InvalidInput(
                f"expected keys [bags, k] without offsets, or keys [n] with offsets; got keys {list(input.shape)} "
                f"{'without' if offsets is None else 'with'} offsets"
            )
        return operators.bags(input, offsets, per_sample_weights, self.number)

    @property
    def dim(self) -> int:
        return self._dim_of(self.feature)

    def bags_of(self, keys: torch.Tensor, offsets: torch.Tensor | None) -> int:
        """How many bags there are."""
        # `len` would be a constant of the graph that is traced
        count: int = keys.shape[0] if offsets is None else offsets.shape[0] - self.include_last_offset
        return count

    def read(self, keys: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None) -> torch.Tensor:
        """What `forward` answers, when its operator runs."""
        ends = self.include_last_offset and offsets is not None
        if offsets is None:
            offsets = np.arange(len(keys)) * keys.shape[1]
        weights = None if weights is None else weights.reshape(-1)
        return self._bags(self.feature, keys.reshape(-1), offsets, weights, self.mode, ends=ends)

    def extra_repr(self) -> str:
        return f"feature={self.feature!r}, mode={self.mode!r}, dtype={self.dtype!r}"


class EmbeddingBagCollection(_Rows):
    """Pooled rows of several features by a `KeyedJaggedTensor`, in place of TorchRec's module of this name.

    TorchRec is not imported: what has `to_dict()`, of values with `values()`, `offsets()` and
    `weights_or_none()`, will do. Weights count with `is_weighted`, and are ignored without it, as there. Where
    features have batches of their own, `inverse_indices_or_none()` says which of their bags each item has.
    """

    def __init__(
        self, source: RowSource, features: Sequence[str], *, is_weighted: bool = False, dtype: str = "float32"
    ) -> None:
        super().__init__(source, dtype)
        self.features, self._is_weighted = list(features), is_weighted

    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, features: Any) -> PooledRows:
        """One version of the model answers all of them, where the model is one of this process."""
        self._check()
        jagged = features.to_dict()
        if missing := [name for name in self.features if name not in jagged]:
            raise InvalidInput(f"expected features {self.features}, got none of {missing}; there are {list(jagged)}")
        with self.scope.hold(self.source):
            pooled = {name: self._pooled(name, jagged[name]) for name in self.features}
        inverse = getattr(features, "inverse_indices_or_none", lambda: None)()
        if inverse is not None:
            names, indices = inverse  # int64[features of the KeyedJaggedTensor, items]
            if missing := [name for name in self.features if name not in names]:
                raise InvalidInput(f"inverse_indices: expected those of {self.features}, got none of {missing}")
            pooled = {name: rows[indices[names.index(name)]] for name, rows in pooled.items()}
        return PooledRows(pooled)

    def _pooled(self, name: str, one: Any) -> torch.Tensor:
        weights = one.weights_or_none() if self._is_weighted else None
        if self._is_weighted and weights is None:
            raise InvalidInput(f"feature {name!r}: expected weights, as the collection is weighted; there are none")
        return self._bags(name, one.values(), one.offsets(), weights, None, ends=True)

    def is_weighted(self) -> bool:
        """Whether weights count."""
        return self._is_weighted

    def extra_repr(self) -> str:
        return f"features={self.features!r}, is_weighted={self._is_weighted}, dtype={self.dtype!r}"


class PooledRows:
    """Pooled rows by feature, float [batch, dim] each, with the faces of TorchRec's `KeyedTensor`."""

    def __init__(self, rows: Mapping[str, torch.Tensor]) -> None:
        self._rows = dict(rows)

    def keys(self) -> list[str]:
        return list(self._rows)

    def __getitem__(self, feature: str) -> torch.Tensor:
        return self._rows[feature]

    def to_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._rows)

    def length_per_key(self) -> list[int]:
        return [rows.shape[1] for rows in self._rows.values()]

    def values(self) -> torch.Tensor:
        """The embeddings of all features side by side, [batch, sum of dims]."""
        return torch.cat(list(self._rows.values()), dim=1)


def swap_embeddings(
    module: nn.Module, source: RowSource, *, features: Mapping[str, str] | None = None, dtype: str = "float32"
) -> nn.Module:
    """Have `module` read its tables from `source`: its `nn.Embedding` and `nn.EmbeddingBag` are replaced in place.

    Each is replaced by a feature that reads the table of its name (`user.rows` is `user_rows`, as `write_snapshot` has
    it; in a collection of TorchRec the name of its config), with the same padding. Its `HashKeys` are left to these
    features. A table that was read by several paths of the module is replaced at each. The module is set to `eval()`;
    what its tables held is free when nobody else holds it. One call of the module is answered by one version, where the
    model is one of this process.

    MCH of TorchRec (managed collisions) is left out, and rows are looked up by the ids themselves: the store has to be
    keyed by them, with the row that the module reads for other ids as the table's default.

    Args:
        features: by name of the table, the feature to read it by, where another than the first that fits
            is meant. Needed for a model of a service, whose features do not say what they read, unless
            they have the tables' names.

    Returns the module. Raises InvalidInput, with nothing replaced, where a table has no feature.
    """
    given, module = module, unwrapped(module)
    tables, scope = tables_of(module), _Scope()
    chosen = dict(features or {})
    if unknown := [name for name in chosen if name not in tables]:
        raise InvalidInput(f"features: expected tables among {', '.join(tables)}, got {unknown[0]!r}")
    new = {id(part): _replacement(source, name, part, chosen.get(name), dtype) for name, part in tables.items()}
    for one in new.values():
        one.scope = scope
    hashes = [part for part in module.modules() if isinstance(part, HashKeys)]
    _check_hashes(source, hashes, [one.feature for one in new.values()])
    others = {**new, **{id(part): nn.Identity() for part in hashes}}  # the features hash
    for name, part, kind in managed_collisions_of(module):
        _check_ids(source, name, part, kind, None if name not in tables else new[id(tables[name])].feature)
        others[id(part)] = _RawIds(part)
    for parent in list(module.modules()):
        for name, part in parent._modules.items():
            if id(part) in others:
                parent._modules[name] = others[id(part)]
    inner = module.forward

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, unused-ignore]  # but not `inner`
    @functools.wraps(inner)
    def forward(*arguments: Any, **options: Any) -> Any:
        with scope.hold(source):
            return inner(*arguments, **options)

    module.forward = forward
    return given.eval()


class _RawIds(nn.Module):  # type: ignore[misc, unused-ignore]
    """Replaces an MCH module of TorchRec: ids stay what they are, or what its own hash makes of them."""

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self._preprocess = replaced.preprocess

    def forward(self, features: Any, **_: Any) -> Any:
        return self._preprocess(features)

    def evict(self) -> None:
        """Nothing is evicted: TorchRec asks after each call."""


def _check_ids(source: RowSource, table: str, part: Any, kind: str | None, feature: str | None) -> None:
    """InvalidInput unless a store can be asked with raw ids in place of managed collisions."""
    if kind != MCH:
        raise InvalidInput(
            f"table {table!r} has managed collisions of {type(part).__name__}, which look an unknown id up by its "
            "hash: a store that is keyed by ids cannot. Expected MCH, or a module without"
        )
    ids = getattr(part, MCH_IDS)
    ids = ids[ids != MCH_FREE]
    if feature is None or not len(ids):
        return
    some = ids[torch.linspace(0, len(ids) - 1, min(len(ids), _IDS_TRIED)).long()]
    found = source.lookup(feature, _array(some), return_found=True)[1]
    if np.count_nonzero(found) * 2 < len(found):
        raise InvalidInput(
            f"table {table!r}: expected a store that is keyed by the ids of its managed collisions; it has "
            f"{np.count_nonzero(found)} of {len(found)} that were tried. Is it keyed by slots? "
            "docs/migrate-torchrec.md says how to write it by id"
        )


def _replacement(source: RowSource, table: str, part: Any, feature: str | None, dtype: str) -> _Rows:
    """What takes the place of one table of a module."""
    check_forward(table, part)
    hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
    if any(not getattr(hook, "__module__", "").startswith("tierstore.") for hook in hooks):
        raise InvalidInput(
            f"table {table!r} has a forward hook, which would not be called any more: remove it, and register it on "
            "what takes the table's place"
        )
    if part.max_norm is not None:
        raise InvalidInput(
            f"table {table!r}: max_norm changes rows when they are read, which a store does not do: write_snapshot "
            "writes them shortened, and `max_norm = None` on the table says that the store's are"
        )
    check_mode(f"table {table!r}", getattr(part, "mode", None))
    if feature is None:
        feature = _feature_of(source, table, part)
    if isinstance(part, nn.Embedding):
        return Embedding(source, feature, dtype=dtype)
    return EmbeddingBag(source, feature, mode=part.mode, include_last_offset=part.include_last_offset, dtype=dtype)


def _check_hashes(source: RowSource, hashes: Sequence[HashKeys], features: Sequence[str]) -> None:
    """InvalidInput unless the features hash keys as the module does, which then has to leave it to them."""
    specs = getattr(source, "features", None)
    if specs is None:
        if hashes:
            raise InvalidInput(
                "the module has a HashKeys, and the model of a service does not say how its features hash keys: "
                "expected a model of a store in this process"
            )
        return
    ours, theirs = {one.how for one in hashes}, {specs[name].hash for name in features} - {None}
    # the type of a tensor's integers says whether they have a sign, for each call anew
    if ours != {replace(how, key=KeyType.INT64) if how.key is KeyType.UINT64 else how for how in theirs}:
        raise InvalidInput(
            f"expected features that hash keys as the module does, {ours or 'not at all'}; got {theirs or 'none'}"
        )


def _feature_of(source: RowSource, table: str, part: Any) -> str:
    """The first feature that reads `table` and has the padding of `part`."""
    specs, padding = getattr(source, "features", None), padding_of(part)
    names: list[str]
    if specs is None:
        names = [one["name"] for one in source.metadata()["inputs"]]  # type: ignore[attr-defined]
        fits = [name for name in names if name == table]
        what = f"named {table!r}, and the model of a service does not say what its features read"
    else:
        fits = [
            name
            for name, spec in specs.items()
            if spec.table == table and (spec.padding_key is None) == (padding is None)
        ]
        names, what = (
            list(specs),
            f"of a table {table!r} {'without' if padding is None else 'with'} a padding key",
        )
    if not fits:
        raise InvalidInput(
            f"there is no feature {what}; there are {', '.join(names)}: name one, features={{{table!r}: ...}}"
        )
    return fits[0]


class _Scope:
    """The view that one call of a module reads, by thread. A source without views answers each look-up by itself."""

    def __init__(self) -> None:
        self._local = threading.local()

    def of(self, source: RowSource) -> Any:
        return getattr(self._local, "view", None) or source

    @contextmanager
    def hold(self, source: RowSource) -> Iterator[None]:
        """Look-ups in between read one view; within another `hold` that one's."""
        if not hasattr(source, "view") or getattr(self._local, "view", None) is not None:
            yield
            return
        with source.view() as self._local.view:
            try:
                yield
            finally:
                self._local.view = None


def _gpu_of(source: Any, keys: torch.Tensor) -> int | None:
    """The number of the GPU that `keys` lie on, where `source` leaves answers there."""
    if not keys.is_cuda:
        return None
    answers_on_gpu = getattr(source, "answers_on_gpu", None)
    number = int(keys.device.index)
    return number if answers_on_gpu is not None and answers_on_gpu(number) else None


def _view_of(source: Any) -> AbstractContextManager[Any]:
    """A view of a model; of a view that view."""
    view: AbstractContextManager[Any] = source.view() if hasattr(source, "view") else nullcontext(source)
    return view


def _on(number: int) -> dict[str, Any]:
    """Options of a look-up on that GPU, in the order of the caller's stream."""
    return {"device": "gpu", "stream": torch.cuda.current_stream(number)}


def _there(values: Any, keys: torch.Tensor) -> Any:
    """A tensor where `keys` are, on the GPU, as look-ups take it at once: by DLPack each would cost microseconds.

    Others are unchanged.
    """
    if not isinstance(values, torch.Tensor) or values.device != keys.device:
        return values
    if (dtype := _TAKEN.get(values.dtype)) is None:
        return values
    values = values.contiguous()
    return GpuArray(values, values.data_ptr(), tuple(values.shape), dtype)


def _array(values: Any) -> Any:
    return values.contiguous().numpy(force=True) if isinstance(values, torch.Tensor) else values


def _tensor(rows: Any, like: torch.Tensor) -> torch.Tensor:
    """Over the memory of `rows`, or copied to the device of `like`."""
    tensor = torch.from_numpy(rows)
    return tensor if like.is_cpu else tensor.to(like.device)
