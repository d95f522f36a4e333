"""What dynamicemb's `incremental_dump` returns, as a delta: rows are set, evicted keys deleted."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")

import torch

import tierstore
from tierstore.errors import InvalidInput
from tierstore.formats.delta.reader import read_delta
from tierstore.torch import add_incremental_dump

Rows = dict[str, dict[int, list[float] | None]]


def delta_of(dump: Any, **options: Any) -> tuple[Rows, int]:
    sink = io.BytesIO()
    with tierstore.DeltaWriter(sink, model="ctr", seq=1) as delta:
        count = add_incremental_dump(delta, dump, **options)
    tables = read_delta(sink.getvalue()).tables
    return {
        name: {
            key: None if gone else row
            for key, row, gone in zip(of.keys.tolist(), of.vectors.tolist(), of.deleted.tolist(), strict=True)
        }
        for name, of in tables.items()
    }, count


def keys(*numbers: int) -> Any:
    return torch.tensor(numbers, dtype=torch.int64)


DUMP = {
    "embeddings": {"user": (keys(1, -5), torch.tensor([[1.0, 2], [3, 4]])), "item": (keys(), torch.empty(0, 3))},
    "bags": {"tag": (keys(9), torch.tensor([[0.5]]))},
}
SCORES = {"embeddings": {"user": 7, "item": 7}, "bags": {"tag": 7}}


def test_rows_of_all_collections_are_set() -> None:
    expected = {"user": {1: [1.0, 2.0], -5: [3.0, 4.0]}, "tag": {9: [0.5]}}
    found, count = delta_of((DUMP, SCORES))
    assert {name: of for name, of in found.items() if of} == expected
    assert count == 3
    assert delta_of(DUMP)[1] == 3
    assert delta_of(None) == ({}, 0)


def test_evicted_keys_are_deleted_but_for_those_that_came_back() -> None:
    evicted = {"embeddings": {"user": keys(2, 1), "item": keys(4)}}
    found, count = delta_of((DUMP, SCORES), evicted=evicted)
    assert found["user"] == {1: [1.0, 2.0], -5: [3.0, 4.0], 2: None}
    assert found["item"] == {4: None}
    assert count == 6


def test_what_is_no_dump_is_refused() -> None:
    with pytest.raises(InvalidInput, match="two collections have a table 'user'"):
        delta_of({"a": {"user": DUMP["embeddings"]["user"]}, "b": {"user": DUMP["embeddings"]["user"]}})
    with pytest.raises(InvalidInput, match="expected keys and values"):
        delta_of({"a": {"user": keys(1)}})
    with pytest.raises(InvalidInput, match="expected tables in collection 'user'"):
        delta_of({"user": DUMP["embeddings"]["user"]})
    with pytest.raises(InvalidInput, match=r"expected a tensor \[n\]"):
        delta_of({}, evicted={"a": {"user": np.array([1])}})
