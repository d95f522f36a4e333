"""Answers in JSON, written by compiled code, beside what orjson makes of the same arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import orjson
import pytest

from tests.counts import few_or_many
from tierstore.kernels.codec import address_of
from tierstore.lookup import answer_values, binding, json_answer, plans
from tierstore.wire.request_record import DATATYPES, NO_ID

_VALUES_AT, _OUTPUT = answer_values.VALUES.offset("outputs"), answer_values.OUTPUT.bytes
DTYPES = {"BOOL": np.bool_, "FP32": np.float32} | {
    name: np.dtype(name.lower()).type for name in DATATYPES if name.startswith(("INT", "UINT"))
}


def written(arrays: list[tuple[str, np.ndarray]], request_id: bytes | None = None) -> bytes:
    """An answer's JSON: a list of its outputs' elements and sizes, between other texts. Nothing around it is touched."""
    write = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)(json_answer.write.address)
    data = np.frombuffer(b"?" + b"".join(array.tobytes() for _, array in arrays) + bytes(8), np.uint8).copy()
    values = np.zeros(answer_values.VALUES.bytes // 8, np.int64)
    kept: list[Any] = []
    pieces, at = [], 0
    text = b'{"outputs":['
    for i, (datatype, array) in enumerate(arrays):
        place = (_VALUES_AT + i * _OUTPUT) // 8
        values[place : place + 4] = len(array), 0, array.nbytes, at
        at += array.nbytes
        for behind in ((text, place, 0), (b",", i, 1 + DATATYPES.index(datatype))):
            kept.append(np.frombuffer(behind[0], np.uint8))
            pieces.append((address_of(kept[-1]), len(behind[0]), *behind[1:]))
        text = b","
    kept.append(np.frombuffer(b"]", np.uint8))
    pieces.append((address_of(kept[-1]), 1, binding.NONE, 0))
    texts = np.array(pieces, np.int64)
    variant = plans.VARIANT.make(pieces=len(pieces), texts=address_of(texts), as_json=1)
    room = sum(len(text) for text in kept) + 20 * len(pieces) + binding.MOST_ADDED_BYTES + json_answer.GROWTH * at
    answer = np.full(room + 2, 0xA5, np.uint8)
    own = np.frombuffer(request_id or b"-", np.uint8)
    begin = address_of(answer) + 1
    end = write(
        address_of(variant), address_of(values), address_of(own), NO_ID if request_id is None else len(request_id),
        address_of(data) + 1, begin,
    )  # fmt: skip
    assert (answer[0], answer[-1]) == (0xA5, 0xA5)
    return answer[1 : 1 + end - begin].tobytes()


def as_orjson_has_it(arrays: list[tuple[str, np.ndarray]]) -> bytes:
    outputs = [part for _, array in arrays for part in (len(array), array)]
    return orjson.dumps({"outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)


def check_floats(floats: np.ndarray) -> None:
    text = written([("FP32", floats)])
    assert text == as_orjson_has_it([("FP32", floats)])
    finite = np.isfinite(floats)
    read = np.array(orjson.loads(text)["outputs"][1], np.float64).astype(np.float32)  # null is NaN
    assert (read[finite].view(np.uint32) == floats[finite].view(np.uint32)).all()


@pytest.mark.counted
def test_floats_are_spelled_as_orjson_spells_them_and_read_back_as_the_same() -> None:
    rng = np.random.default_rng(7)
    count = few_or_many(100_000, 2_000_000)
    check_floats(rng.integers(0, 1 << 32, count, np.uint64).astype(np.uint32).view(np.float32))
    check_floats(rng.normal(0, 1, count).astype(np.float32))
    check_floats((10.0 ** rng.uniform(-12, 20, count)).astype(np.float32))
    check_floats(rng.integers(-(1 << 26), 1 << 26, count).astype(np.float32) / np.float32(8))


def test_floats_at_the_edges_of_their_spelling() -> None:
    exponents = np.arange(255, dtype=np.uint32) << 23
    check_floats(
        np.concatenate([exponents - 1 if step < 0 else exponents + step for step in (-1, 0, 1)])
        .astype(np.uint32)[1:]
        .view(np.float32)
    )
    check_floats(np.arange(2000, dtype=np.uint32).view(np.float32))
    tens = np.array([10.0**k for k in range(-45, 39)], np.float32)
    for near in (tens, np.nextafter(tens, np.float32(0)), np.nextafter(tens, np.float32(np.inf))):
        check_floats(np.concatenate([near, -near]))
    check_floats(np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1, -1, 16777216, 3.4028235e38, 1e-45], np.float32))


def test_integers_and_booleans_of_every_width() -> None:
    for datatype in json_answer.WRITTEN:
        dtype = DTYPES[datatype]
        if datatype == "BOOL":
            values = np.array([True, False, True])
        elif datatype == "FP32":
            values = np.array([1.5], np.float32)
        else:
            limits = np.iinfo(dtype)
            tens = [10**k + step for k in range(20) for step in (-1, 0, 1)]
            every = {limits.min, limits.max, *tens, *(-ten for ten in tens)}
            values = np.array(sorted(value for value in every if limits.min <= value <= limits.max), dtype)
        for array in (values, values[:1], values[:0]):
            assert written([(datatype, array)]) == as_orjson_has_it([(datatype, array)])


def test_outputs_stand_side_by_side_and_the_id_comes_last() -> None:
    arrays = [("FP32", np.array([1, 2.5], np.float32)), ("BOOL", np.array([True])), ("INT64", np.array([-7, 0]))]
    assert written(arrays) == b'{"outputs":[2,[1.0,2.5],1,[true],2,[-7,0]]}'
    assert written(arrays, b"a") == b'{"outputs":[2,[1.0,2.5],1,[true],2,[-7,0]],"id":"a"}'
    assert written(arrays, b"").endswith(b'],"id":""}')
