"""Answers of TensorFlow Serving's REST interface: numbers, strings and shapes of every kind, in its words."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tierstore.errors import InvalidInput
from tierstore.service.dataplane.plan import OutputSpec
from tierstore.service.protocols.tfserving.json_messages import encode_answer


def answer(*, rows: bool = False, **arrays: np.ndarray) -> Any:
    specs = [OutputSpec(name, "FP32", array.shape) for name, array in arrays.items()]
    return json.loads(encode_answer(rows, specs, list(arrays.values())))


@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"])
def test_every_datatype_is_written(dtype: str) -> None:
    array = np.array([[0, 1], [1, 1]], dtype)
    assert answer(out=array) == {"outputs": array.tolist()}
    assert answer(out=array, rows=True) == {"predictions": array.tolist()}
    both = answer(out=array, more=array[:, 0], rows=True)["predictions"]
    assert both == [{"out": array[0].tolist(), "more": array[0, 0]}, {"out": array[1].tolist(), "more": array[1, 0]}]


def test_numbers_are_as_short_as_their_type_allows() -> None:
    text = encode_answer(False, [OutputSpec("x", "FP32", (2,))], [np.array([0.2, 1], np.float32)])
    assert text == b'{"outputs":[0.2,1.0]}'


def test_strings_are_text_or_bytes_by_their_name() -> None:
    names = np.array([["λ"], [""]], object)
    assert answer(label=names) == {"outputs": [["λ"], [""]]}
    assert answer(label_bytes=names) == {"outputs": [[{"b64": "zrs="}], [{"b64": ""}]]}
    scores = np.array([0.5, np.nan], np.float32)
    both = answer(label_bytes=names, score=scores, rows=True)["predictions"]
    assert [row["label_bytes"] for row in both] == [[{"b64": "zrs="}], [{"b64": ""}]]
    assert both[0]["score"] == 0.5
    assert np.isnan(both[1]["score"])


def test_what_is_no_number_has_its_word() -> None:
    text = encode_answer(False, [OutputSpec("x", "FP32", (3,))], [np.array([np.nan, np.inf, -np.inf], np.float32)])
    assert text == b'{"outputs": [NaN, Infinity, -Infinity]}'


def test_a_scalar_makes_a_value_but_no_rows() -> None:
    assert answer(out=np.array(1.5, np.float32)) == {"outputs": 1.5}
    with pytest.raises(InvalidInput, match="no rows"):
        answer(out=np.array(1.5, np.float32), rows=True)


def test_outputs_of_different_lengths_make_no_rows() -> None:
    with pytest.raises(InvalidInput, match=r"a \[2\], b \[3\]"):
        answer(a=np.zeros(2), b=np.zeros(3), rows=True)


def test_no_rows_are_an_empty_list() -> None:
    assert answer(out=np.zeros((0, 4), np.float32), rows=True) == {"predictions": []}
    assert answer(a=np.zeros((0, 4)), b=np.zeros(0), rows=True) == {"predictions": []}
