"""Deltas of a module: the rows of its embeddings that training has changed. Use it from the thread that trains."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tierstore.errors import InvalidInput
from tierstore.formats.delta.writer import DeltaWriter
from tierstore.formats.times import TimeLike
from tierstore.torch.tables import BATCH_ROWS, check_collections, check_table, checked_keys, tables_of, weight_rows


class Behind(NamedTuple):
    """How far what was written of a table is behind the module: rows that differ, and the
    largest change of one (L2 norm).
    """

    rows: int
    largest: float


class TouchedRows:
    """The rows of a module's embeddings that the next delta holds.

    Those are the rows that training has looked up since the last delta, and those that had a gradient when an
    optimizer of PyTorch made a step, by a flag per row on their device. A row counts when it is looked up while the
    module trains, whether its gradients are sparse or dense; by its gradient it counts too when something else reads
    it (a softmax head that shares the weight), or when another process has looked it up. An optimizer that changes
    rows without a gradient (Adam over dense gradients, weight decay) changes others too: write a snapshot now and
    then, train embeddings with SparseAdam, Adagrad or SGD, or set `hold_back`.

    With `hold_back` they are the rows that differ from what was last written of them by more than that (L2 norm). A
    smaller change waits, and adds up with later ones: after a delta no row is further behind than `hold_back`. It costs
    a copy of the table, on its device, and reading the whole table for each delta.

    Args:
        keys: by table, the key of each row in order; default the row's number.
        hold_back: for all tables, or by table; 0 sends every row that differs at all. What counts as written are the
            values at construction, until a delta is written or `clear` is called.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        keys: Mapping[str, Any] | None = None,
        hold_back: float | Mapping[str, float] | None = None,
    ) -> None:
        self.tables = tables_of(module)
        check_collections(module)
        for name, table in self.tables.items():
            check_table(name, table)
            if table._parameters.get("weight") is None:
                raise InvalidInput(
                    f"table {name!r}: its weight is computed from other parameters (a parametrization, weight_norm, "
                    "pruning), so that rows change without being looked up: write a snapshot each time, or make it a "
                    "parameter again, as torch.nn.utils.parametrize.remove_parametrizations does"
                )
        self._keys = checked_keys(keys, self.tables)
        self._hold_back = _checked_norms(hold_back, self.tables)
        self._written = {name: weight_rows(self.tables[name], slice(None)).clone() for name in self._hold_back}
        self._marks: dict[str, torch.Tensor] = {}
        marked = {name: table for name, table in self.tables.items() if name not in self._hold_back}
        self._hooks = [
            table.register_forward_pre_hook(
                self._hook([other for other, one in marked.items() if one.weight is table.weight]), with_kwargs=True
            )
            for table in marked.values()
        ]
        if marked:
            self._hooks.append(register_optimizer_step_post_hook(_stepped_of(weakref.ref(self))))
        weakref.finalize(self, _remove, self._hooks)

    def _hook(self, names: list[str]) -> Any:
        """A hook of a table with these names: several where modules share one weight."""

        def mark(table: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            if table.training and torch.is_grad_enabled():
                rows = arguments[0] if arguments else options["input"]
                for name in names:
                    self._mark_of(name, table)[rows.detach().reshape(-1)] = True

        return mark

    def _stepped(self, optimizer: Any) -> None:
        """Mark the rows that an optimizer has changed. What reads a weight without a look-up is seen here alone."""
        stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for name, table in self.tables.items():
            grad = table.weight.grad
            if name in self._hold_back or grad is None or id(table.weight) not in stepped:
                continue
            mark = self._mark_of(name, table)
            if grad.is_sparse:
                mark[grad._indices().reshape(-1)] = True
            else:
                mark |= _are_not_zero(grad)

    def _mark_of(self, name: str, table: nn.Module) -> torch.Tensor:
        mark = self._marks.get(name)
        weight = table.weight
        if mark is None or mark.device != weight.device or len(mark) != len(weight):
            mark = self._marks[name] = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        return mark

    def rows(self, table: str, *, flush: bool = False) -> Any:
        """Numbers of the rows that the next delta holds, int64, ascending. flush: also of those that are held back."""
        if table not in self._hold_back:
            chosen = self._marks.get(table)
            return np.empty(0, np.int64) if chosen is None else _numbers(chosen)
        norm = 0.0 if flush else self._hold_back[table]
        parts = [np.empty(0, np.int64)]
        for first, now, before in self._pieces(table):
            # Exact where nothing is held back: the norm of a tiny change may be 0. NaN counts as changed.
            changed = ~(_norms(now, before) <= norm) if norm else (now != before).any(dim=1)
            parts.append(first + _numbers(changed))
        return np.concatenate(parts)

    def behind(self, table: str) -> Behind:
        """How far what was written is behind the module; after a delta `largest` is at most `hold_back`.

        Zeros for a table without `hold_back`.
        """
        rows, largest = 0, 0.0
        for _, now, before in self._pieces(table) if table in self._hold_back else ():
            rows += int((now != before).any(dim=1).sum())
            largest = max(largest, float(_norms(now, before).max()))
        return Behind(rows, largest)

    def _pieces(self, table: str) -> Any:
        """(number of the first row, rows as they are now, the same rows as they were written), part by part."""
        of, written = self.tables[table], self._written[table]
        weight = of.weight
        if weight.shape != written.shape:
            raise InvalidInput(
                f"table {table!r}: expected the shape {list(written.shape)}, as when it was first seen, got "
                f"{list(weight.shape)}; make a new TouchedRows, and write a snapshot"
            )
        written = self._written[table] = written.to(weight.device)
        for first in range(0, len(weight), BATCH_ROWS):
            part = slice(first, first + BATCH_ROWS)
            yield first, weight_rows(of, part), written[part]

    def keys(self, table: str, rows: Any) -> Any:
        """The keys of rows."""
        return rows if table not in self._keys else self._keys[table][rows]

    def mark_written(self, table: str, rows: Any) -> None:
        """These rows (int64[n]) were written as they are now. `write_delta` calls this after the delta is written."""
        of = self.tables[table]
        index = torch.as_tensor(rows, device=of.weight.device)
        if table in self._hold_back:
            self._written[table].index_copy_(0, index, weight_rows(of, index).to(self._written[table].dtype))
        elif table in self._marks:
            self._marks[table][index] = False

    def clear(self) -> None:
        """All rows were written as they are now. `write_snapshot` calls this where it is told of `touched`."""
        for mark in self._marks.values():
            mark.zero_()
        for name, written in self._written.items():
            written.copy_(weight_rows(self.tables[name], slice(None)))

    def close(self) -> None:
        """Remove the hooks from the module and from optimizers."""
        _remove(self._hooks)


def write_delta(
    path: str | Path,
    touched: TouchedRows,
    *,
    model: str,
    seq: int,
    event_time: TimeLike | None = None,
    base_version: int | None = None,
    dense: str | Path | bytes | None = None,
    flush: bool = False,
) -> int:
    """Write the current vectors of the touched rows as a delta, and mark them as written. Returns their number.

    The arguments are those of `DeltaWriter`. dense: a new dense part, as `export_dense` returns it. flush: also
    the rows that are held back.
    """
    rows = {name: touched.rows(name, flush=flush) for name in touched.tables}
    with DeltaWriter(path, model=model, seq=seq, event_time=event_time, base_version=base_version) as delta:
        for name, table in touched.tables.items():
            for begin in range(0, len(rows[name]), BATCH_ROWS):
                part = rows[name][begin : begin + BATCH_ROWS]
                index = torch.as_tensor(part, device=table.weight.device)
                delta.upsert(name, touched.keys(name, part), weight_rows(table, index))
        if dense is not None:
            delta.dense(dense)
    for name, numbers in rows.items():
        touched.mark_written(name, numbers)
    return sum(map(len, rows.values()))


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _stepped_of(touched: weakref.ref[TouchedRows]) -> Any:
    """A hook of every optimizer, which does not keep the tables."""

    def stepped(optimizer: Any, *_: Any) -> None:
        if (its := touched()) is not None:
            its._stepped(optimizer)

    return stepped


def _are_not_zero(grad: torch.Tensor) -> torch.Tensor:
    """Whether rows hold a number that is not zero, bool[n]. By eight bytes at a time, it takes a third of the time."""
    with torch.no_grad():
        if grad.is_contiguous() and grad.shape[1] * grad.element_size() % 8 == 0:
            return grad.view(torch.int64).any(dim=1)
        return grad.any(dim=1)


def _numbers(chosen: torch.Tensor) -> Any:
    return chosen.nonzero().reshape(-1).cpu().numpy()


def _norms(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The L2 norm of each row's change, float32[n]."""
    return torch.linalg.vector_norm(now.float() - before.float(), dim=1)


def _checked_norms(hold_back: float | Mapping[str, float] | None, tables: Mapping[str, Any]) -> dict[str, float]:
    if hold_back is None:
        return {}
    norms = dict(hold_back) if isinstance(hold_back, Mapping) else dict.fromkeys(tables, hold_back)
    for name, norm in norms.items():
        if name not in tables:
            raise InvalidInput(f"hold_back: expected tables among {', '.join(tables)}, got {name!r}")
        if isinstance(norm, bool) or not isinstance(norm, (int, float)) or not 0 <= norm < math.inf:
            raise InvalidInput(f"hold_back of table {name!r}: expected a finite number, at least 0, got {norm!r}")
    return {name: float(norm) for name, norm in norms.items()}
