"""Answers in JSON, written by compiled code, beside what orjson makes of the same arrays."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import orjson
import pytest

from tests.compiled.answers import most_bytes
from tests.compiled.float_text import READ_OTHERWISE, misread
from tests.counts import few_or_many
from tierstore.kernels.codec import address_of
from tierstore.lookup import answer_values, binding, json_answer, plans
from tierstore.service.dataplane.plan import OutputSpec
from tierstore.service.protocols.tfserving.json_messages import encode_answer
from tierstore.wire.request_record import DATATYPES, NO_ID

_VALUES_AT, _OUTPUT = answer_values.VALUES.offset("outputs"), answer_values.OUTPUT.bytes
DTYPES = {"BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64} | {
    name: np.dtype(name.lower()).type for name in DATATYPES if name.startswith(("INT", "UINT"))
}


write = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)(json_answer.write.address)


def variant_of(pieces: list[tuple[Any, ...]], as_json: int) -> tuple[Any, list[Any]]:
    """A variant of these pieces: texts, each with the other fields of a piece; and what it points to."""
    kept = [np.frombuffer(text or b"?", np.uint8) for text, *_ in pieces]
    words = plans.PIECE.bytes // 8
    rows = [
        (address_of(own), len(text), *behind, *[0] * (words - 2 - len(behind)))
        for own, (text, *behind) in zip(kept, pieces, strict=True)
    ]
    texts = np.array(rows, np.int64)
    variant = plans.LOOKUP.make(pieces=len(pieces), texts=address_of(texts), as_json=as_json)
    return variant, [*kept, texts]


def written(arrays: list[tuple[str, np.ndarray]], request_id: bytes | None = None) -> bytes:
    """An answer's JSON: a list of its outputs' elements and sizes, between other texts. Nothing around it is touched."""
    data = np.frombuffer(b"?" + b"".join(array.tobytes() for _, array in arrays) + bytes(8), np.uint8).copy()
    values = np.zeros(answer_values.VALUES.bytes // 8, np.int64)
    pieces: list[tuple[Any, ...]] = []
    at = 0
    text = b'{"outputs":['
    for i, (datatype, array) in enumerate(arrays):
        place = (_VALUES_AT + i * _OUTPUT) // 8
        values[place : place + 4] = len(array), 0, array.nbytes, at
        at += array.nbytes
        pieces += [(text, place), (b",", i, 1 + DATATYPES.index(datatype))]
        text = b","
    variant, _kept = variant_of([*pieces, (b"]", binding.NONE)], plans.FLAT)
    room = int(most_bytes(address_of(variant), address_of(values)))
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
    datatype, bits = {2: ("FP16", np.uint16), 4: ("FP32", np.uint32), 8: ("FP64", np.uint64)}[floats.itemsize]
    text = written([(datatype, floats)])
    assert text == as_orjson_has_it([(datatype, floats)])
    finite = np.isfinite(floats)
    read = np.array(orjson.loads(text)["outputs"][1], np.float64).astype(floats.dtype)  # null is NaN
    assert (read[finite].view(bits) == floats[finite].view(bits)).all()


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


def test_floats_are_read_back_by_the_reader_of_requests() -> None:
    """Of all 2^32 one in 40,009; all of them with FLOAT32_STEP=1, which takes a core for minutes."""
    step = int(os.environ.get("FLOAT32_STEP", 40_009))
    assert sum(misread(first, first + (1 << 24), step) for first in range(0, 1 << 32, 1 << 24)) == 0


def test_the_one_float_that_doubles_round_twice_is_spelled_as_orjson_spells_it() -> None:
    odd = np.array([READ_OTHERWISE, READ_OTHERWISE | 1 << 31], np.uint32).view(np.float32)
    assert (
        written([("FP32", odd)]) == as_orjson_has_it([("FP32", odd)]) == b'{"outputs":[2,[7.038531e-26,-7.038531e-26]]}'
    )


@pytest.mark.counted
def test_doubles_are_spelled_as_orjson_spells_them_and_read_back_as_the_same() -> None:
    rng = np.random.default_rng(8)
    count = few_or_many(100_000, 2_000_000)
    check_floats(rng.integers(0, 1 << 64, count, np.uint64, endpoint=False).view(np.float64))
    check_floats(rng.normal(0, 1, count))
    check_floats(10.0 ** rng.uniform(-12, 20, count))
    check_floats(rng.integers(-(1 << 53), 1 << 53, count).astype(np.float64) / 8)
    check_floats(rng.normal(0, 1, count).astype(np.float32).astype(np.float64))
    exponents = np.arange(2047, dtype=np.uint64) << np.uint64(52)
    check_floats(np.concatenate([exponents, exponents + np.uint64(1), exponents[1:] - np.uint64(1)]).view(np.float64))
    tens = np.array([10.0**k for k in range(-323, 309)])
    for near in (tens, np.nextafter(tens, 0), np.nextafter(tens, np.inf)):
        check_floats(np.concatenate([near, -near]))
    check_floats(np.arange(2000, dtype=np.uint64).view(np.float64))


def test_every_half_is_spelled_as_orjson_spells_it_and_read_back_as_the_same() -> None:
    check_floats(np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16))


def nested(arrays: dict[str, np.ndarray], *, rows: bool) -> bytes | None:
    """An answer of TensorFlow Serving's; None where it is left to the full writer. Nothing around it is touched."""
    data = np.frombuffer(b"".join(array.tobytes() for array in arrays.values()) + bytes(8), np.uint8).copy()
    values, at = np.zeros(answer_values.VALUES.bytes // 8, np.int64), 0
    outer = b'{"predictions":' if rows else b'{"outputs":'
    pieces: list[tuple[Any, ...]] = [(outer + b"[", binding.NONE)] if rows and len(arrays) > 1 else []
    for i, (name, array) in enumerate(arrays.items()):
        place = (_VALUES_AT + i * _OUTPUT) // 8
        sizes = list(array.shape)
        values[place : place + 4] = *[*sizes, 0, 0][:2], array.nbytes, at
        at += array.nbytes
        sizes[:2] = [~(place + axis) for axis in range(len(sizes[:2]))]  # the others are the same for all answers
        key = orjson.dumps(name) + b":"
        text = outer if len(arrays) == 1 else (b"," if i else b"{") + key
        if not i and len(arrays) > 1 and not rows:
            text = outer + text
        datatype = next(name for name, dtype in DTYPES.items() if dtype == array.dtype.type)
        pieces.append((text, i, 1 + DATATYPES.index(datatype), array.ndim, *sizes))
    if len(arrays) > 1 and not rows:
        pieces.append((b"}", binding.NONE))
    variant, _kept = variant_of(pieces, plans.BY_ROW if rows and len(arrays) > 1 else plans.NESTED)
    room = int(most_bytes(address_of(variant), address_of(values)))
    answer = np.full(room + 2, 0xA5, np.uint8)
    begin = address_of(answer) + 1
    end = write(address_of(variant), address_of(values), 0, NO_ID, address_of(data), begin)
    assert (answer[0], answer[-1]) == (0xA5, 0xA5)
    return answer[1 : 1 + end - begin].tobytes() if end else None


def as_python_has_it(arrays: dict[str, np.ndarray], *, rows: bool) -> bytes:
    specs = [OutputSpec(name, "FP32", array.shape) for name, array in arrays.items()]
    return encode_answer(rows, specs, list(arrays.values()))


def test_outputs_in_lists_and_rows_are_written_as_python_writes_them() -> None:
    rng = np.random.default_rng(9)
    shapes = [(3,), (3, 2), (3, 1), (3, 0), (3, 2, 4), (3, 0, 4), (3, 2, 0), (3, 1, 1, 2), (1, 2, 3, 4)]
    shapes += [(0,), (0, 4), (0, 2, 3)]
    for shape in shapes:
        for dtype in DTYPES.values():
            array = (rng.normal(0, 100, shape) if dtype != np.bool_ else rng.random(shape) < 0.5).astype(dtype)
            for rows in (False, True):
                assert nested({"a": array}, rows=rows) == as_python_has_it({"a": array}, rows=rows), (shape, dtype)
        others = {
            "a": rng.normal(size=shape).astype(np.float32),
            'b "x"': np.arange(shape[0]),
            "c": np.ones((shape[0], 2), np.bool_),
        }
        for rows in (False, True):
            assert nested(others, rows=rows) == as_python_has_it(others, rows=rows), shape


def test_what_is_no_number_or_makes_no_rows_is_left_to_the_full_writer() -> None:
    for dtype in (np.float16, np.float32, np.float64):
        for odd in (np.nan, np.inf, -np.inf):
            assert nested({"a": np.array([[1, 2], [3, odd]], dtype)}, rows=False) is None
    assert nested({"a": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}, rows=True) is None
    assert nested({"a": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}, rows=False) is not None


def test_a_scalar_is_written_without_a_list() -> None:
    array = np.array(1.5, np.float32)
    assert nested({"a": array}, rows=False) == as_python_has_it({"a": array}, rows=False) == b'{"outputs":1.5}'


def test_integers_and_booleans_of_every_width() -> None:
    for datatype in json_answer.WRITTEN:
        dtype = DTYPES[datatype]
        if datatype == "BOOL":
            values = np.array([True, False, True])
        elif datatype.startswith("FP"):
            values = np.array([1.5, -0.0, np.nan, np.inf], dtype)
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
