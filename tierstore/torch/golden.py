"""Golden examples of a module: what it scores itself, unchanged, for rows as the snapshot stores them.

For the thread that trains.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from tierstore.formats.onnx_file import graph_ports
from tierstore.formats.snapshot.golden import RTOL
from tierstore.formats.snapshot.writer import SnapshotWriter
from tierstore.kernels.codec import decode, encode
from tierstore.torch.hashing import HashKeys
from tierstore.torch.runs import ModuleRun, UsedFeature, epsilon_of, example_request, run_of
from tierstore.torch.tables import weight_rows
from tierstore.types import StorageDtype

log = logging.getLogger(__name__)

_COARSE = 1e-5  # numbers that round by more are compared by what they round by


def write_golden(
    snapshot: SnapshotWriter,
    module: nn.Module,
    runs: Sequence[ModuleRun],
    tables: Mapping[str, Any],
    keys: Mapping[str, Any],
    dtype: StorageDtype,
    *,
    default: str,
    graph: bytes | None,
) -> None:
    """Write each run as an example, and for each feature one with an absent key, or an empty bag.

    The module runs again on the rows as they are stored in `dtype`. keys: by table, those of the user. graph: of the
    dense part; without it rows are expected, and no scores.
    """
    with _stored(runs, tables, dtype):
        again = [run_of(module, run.inputs, tables) for run in runs]
    off = max((_difference(full, stored) for full, stored in zip(runs, again, strict=True)), default=0.0)
    if off:
        log.info("scores of rows as they are stored, %s, differ from the module's by %.3g at most", dtype.value, off)
    inputs, outputs = ({}, []) if graph is None else graph_ports(graph)
    epsilon = 8 * epsilon_of(module.parameters())
    for run in again:
        request = example_request(run.features, run.inputs, keys)
        request = {name: value for name, value in request.items() if name in inputs or name in run.features}
        request |= {  # sequences are no bags: their rows are looked up as they are
            name: request[name][0]
            for name, feature in run.features.items()
            if feature.combiner is None and isinstance(request[name], tuple)
        }
        expected = {name: feature.rows.numpy(force=True) for name, feature in run.features.items()}
        if graph is not None:
            expected |= {name: _array(value) for name, value in zip(outputs, run.outputs, strict=True)}
        within: dict[str, Any] = {}
        if epsilon > _COARSE:
            floats = [np.abs(one).max(initial=0.0) for one in expected.values() if one.dtype.kind == "f"]
            within = {"rtol": max(RTOL, epsilon), "atol": epsilon * float(max(floats))}
        snapshot.golden(request, expected, **within)
    if default == "zeros":
        for name, feature in again[0].features.items():
            _write_edges(snapshot, name, feature, keys.get(feature.table))


def _write_edges(snapshot: SnapshotWriter, name: str, feature: UsedFeature, keys: Any) -> None:
    """A key that the table does not hold gets zeros, and so does an empty bag."""
    rows, dim = feature.rows.reshape(-1, feature.rows.shape[-1]).numpy(force=True), feature.rows.shape[-1]
    if feature.combiner is not None:
        empty = np.zeros(0, np.int64) if keys is None or keys.dtype.kind != "U" else np.zeros(0, np.str_)
        snapshot.golden({name: (empty, np.zeros(1, np.int64))}, {name: np.zeros((1, dim), np.float32)})
        return
    absent = _absent(feature, keys)
    if absent is not None and len(rows):
        snapshot.golden({name: absent}, {name: np.zeros((1, dim), np.float32)})


def _absent(feature: UsedFeature, keys: Any) -> Any:
    """A key that a feature's table does not hold; None where every key has a row."""
    if feature.hash is not None:
        return None
    if keys is None:
        return np.array([-1])
    if keys.dtype.kind in "iu":
        free = np.setdiff1d(np.arange(len(keys) + 1), keys)
        return free[:1].astype(keys.dtype)
    return np.array(["\u2205" + max(map(str, keys.tolist()), key=len)])


@contextmanager
def _stored(runs: Sequence[ModuleRun], tables: Mapping[str, Any], dtype: StorageDtype) -> Iterator[None]:
    """Rows that the runs read are as they are stored, for the block."""
    before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for name, table in tables.items():
                read = [_row_numbers(of) for run in runs for of in run.features.values() if of.table == name]
                if not read:
                    continue
                numbers = torch.cat(read).unique().to(table.weight.device)
                full = weight_rows(table, numbers).float().numpy(force=True)
                stored = np.empty(full.shape, np.float32)
                decode(encode(np.ascontiguousarray(full), dtype), dtype, stored)
                before.append((table.weight, numbers, table.weight.detach()[numbers].clone()))
                table.weight[numbers] = torch.from_numpy(stored).to(table.weight)
        yield
    finally:
        with torch.no_grad():
            for weight, numbers, rows in before:
                weight[numbers] = rows


def _row_numbers(feature: UsedFeature) -> torch.Tensor:
    keys, how = feature.bags.keys, feature.hash
    return (keys if how is None else HashKeys(how.mod, how.seed)(keys)).reshape(-1).long().cpu()


def _array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, torch.Tensor):
        value = value.float() if value.dtype is torch.bfloat16 else value
        value = value.numpy(force=True)
    array: np.ndarray[Any, Any] = np.asarray(value)
    return array


def _difference(full: ModuleRun, stored: ModuleRun) -> float:
    """By how much the scores of two runs differ at most."""
    pairs = [(_array(a), _array(b)) for a, b in zip(full.outputs, stored.outputs, strict=True)]
    floats = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs if a.dtype.kind == "f"]
    return max((float(np.nan_to_num(np.abs(a - b)).max(initial=0.0)) for a, b in floats), default=0.0)
