"""Snapshots of a module: embeddings as tables, the remainder as the dense part. For the thread that trains."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tierstore.errors import InvalidInput, MissingExtra, SnapshotError
from tierstore.formats.normalize import guessed_key_type
from tierstore.formats.rounding import Rounding
from tierstore.formats.snapshot.writer import SnapshotWriter, TableWriter
from tierstore.torch.hashing import HashKeys
from tierstore.torch.tables import BATCH_ROWS, Collection, check_mode, checked_keys, collections_of, tables_of
from tierstore.torch.touched import TouchedRows
from tierstore.types import KeyHash, as_bags, check_name

_TOLERANCE = 1e-3  # between scores of the module and of ONNX Runtime, relative and absolute


def write_snapshot(
    directory: str | Path,
    module: nn.Module,
    inputs: Mapping[str, Any],
    *,
    model: str,
    version: int,
    delta_seq: int = 0,
    keys: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    default: str = "zeros",
    ttl_s: Mapping[str, int | str] | None = None,
    dense: bool = True,
    output_names: Sequence[str] | None = None,
    touched: TouchedRows | None = None,
) -> dict[str, Rounding]:
    """Write a snapshot of a module: its embeddings as tables, in parts and never copied whole, and its dense part.

    Args:
        inputs: an example of `forward`'s arguments by name, tensors of two items or more, and KeyedJaggedTensors of
            TorchRec's collections. It shows which arguments are features, and is recorded as a request that must
            succeed before the version serves.
        keys: by table, the key of each row in order: integers or strings; default the row's number.
        dtype: of all tables, as for `SnapshotWriter.table`; so is `default`.
        ttl_s: by table, after which time rows expire that no snapshot or delta has written: seconds, or `30d`.
        dense: False to write the tables only.
        output_names: of what `forward` returns, as for `export_dense`.
        touched: its rows count as written then, so that the next delta holds what changed after the snapshot.

    Returns by table how far its numbers are off once they are stored in `dtype`: `largest` and `mean`.
    Raises SnapshotError and InvalidInput, before anything is written where possible.
    """
    tables = tables_of(module)
    features = _features(module, inputs, tables)
    named = checked_keys(keys, tables)
    if hashed := [of.table for of in features.values() if of.hash is not None and of.table in named]:
        raise InvalidInput(
            f"keys: table {hashed[0]!r} is read through HashKeys, so its keys are the numbers of its rows"
        )
    ttls = dict(ttl_s or {})
    if not set(ttls) <= set(tables):
        unknown = next(name for name in ttls if name not in tables)
        raise InvalidInput(f"ttl_s: {unknown!r} is no table of the module; its tables are {', '.join(tables)}")
    graph = export_dense(module, inputs, output_names=output_names) if dense else None
    rounding: dict[str, Rounding] = {}
    with SnapshotWriter(directory, model=model, version=version, delta_seq=delta_seq) as snapshot:
        for name, table in tables.items():
            weight = table.weight.detach()
            kind = "int64" if name not in named else guessed_key_type(named[name])
            out = snapshot.table(
                name, dim=weight.shape[1], dtype=dtype, key=kind, default=default, ttl_s=ttls.get(name)
            )
            rounding[name] = _write_rows(out, weight, named.get(name))
        _write_features(snapshot, features, named)
        if graph is not None:
            snapshot.dense(graph)
            snapshot.request(_request(features, inputs, named))
    if touched is not None:
        touched.clear()
    return rounding


def _write_rows(table: TableWriter, weight: torch.Tensor, keys: Any) -> Rounding:
    for begin in range(0, len(weight), BATCH_ROWS):
        part = slice(begin, min(begin + BATCH_ROWS, len(weight)))
        table.write(np.arange(part.start, part.stop) if keys is None else keys[part], weight[part])
    return table.rounding


def _write_features(snapshot: SnapshotWriter, features: Mapping[str, _Feature], named: Mapping[str, Any]) -> None:
    for feature in features.values():
        padding = feature.padding
        if padding is not None and feature.table in named:
            padding = named[feature.table][padding]
            padding = padding.item() if isinstance(padding, np.generic) else padding
        how = None if feature.hash is None else asdict(feature.hash)
        snapshot.feature(feature.name, table=feature.table, combiner=feature.combiner, padding_key=padding, hash=how)


def export_dense(
    module: nn.Module,
    inputs: Mapping[str, Any],
    path: str | Path | None = None,
    *,
    output_names: Sequence[str] | None = None,
) -> bytes:
    """The part of a module that is not in tables, as ONNX: its inputs are rows of features and other arguments.

    inputs: an example, as for `write_snapshot`; the first dimension of each is the batch. path: also write the model
    there. output_names: what scores are called in answers, in the order that `forward` returns them in, such as
    `("ctr", "cvr")`; default PyTorch's names. InvalidInput where there are not as many.
    SnapshotError if its scores differ from the module's; MissingExtra without `onnxscript` or ONNX Runtime.
    """
    tables = tables_of(module)
    features = _features(module, inputs, tables)
    if sequences := [
        name for name, feature in features.items() if feature.bags is not None and feature.combiner is None
    ]:
        raise InvalidInput(
            f"features {', '.join(sequences)} are sequences of an EmbeddingCollection, whose lengths a dense part "
            "cannot be given: expected an EmbeddingBagCollection; or write the tables alone, dense=False"
        )
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            expected = module(**inputs)
        dense = _Dense(module, tables, features, inputs).eval()
        example = {name: features[name].rows if name in features else inputs[name] for name in dense.names}
        content = _exported(dense, example, _output_names(expected, output_names))
        _check(content, example, expected)
    finally:
        module.train(was_training)
    if path is not None:
        Path(path).write_bytes(content)
    return content


@dataclass(slots=True)
class _Feature:
    """An argument of `forward` that goes into a table; `rows` is the table's output for the example."""

    name: str
    table: str
    combiner: str | None
    padding: int | None
    rows: Any
    parts: tuple[str, ...]  # the arguments with offsets and weights of its bags, or that which the bags are in
    hash: KeyHash | None = None  # by which a HashKeys makes row numbers of the argument
    bags: Any = None  # a JaggedTensor, where a collection of TorchRec has the feature
    pooled: Any = None  # the type that such a collection returns


