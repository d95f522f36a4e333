"""From PyTorch: snapshots of a module's embeddings with its dense part, and deltas of the rows that training touched.

    from tierstore.torch import TouchedRows, write_delta, write_snapshot

    touched = TouchedRows(net)
    train(net)
    write_snapshot("snapshots/1", net, inputs, model="ctr", version=1)
    train(net)
    write_delta("deltas/1.arrow", touched, model="ctr", seq=1)

Every `nn.Embedding` and `nn.EmbeddingBag` in the module is a table, named as it is there (`user.rows` as `user_rows`), whose
key is the row's number unless `keys` says otherwise. Every argument of `forward` that goes straight into one is a
feature, under the argument's name. Needs PyTorch, which is no dependency of this package, and for the dense part
`onnxscript` and the extra `dense`. Use from the thread that trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tierstore.errors import InvalidInput, MissingExtra, SnapshotError
from tierstore.formats.delta_writer import DeltaWriter
from tierstore.formats.given import guessed_key_type
from tierstore.formats.times import Moment
from tierstore.formats.writers import SnapshotWriter
from tierstore.types import check_name

__all__ = ["TouchedRows", "export_dense", "write_delta", "write_snapshot"]

_ROWS_AT_ONCE = 1 << 16
_TOLERANCE = 1e-3  # between scores of the module and of ONNX Runtime, relative and absolute


class TouchedRows:
    """Which rows of a module's embeddings training has looked up since the last delta, in a bit a row on their device.

    Rows count that are looked up while the module trains, whether their gradients are sparse or dense. An optimizer that
    moves rows without a gradient (Adam over dense gradients, weight decay) moves others too: write a snapshot now and then,
    or train embeddings by SparseAdam, Adagrad or SGD.

    keys: by table, the key of each row in order; default the row's number.
    """

    def __init__(self, module: nn.Module, *, keys: Mapping[str, Any] | None = None) -> None:
        self.tables = _tables(module)
        self._keys = _checked_keys(keys, self.tables)
        self._marks: dict[str, torch.Tensor] = {}
        self._hooks = [
            table.register_forward_pre_hook(self._hook(name), with_kwargs=True) for name, table in self.tables.items()
        ]

    def _hook(self, name: str) -> Any:
        def mark(table: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            if table.training and torch.is_grad_enabled():
                rows = arguments[0] if arguments else options["input"]
                self._mark_of(name, table)[rows.detach().reshape(-1)] = True

        return mark

    def _mark_of(self, name: str, table: nn.Module) -> torch.Tensor:
        mark = self._marks.get(name)
        weight = table.weight
        if mark is None or mark.device != weight.device or len(mark) != len(weight):
            mark = self._marks[name] = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        return mark

    def rows(self, table: str) -> Any:
        """Numbers of the rows that were touched, int64, ascending."""
        mark = self._marks.get(table)
        return np.empty(0, np.int64) if mark is None else mark.nonzero().reshape(-1).cpu().numpy()

    def keys(self, table: str, rows: Any) -> Any:
        """The keys of rows."""
        return rows if table not in self._keys else self._keys[table][rows]

    def clear(self) -> None:
        """Forget what was touched. `write_delta` does so once the delta is written."""
        for mark in self._marks.values():
            mark.zero_()

    def close(self) -> None:
        """Take the hooks off the module."""
        for hook in self._hooks:
            hook.remove()


def write_delta(
    path: str | Path,
    touched: TouchedRows,
    *,
    model: str,
    seq: int,
    event_time: Moment | None = None,
    base_version: int | None = None,
    dense: str | Path | bytes | None = None,
) -> int:
    """Write the rows that were touched, as they are now, as a delta. Returns their number, and begins anew.

    The arguments are `DeltaWriter`'s; dense: a new dense part, as `export_dense` makes it.
    """
    count = 0
    with DeltaWriter(path, model=model, seq=seq, event_time=event_time, base_version=base_version) as delta:
        for name, table in touched.tables.items():
            rows = touched.rows(name)
            for at in range(0, len(rows), _ROWS_AT_ONCE):
                part = rows[at : at + _ROWS_AT_ONCE]
                weight = table.weight.detach()
                delta.upsert(name, touched.keys(name, part), weight[torch.as_tensor(part, device=weight.device)])
            count += len(rows)
        if dense is not None:
            delta.dense(dense)
    touched.clear()
    return count


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
    dense: bool = True,
) -> None:
    """Write a snapshot of a module: its embeddings as tables, in parts and never copied whole, and its dense part.

    Args:
        inputs: an example of `forward`'s arguments by name, tensors of two items or more, from which is told which are
            features; it is recorded as a request that must succeed before the version serves.
        keys: by table, the key of each row in order: integers or strings; default the row's number.
        dtype, default: of all tables, as `SnapshotWriter.table` takes them.
        dense: False for the tables alone.

    Raises SnapshotError and InvalidInput, before anything is written where it can be seen before.
    """
    tables = _tables(module)
    features = _features(module, inputs, tables)
    named = _checked_keys(keys, tables)
    graph = export_dense(module, inputs) if dense else None
    with SnapshotWriter(directory, model=model, version=version, delta_seq=delta_seq) as snapshot:
        for name, table in tables.items():
            weight = table.weight.detach()
            kind = "int64" if name not in named else guessed_key_type(named[name])
            out = snapshot.table(name, dim=weight.shape[1], dtype=dtype, key=kind, default=default)
            for at in range(0, len(weight), _ROWS_AT_ONCE):
                part = slice(at, min(at + _ROWS_AT_ONCE, len(weight)))
                out.write(named[name][part] if name in named else np.arange(part.start, part.stop), weight[part])
        for feature in features.values():
            padding = feature.padding
            if padding is not None and feature.table in named:
                padding = named[feature.table][padding]
                padding = padding.item() if isinstance(padding, np.generic) else padding
            snapshot.feature(feature.name, table=feature.table, combiner=feature.combiner, padding_key=padding)
        if graph is not None:
            snapshot.dense(graph)
            snapshot.request(_request(features, inputs, named))


def export_dense(module: nn.Module, inputs: Mapping[str, Any], path: str | Path | None = None) -> bytes:
    """The part of a module that is not in tables, as an ONNX model whose inputs are rows of features and what is left.

    inputs: an example, as for `write_snapshot`. The first dimension of each is the batch. path: also write it there. Raises
    SnapshotError where its scores are not the module's, and MissingExtra without `onnxscript` or ONNX Runtime.
    """
    tables = _tables(module)
    features = _features(module, inputs, tables)
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            expected = module(**inputs)
        dense = _Dense(module, tables, features, inputs).eval()
        given = {name: features[name].rows if name in features else inputs[name] for name in dense.names}
        content = _exported(dense, given)
        _check(content, given, expected)
    finally:
        module.train(was_training)
    if path is not None:
        Path(path).write_bytes(content)
    return content


# --- what a module is made of


@dataclass(slots=True)
class _Feature:
    """An argument of `forward` that goes into a table; `rows` is what came out for the example."""

    name: str
    table: str
    combiner: str | None
    padding: int | None
    rows: Any
    parts: tuple[str, ...]  # further arguments that only say how its bags are cut: offsets, weights


def _tables(module: nn.Module) -> dict[str, Any]:
    found = {}
    for path, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            found[check_name("table", path.replace(".", "_") or "embedding")] = part
    if not found:
        raise InvalidInput(
            f"{type(module).__name__} holds no nn.Embedding and no nn.EmbeddingBag: expected one or more"
        )
    return found


def _checked_keys(keys: Mapping[str, Any] | None, tables: Mapping[str, Any]) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name, values in (keys or {}).items():
        if name not in tables:
            raise InvalidInput(f"keys: there is no table {name!r}; there are {', '.join(tables)}")
        arrays[name] = values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)
        if arrays[name].shape != (len(tables[name].weight),):
            raise InvalidInput(
                f"keys of table {name!r}: expected one a row, {len(tables[name].weight)}, came {list(arrays[name].shape)}"
            )
    return arrays


def _features(module: nn.Module, inputs: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, _Feature]:
    """Which arguments go into which tables, found by running the module on the example."""
    arguments = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    found: dict[str, _Feature] = {}

    def argument_of(value: Any) -> str | None:
        same = (name for name, one in arguments.items() if isinstance(value, torch.Tensor) and value is one)
        return next(same, None)

    def note(name: str) -> Any:
        def hook(table: Any, given: tuple[Any, ...], options: dict[str, Any], rows: Any) -> None:
            argument = argument_of(given[0] if given else options["input"])
            if argument is None:
                raise InvalidInput(
                    f"table {name!r} is looked up with something that is no argument of forward: expected one of "
                    f"{', '.join(arguments)}, passed on as it is"
                )
            more = (argument_of(value) for value in (*given[1:], *options.values()))
            combiner = None
            if isinstance(table, nn.EmbeddingBag):
                combiner = table.mode
                if combiner not in ("sum", "mean"):
                    raise InvalidInput(f"table {name!r}: mode {combiner!r} is not served: expected sum or mean")
            parts = tuple(one for one in more if one is not None and one != argument)
            found[argument] = _Feature(argument, name, combiner, table.padding_idx, rows.detach(), parts)

        return hook

    hooks = [table.register_forward_hook(note(name), with_kwargs=True) for name, table in tables.items()]
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            module(**inputs)
    finally:
        module.train(was_training)
        for hook in hooks:
            hook.remove()
    return found


def _request(features: Mapping[str, _Feature], inputs: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The example as a request to the model that is served."""
    arrays = {name: value.numpy(force=True) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    request: dict[str, Any] = dict(arrays)
    for name, feature in features.items():
        for part in feature.parts:
            del request[part]
        if feature.table in keys:
            request[name] = keys[feature.table][arrays[name]]
        if feature.parts:
            request[name] = (request[name], *(arrays[part] for part in feature.parts))
    return request


class _Rows(nn.Module):  # type: ignore[misc]
    """In the place of a table: what comes in are its rows already."""

    def forward(self, rows: Any, *_: Any, **__: Any) -> Any:
        return rows


class _Dense(nn.Module):  # type: ignore[misc]
    """The module with rows for the arguments that are features, and nothing for those that only cut bags."""

    def __init__(
        self, module: nn.Module, tables: Mapping[str, Any], features: Mapping[str, _Feature], inputs: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._tables = list(tables.values())  # in a list: no parts of this module
        self._nothing = {part: None for feature in features.values() for part in feature.parts}
        self.names = [name for name in inputs if name not in self._nothing]
        self.inner = module

    def forward(self, *given: Any) -> Any:
        return self.inner(**dict(zip(self.names, given, strict=True)), **self._nothing)

    @contextmanager
    def without_tables(self) -> Iterator[None]:
        taken = [
            (parent, name, part)
            for parent in self.inner.modules()
            for name, part in parent.named_children()
            if any(part is table for table in self._tables)
        ]
        for parent, name, _ in taken:
            setattr(parent, name, _Rows())
        try:
            yield
        finally:
            for parent, name, part in taken:
                setattr(parent, name, part)


def _exported(dense: _Dense, given: Mapping[str, Any]) -> bytes:
    try:
        import onnxscript  # noqa: F401 - which PyTorch's exporter needs, and says so in many words
    except ImportError as error:
        raise MissingExtra("PyTorch exports ONNX with the package onnxscript: pip install onnxscript") from error
    batch = torch.export.Dim("batch", min=1)
    if any(value.ndim == 0 or len(value) < 2 for value in given.values()):
        raise InvalidInput(
            "expected an example of two items or more, the first dimension of each input being the batch"
        )
    with dense.without_tables(), torch.no_grad():
        program = torch.onnx.export(
            dense,
            tuple(given.values()),
            input_names=list(given),
            dynamic_shapes=(tuple({0: batch} for _ in given),),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    return bytes(program.model_proto.SerializeToString())


def _check(content: bytes, given: Mapping[str, Any], expected: Any) -> None:
    """Whether ONNX Runtime gives the scores of the module."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtra("scores are checked with ONNX Runtime: install tierstore[dense]") from error
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    known = {port.name for port in session.get_inputs()}
    came = session.run(None, {name: value.numpy(force=True) for name, value in given.items() if name in known})
    wanted = list(expected.values()) if isinstance(expected, dict) else expected
    for i, (one, other) in enumerate(zip(wanted if isinstance(wanted, (list, tuple)) else [wanted], came, strict=True)):
        if not np.allclose(one.numpy(force=True), other, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise SnapshotError(
                f"the exported model's output {i} is not the module's: differs by {np.abs(one.numpy(force=True) - other).max():g}"
            )
