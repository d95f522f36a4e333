"""Snapshots of a module: embeddings as tables, the remainder as the dense part. For the thread that trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from tierstore.errors import InvalidInput
from tierstore.formats.normalize import guessed_key_type
from tierstore.formats.rounding import Rounding
from tierstore.formats.snapshot.writer import SnapshotWriter, TableWriter
from tierstore.torch.dense import dense_part
from tierstore.torch.golden import write_golden
from tierstore.torch.runs import UsedFeature, example_request, runs_of
from tierstore.torch.tables import BATCH_ROWS, checked_keys, tables_of, unwrapped, weight_rows
from tierstore.torch.touched import TouchedRows
from tierstore.types import StorageDtype


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
    golden: bool = True,
) -> dict[str, Rounding]:
    """Write a snapshot of a module: its embeddings as tables, in parts and never copied whole, and its dense part.

    Args:
        inputs: an example of `forward`'s arguments by name, tensors of two items or more, and KeyedJaggedTensors of
            TorchRec's collections. It shows which arguments are features, and is recorded as a request that must
            succeed before the version serves. The module is run on it, and in its shapes on keys drawn from the tables,
            and has to give what the rows and the graph give.
        keys: by table, the key of each row in order: integers or strings; default the row's number.
        dtype: of all tables, as for `SnapshotWriter.table`; so is `default`.
        ttl_s: by table, after which time rows expire that no snapshot or delta has written: seconds, or `30d`.
        dense: False to write the tables only. output_names: of what `forward` returns, as for `export_dense`.
        touched: its rows count as written then, so that the next delta holds what changed after the snapshot.
        golden: whether to write what the module scores for rows as stored: a load that gets other scores fails.

    Returns by table how far its numbers are off once they are stored in `dtype`: `largest` and `mean`.
    Raises SnapshotError and InvalidInput, before anything is written where possible.
    """
    tables = tables_of(module := unwrapped(module))
    runs = runs_of(module, inputs, tables)
    features, named = runs[0].features, checked_keys(keys, tables)
    if hashed := [of.table for of in features.values() if of.hash is not None and of.table in named]:
        raise InvalidInput(
            f"keys: table {hashed[0]!r} is read through HashKeys, so its keys are the numbers of its rows"
        )
    ttls = _checked_ttls(ttl_s, tables)
    graph = dense_part(module, runs, tables, output_names) if dense else None
    rounding: dict[str, Rounding] = {}
    with SnapshotWriter(directory, model=model, version=version, delta_seq=delta_seq) as snapshot:
        for name, table in tables.items():
            kind = "int64" if name not in named else guessed_key_type(named[name])
            out = snapshot.table(
                name, dim=table.weight.shape[1], dtype=dtype, key=kind, default=default, ttl_s=ttls.get(name)
            )
            rounding[name] = _write_rows(out, table, named.get(name))
        _write_features(snapshot, features, named)
        if graph is not None:
            snapshot.dense(graph)
            snapshot.request(example_request(features, inputs, named))
        if golden:
            write_golden(snapshot, module, runs, tables, named, StorageDtype(dtype), default=default, graph=graph)
    if touched is not None:
        touched.clear()
    return rounding


def _checked_ttls(ttl_s: Mapping[str, int | str] | None, tables: Mapping[str, Any]) -> dict[str, int | str]:
    if unknown := [name for name in ttl_s or {} if name not in tables]:
        raise InvalidInput(f"ttl_s: {unknown[0]!r} is no table of the module; its tables are {', '.join(tables)}")
    return dict(ttl_s or {})


def _write_rows(out: TableWriter, table: Any, keys: Any) -> Rounding:
    rows = len(table.weight)
    for begin in range(0, rows, BATCH_ROWS):
        part = slice(begin, min(begin + BATCH_ROWS, rows))
        out.write(np.arange(part.start, part.stop) if keys is None else keys[part], weight_rows(table, part))
    return out.rounding


def _write_features(snapshot: SnapshotWriter, features: Mapping[str, UsedFeature], named: Mapping[str, Any]) -> None:
    for feature in features.values():
        padding = feature.padding
        if padding is not None and feature.table in named:
            padding = named[feature.table][padding]
            padding = padding.item() if isinstance(padding, np.generic) else padding
        how = None if feature.hash is None else feature.hash.document()
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
    module = unwrapped(module)
    tables = tables_of(module)
    content = dense_part(module, runs_of(module, inputs, tables), tables, output_names)
    if path is not None:
        Path(path).write_bytes(content)
    return content