def _features(module: nn.Module, inputs: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, _Feature]:
    """The features by argument, or by their names in a collection, found by running the module on the example."""
    finder, collections = _Finder(inputs), collections_of(module)
    collected = {id(table) for one in collections for _, table in one.tables}
    hooks = [
        table.register_forward_hook(finder.of_table(name), with_kwargs=True)
        for name, table in tables.items()
        if id(table) not in collected
    ]
    hooks += [one.module.register_forward_hook(finder.of_collection(one), with_kwargs=True) for one in collections]
    hooks += [one.register_forward_hook(finder.hashed) for one in module.modules() if isinstance(one, HashKeys)]
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            module(**inputs)
    finally:
        module.train(was_training)
        for hook in hooks:
            hook.remove()
    return finder.found


class _Finder:
    """Hooks that note which of the arguments `inputs` go into tables and collections."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._tensors = {name: value for name, value in inputs.items() if _is_tensor(value)}
        self.found: dict[str, _Feature] = {}
        self._hashed: list[tuple[Any, str, KeyHash]] = []  # what a HashKeys has made, and of which argument

    def hashed(self, by: HashKeys, arguments: tuple[Any, ...], rows: Any) -> None:
        """A hook of a HashKeys."""
        self._hashed.append((rows, self._argument(arguments[0], "HashKeys is called")[0], by.how))

    def _name_of(self, value: Any) -> str | None:
        return next((name for name, one in self._tensors.items() if value is one), None)

    def _argument(self, value: Any, what: str) -> tuple[str, KeyHash | None]:
        """The argument that goes in, and how it was hashed before."""
        if (name := self._name_of(value)) is not None:
            return name, None
        for rows, name, how in self._hashed:
            if rows is value:
                return name, how
        raise InvalidInput(
            f"{what} with a value that is no argument of forward: expected one of {', '.join(self._tensors)}, "
            "unchanged, or what a tierstore.torch.HashKeys makes of one"
        )

    def of_table(self, name: str) -> Any:
        def hook(table: Any, arguments: tuple[Any, ...], options: dict[str, Any], rows: Any) -> None:
            keys = arguments[0] if arguments else options["input"]
            argument, how = self._argument(keys, f"table {name!r} is looked up")
            others = (self._name_of(value) for value in (*arguments[1:], *options.values()))
            combiner = None
            if isinstance(table, nn.EmbeddingBag):
                combiner = table.mode
                check_mode(f"table {name!r}", combiner)
            parts = tuple(one for one in others if one is not None and one != argument)
            if (before := self.found.get(argument)) is not None and (before.table, before.hash) != (name, how):
                raise InvalidInput(
                    f"argument {argument!r} is read by two tables, {before.table!r} and {name!r}, or hashed in two "
                    "ways: give forward an argument for each"
                )
            self.found[argument] = _Feature(argument, name, combiner, table.padding_idx, rows.detach(), parts, how)

        return hook

    def of_collection(self, one: Collection) -> Any:
        def hook(_: Any, arguments: tuple[Any, ...], options: dict[str, Any], pooled: Any) -> None:
            jagged = (*arguments, *options.values())[0]
            argument, how = self._argument(jagged, f"a {type(one.module).__name__} is called")
            rows, bags = pooled if isinstance(pooled, dict) else pooled.to_dict(), self._tensors[argument].to_dict()
            for config, _ in one.tables:
                pooling = getattr(config, "pooling", None)
                combiner = None if pooling is None else pooling.value.lower()
                for name in config.feature_names:
                    if name not in rows or name in self.found or name in self._tensors:
                        raise InvalidInput(
                            f"feature {name!r} is read by two tables, or is an argument too: rename one of them"
                        )
                    self.found[name] = _Feature(
                        name, config.name, combiner, None, rows[name], (argument,), how, bags[name], type(pooled)
                    )

        return hook


def _request(features: Mapping[str, _Feature], inputs: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The example as a request to the served model."""
    arrays = {name: value.numpy(force=True) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    request: dict[str, Any] = dict(arrays)
    for name, feature in features.items():
        for part in feature.parts:
            request.pop(part, None)
        if feature.bags is None:
            rows, others = arrays[name], [arrays[part] for part in feature.parts]
        else:
            rows, *others = (one.numpy(force=True) for one in as_bags(name, feature.bags) if one is not None)
        its = keys[feature.table][rows] if feature.table in keys else rows
        request[name] = (its, *others) if others else its
    return request


def _is_tensor(value: Any) -> bool:
    """Whether it may be what a table or a collection is called with."""
    return isinstance(value, torch.Tensor) or hasattr(value, "to_dict")


class _Rows(nn.Module):  # type: ignore[misc]
    """Replaces a table: its input are rows already."""

    def forward(self, rows: Any, *_: Any, **__: Any) -> Any:
        return rows


class _Pooled:
    """The rows by feature of one call of the dense part. An export does not let a module's own tensors change."""

    by_feature: Mapping[str, Any]


class _PooledRows(nn.Module):  # type: ignore[misc]
    """Replaces a collection: returns what that does, made of rows that are given."""

    def __init__(self, collection: Collection, features: Mapping[str, _Feature], given: _Pooled) -> None:
        super().__init__()
        self._given, self._features = given, [name for config, _ in collection.tables for name in config.feature_names]
        self._dims = [config.embedding_dim for config, _ in collection.tables for _ in config.feature_names]
        self._type = features[self._features[0]].pooled

    def forward(self, *_: Any, **__: Any) -> Any:
        rows = torch.cat([self._given.by_feature[name] for name in self._features], 1)
        return self._type(keys=self._features, length_per_key=self._dims, values=rows)


class _Dense(nn.Module):  # type: ignore[misc]
    """The module, called with rows for features, and with None for the arguments that features were made of."""

    def __init__(
        self, module: nn.Module, tables: Mapping[str, Any], features: Mapping[str, _Feature], inputs: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._given = _Pooled()
        self._replaced: list[tuple[Any, nn.Module]] = [  # what is in a list is no submodule
            *((one.module, _PooledRows(one, features, self._given)) for one in collections_of(module)),
            *((table, _Rows()) for table in tables.values()),
            *((one, _Rows()) for one in module.modules() if isinstance(one, HashKeys)),
        ]
        self._unused = {part: None for feature in features.values() for part in feature.parts}
        self._arguments = [name for name in inputs if name not in self._unused]
        self.names = [*self._arguments, *(name for name, feature in features.items() if feature.bags is not None)]
        self.inner = module

    def forward(self, *values: Any) -> Any:
        given = dict(zip(self.names, values, strict=True))
        self._given.by_feature = given
        return self.inner(**{name: given[name] for name in self._arguments}, **self._unused)

    @contextmanager
    def without_tables(self) -> Iterator[None]:
        replaced = [
            (parent, name, part, new)
            for parent in self.inner.modules()
            for name, part in parent.named_children()
            for old, new in self._replaced
            if part is old
        ]
        for parent, name, _, new in replaced:
            setattr(parent, name, new)
        try:
            yield
        finally:
            for parent, name, part, _ in replaced:
                setattr(parent, name, part)


def _output_names(expected: Any, given: Sequence[str] | None) -> list[str] | None:
    """The names of the outputs, of which `expected` are examples; None for PyTorch's own."""
    if given is None:
        return None
    count = len(expected) if isinstance(expected, (dict, list, tuple)) else 1
    names = [given] if isinstance(given, str) else list(given)
    if len(names) != count or len(set(names)) != count:
        raise InvalidInput(
            f"output_names: expected {count} different names, one for each output of forward; got {names}"
        )
    return [check_name("output", name) for name in names]


def _exported(dense: _Dense, example: Mapping[str, Any], output_names: list[str] | None) -> bytes:
    try:
        import onnxscript  # noqa: F401 - needed by PyTorch's exporter, whose own error is long
    except ImportError as error:
        raise MissingExtra("PyTorch exports ONNX with the package onnxscript: pip install onnxscript") from error
    batch = torch.export.Dim("batch", min=1)
    if any(value.ndim == 0 or len(value) < 2 for value in example.values()):
        raise InvalidInput("expected an example of two items or more; the first dimension of each input is the batch")
    with dense.without_tables(), torch.no_grad(), _quiet():
        program = torch.onnx.export(
            dense,
            tuple(example.values()),
            input_names=list(example),
            output_names=output_names,
            dynamic_shapes=(tuple({0: batch} for _ in example),),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    return bytes(program.model_proto.SerializeToString())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says of itself at each export: what is wrong with its model is found by `_check`."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _check(content: bytes, example: Mapping[str, Any], expected: Any) -> None:
    """SnapshotError unless ONNX Runtime gives the scores of the module."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtra("scores are checked with ONNX Runtime: install tierstore[dense]") from error
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = {port.name for port in session.get_inputs()}
    outputs = session.run(None, {name: value.numpy(force=True) for name, value in example.items() if name in names})
    expected = list(expected.values()) if isinstance(expected, dict) else expected
    expected = expected if isinstance(expected, (list, tuple)) else [expected]
    for i, (wanted, got) in enumerate(zip(expected, outputs, strict=True)):
        if not np.allclose(wanted.numpy(force=True), got, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise SnapshotError(
                f"expected the module's scores from the exported model; its output {i} differs by "
                f"{np.abs(wanted.numpy(force=True) - got).max():g}"
            )
