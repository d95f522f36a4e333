"""Look-ups as operators of PyTorch: `torch.compile` and `torch.export` take a module that reads a store as it is.

`torch.ops.tierstore.rows(keys, reader)` and `bags(keys, offsets, weights, reader)`. A reader is a module of
`modules.py`, by a number of this process; it is read when the operator runs, so a graph keeps no rows. Any thread may
call them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tierstore.errors import InvalidInput


class Reader(Protocol):
    """What an operator reads with. `dim` and `rows_dtype`: of what it answers."""

    rows_dtype: torch.dtype

    @property
    def dim(self) -> int: ...
    def bags_of(self, keys: torch.Tensor, offsets: torch.Tensor | None) -> int: ...
    def read(self, keys: torch.Tensor, offsets: Any = None, weights: Any = None) -> torch.Tensor: ...


_numbers = itertools.count()
_readers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def number_of(reader: Reader) -> int:
    """A number by which operators find a reader, for as long as it lives."""
    number = next(_numbers)
    _readers[number] = reader
    return number


def _reader(number: int) -> Reader:
    reader: Reader | None = _readers.get(number)
    if reader is None:
        raise InvalidInput(
            "the module that this graph reads rows with is gone: a graph that was compiled or exported runs in the "
            "process that made it, for as long as the module lives"
        )
    return reader


def _read_rows(keys: torch.Tensor, reader: int) -> torch.Tensor:
    return _reader(reader).read(keys)


def _fake_rows(keys: torch.Tensor, reader: int) -> torch.Tensor:
    by = _reader(reader)
    return keys.new_empty((*keys.shape, by.dim), dtype=by.rows_dtype)


def _read_bags(keys: torch.Tensor, offsets: Any, weights: Any, reader: int) -> torch.Tensor:
    return _reader(reader).read(keys, offsets, weights)


def _fake_bags(keys: torch.Tensor, offsets: Any, weights: Any, reader: int) -> torch.Tensor:
    by = _reader(reader)
    return keys.new_empty((by.bags_of(keys, offsets), by.dim), dtype=by.rows_dtype)


# `torch.library.custom_op` would take twice as long a call
_library = torch.library.Library("tierstore", "FRAGMENT")


def _define(name: str, arguments: str, read: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]) -> Any:
    _library.define(f"{name}({arguments}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, read, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tierstore::{name}", fake, lib=_library)
    return getattr(torch.ops.tierstore, name).default


# [*, dim] of keys of any shape, and [bags, dim]
rows = _define("rows", "Tensor keys, int reader", _read_rows, _fake_rows)
bags = _define("bags", "Tensor keys, Tensor? offsets, Tensor? weights, int reader", _read_bags, _fake_bags)
