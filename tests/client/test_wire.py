"""The client's own work: tensors as bytes, look-ups in parts, refusals turned back into errors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import serialize_byte_tensor

from tierstore.client import wire
from tierstore.client.inputs import Batch
from tierstore.client.replies import Tensors, error_of
from tierstore.client.splitting import split_batch
from tierstore.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    SequenceGap,
    TierstoreError,
    TooLarge,
    Unauthorized,
    Unreachable,
)

# --- tensors as bytes


@pytest.mark.thorough
@given(st.lists(st.text(max_size=20), max_size=50), st.integers(0, 3))
def test_strings_travel_as_the_protocols_own_client_sends_them(texts: list[str], skipped: int) -> None:
    array = pa.array(["skipped"] * skipped + texts, pa.large_string())[skipped:]
    tensor = wire.strings("user", array)
    expected = serialize_byte_tensor(np.array([text.encode() for text in texts], object))
    assert bytes(tensor.data) == (expected.item() if texts else b"")
    assert (tensor.datatype, tensor.shape) == ("BYTES", (len(texts),))


def test_a_request_describes_its_tensors_in_order() -> None:
    keys, offsets = np.array([1, -1, 2**62]), np.array([0, 1])
    inputs = [wire.numbers("a", keys), wire.numbers("a.offsets", offsets), wire.numbers("s", np.float32(2.5))]
    header = json.loads(wire.document(inputs, [wire.Output("a", {"dtype": "FP16"})]))
    assert [(i["name"], i["datatype"], i["shape"], i["parameters"]["binary_data_size"]) for i in header["inputs"]] == [
        ("a", "INT64", [3], 24),
        ("a.offsets", "INT64", [2], 16),
        ("s", "FP32", [], 4),
    ]
    assert header["outputs"] == [{"name": "a", "parameters": {"binary_data": True, "dtype": "FP16"}}]
    assert "parameters" not in header
    assert bytes(inputs[0].data) + bytes(inputs[1].data) == keys.tobytes() + offsets.tobytes()
    assert json.loads(wire.document(inputs, []))["parameters"] == {"binary_data_output": True}


def laid_out(outputs: dict[str, np.ndarray], version: int = 7) -> tuple[bytes, int]:
    """The body of an answer as a service sends it, and the length of its JSON."""
    names = {"float32": "FP32", "float16": "FP16", "bool": "BOOL"}
    described = [
        {
            "name": name,
            "datatype": names[a.dtype.name],
            "shape": list(a.shape),
            "parameters": {"binary_data_size": a.nbytes},
        }
        for name, a in outputs.items()
    ]
    header = json.dumps({"model_name": "m", "model_version": str(version), "outputs": described}).encode()
    return header + b"".join(a.tobytes() for a in outputs.values()), len(header)


def feed(reply: Tensors, body: bytes, json_bytes: int | None, step: int = 1 << 20) -> Tensors:
    """Put `body` where the reply says, `step` bytes at a time."""
    headers = {} if json_bytes is None else {wire.HEADER_LENGTH: str(json_bytes)}
    reply.start(200, headers, len(body))
    while body:
        into = reply.buffer()
        n = min(len(into), step, len(body))
        into[:n] = body[:n]
        reply.received(n)
        body = body[n:]
    return reply


def receive(body: bytes, json_bytes: int | None, step: int = 1 << 20) -> Tensors:
    reply = feed(Tensors(), body, json_bytes, step)
    reply.finish()
    return reply


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("version", [7, 77, 777, 7777])  # JSON of each length modulo 4
def test_an_answer_is_received_into_its_arrays(version: int, step: int) -> None:
    outputs = {
        "found": np.array([True, False, True]),
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "none": np.empty((0, 4), np.float16),
        "b": np.ones((2, 2), np.float32),
    }
    reply = receive(*laid_out(outputs, version), step)
    assert reply.version == version
    assert reply.outputs.keys() == outputs.keys()
    for name, expected in outputs.items():
        array = reply.outputs[name]
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == expected.dtype
        assert array.flags.aligned
        assert array.flags.writeable


def test_an_answer_goes_straight_to_its_place_in_the_whole() -> None:
    whole = np.zeros((5, 2), np.float32)
    reply = feed(Tensors(lambda name, shape, dtype: whole[1:3]), *laid_out({"a": np.ones((2, 2), np.float32)}))
    np.testing.assert_array_equal(whole[:, 0], [0, 1, 1, 0, 0])
    reply.finish()
    assert np.shares_memory(reply.outputs["a"], whole)


def test_a_second_copy_of_an_answer_writes_only_once_it_counts() -> None:
    whole = np.zeros((2, 2), np.float32)
    body, length = laid_out({"a": np.ones((2, 2), np.float32)})
    reply = feed(Tensors(lambda name, shape, dtype: whole, direct=False), body, length)
    assert not whole.any()
    reply.finish()
    assert whole.all()


def test_labels_and_numbers_in_json_are_arrays_too() -> None:
    labels = b"\x02\0\0\0ab\0\0\0\0"
    described = [
        {"name": "label", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(labels)}},
        {"name": "n", "datatype": "INT32", "shape": [2], "data": [1, 2]},
    ]
    header = json.dumps({"outputs": described}).encode()
    reply = receive(header + labels, len(header))
    assert reply.outputs["label"].tolist() == [b"ab", b""]
    np.testing.assert_array_equal(reply.outputs["n"], np.array([1, 2], np.int32))
    assert reply.version is None
    assert receive(json.dumps({"outputs": described[1:]}).encode(), None).outputs["n"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda body, length: (body, length - 1),
        lambda body, length: (body, len(body) + 1),
        lambda body, length: (body[:-1], length),
        lambda body, length: (body + b"x", length),
        lambda body, length: (body.replace(b"FP32", b"FP99"), length),
        lambda body, length: (body.replace(b"[2, 2]", b"[2, 3]"), length),
        lambda body, length: (body.replace(b"[2, 2]", b"[-2, -2]"), length + 2),
        lambda body, length: (body.replace(b"[2, 2]", b"[2.0, 2]"), length + 2),
        lambda body, length: (body.replace(b": 16}", b": -16}"), length + 1),
        lambda body, length: (body.replace(b'"FP32", "shape": [2, 2]', b'"BYTES", "shape": [-1]'), length - 1),
        lambda body, length: (
            body.replace(b"[2, 2]", b"[0, 999999999999, 999999999999]").replace(b": 16}", b": 0}")[:-16],
            length + 23,
        ),
        lambda body, length: (b"", 0),
        lambda body, length: (b"[1]", 3),
    ],
)
def test_an_answer_that_is_none_is_an_error_of_ours(change: Any) -> None:
    body, length = change(*laid_out({"a": np.ones((2, 2), np.float32)}))
    with pytest.raises(TierstoreError, match="not one of the Open Inference Protocol"):
        receive(body, length)


# --- keys, and look-ups in parts


@pytest.mark.parametrize(
    ("keys", "datatype", "values"),
    [
        ([1, -2], "INT64", [1, -2]),
        ([2**63], "UINT64", [2**63]),
        ([], "INT64", []),
        (range(3), "INT64", [0, 1, 2]),
        (np.array([1, 2], np.int32), "INT64", [1, 2]),
        (np.array([1, 2], np.uint32), "UINT64", [1, 2]),
        (np.arange(6)[::2], "INT64", [0, 2, 4]),
        ([np.int64(5)], "INT64", [5]),
        (pa.array([1, 2], pa.int64()), "INT64", [1, 2]),
        (pa.chunked_array([[1], [2]]), "INT64", [1, 2]),
    ],
)
def test_integer_keys_of_any_kind_are_accepted(keys: Any, datatype: str, values: list[int]) -> None:
    (tensor,) = Batch.of("f", keys).inputs()
    assert (tensor.datatype, tensor.shape) == (datatype, (len(values),))
    assert np.frombuffer(tensor.data, np.int64 if datatype == "INT64" else np.uint64).tolist() == values


@pytest.mark.parametrize(
    "keys", [["a", "bc"], ["a", b"bc"], np.array(["a", "bc"]), np.array(["a", "bc"], object), pa.array(["a", "bc"])]
)
def test_string_keys_of_any_kind_are_accepted(keys: Any) -> None:
    (tensor,) = Batch.of("f", keys).inputs()
    assert (tensor.datatype, tensor.shape, bytes(tensor.data)) == ("BYTES", (2,), b"\x01\0\0\0a\x02\0\0\0bc")


@pytest.mark.parametrize(
    "keys",
    [
        "abc",
        b"abc",
        [1.5],
        [True],
        [1, "a"],
        [2**64],
        [-1, 2**63],
        np.array([1.5]),
        np.array([[1]]),
        pa.array([1, None]),
    ],
)
def test_keys_of_no_kind_are_refused_before_anything_is_sent(keys: Any) -> None:
    with pytest.raises(InvalidInput):
        Batch.of("f", keys)


@pytest.mark.parametrize("offsets", [[1], [0, 2, 1], [0, 4], [], [[0]], [0.5], [-1]])
def test_offsets_that_are_none_are_refused(offsets: Any) -> None:
    with pytest.raises(InvalidInput, match="offsets"):
        Batch.of("f", [1, 2, 3], offsets)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 12), st.booleans())
def test_parts_make_up_the_whole_and_never_cut_a_bag(sizes: list[int], most: int, weighted: bool) -> None:
    n = sum(sizes)
    offsets = np.cumsum([0, *sizes])[:-1]
    whole = Batch.of("f", np.arange(n), offsets, np.arange(n) / 2 if weighted else None)
    parts = split_batch(whole, most)
    bags, weights = [], []
    for part in parts:
        assert part.offsets is not None
        assert part.n <= most or len(part.offsets) == 1
        ends = [*part.offsets[1:], part.n]
        bags += [part.keys[begin:end].tolist() for begin, end in zip(part.offsets, ends, strict=True)]
        weights += [] if part.weights is None else part.weights.tolist()
    assert bags == [list(range(end - size, end)) for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True)]
    assert weights == ([i / 2 for i in range(n)] if weighted else [])


@given(st.integers(0, 40), st.integers(1, 12))
def test_parts_of_plain_keys_are_full_but_the_last(n: int, most: int) -> None:
    parts = split_batch(Batch.of("f", np.arange(n)), most)
    assert np.concatenate([part.keys for part in parts]).tolist() == list(range(n))
    assert all(part.n == most for part in parts[:-1])


# --- refusals


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind"),
    [
        (400, {}, {"error": "e"}, InvalidInput),
        (400, {"Retry-After": "1"}, {"error": "e"}, NotReady),
        (422, {}, {"detail": "e"}, InvalidInput),
        (401, {}, {"detail": "e"}, Unauthorized),
        (403, {}, {"detail": "e"}, Forbidden),
        (404, {}, {"error": "e"}, NotFound),
        (409, {}, {"detail": "e"}, Conflict),
        (409, {}, {"detail": "e", "expected_seq": 5}, SequenceGap),
        (413, {}, {"detail": "e"}, TooLarge),
        (429, {"Retry-After": "2"}, {"detail": "e"}, Overloaded),
        (503, {"Retry-After": "2"}, {"error": "e"}, Overloaded),
        (503, {}, {"error": "e"}, NotReady),
        (500, {}, {"error": "e"}, TierstoreError),
        (502, {}, {"error": "e"}, Unreachable),
        (504, {}, {"error": "e"}, DeadlineExceeded),
    ],
)
def test_a_refusal_comes_back_as_the_error_it_was(
    status: int, headers: dict[str, str], body: dict[str, Any], kind: type[TierstoreError]
) -> None:
    error = error_of(status, {name.lower(): value for name, value in headers.items()}, json.dumps(body).encode())
    assert type(error) is kind
    assert "e" in str(error)
    if isinstance(error, SequenceGap):
        assert error.expected_seq == 5
    if isinstance(error, Overloaded):
        assert error.retry_after_s == 2.0


@pytest.mark.parametrize(
    "value", ["inf", "nan", "1e400", "-1", "\xb2", "1_0", "Wed, 21 Oct 2026 07:28:00 GMT", "1, 2", ""]
)
def test_a_retry_after_that_is_no_number_of_seconds_is_one_second(value: str) -> None:
    error = error_of(503, {"retry-after": value}, b"")
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1.0


@pytest.mark.parametrize("length", ["\xb2", "-1", "+5", "1_0", "9" * 5000])
def test_a_length_of_the_json_that_is_no_number_is_an_error_of_ours(length: str) -> None:
    with pytest.raises(TierstoreError, match="not one of the Open Inference Protocol"):
        Tensors().start(200, {wire.HEADER_LENGTH: length}, 100)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b"\xff", b'{"detail": [{"msg": "x"}]}'])
def test_a_refusal_that_says_nothing_is_an_error_all_the_same(body: bytes) -> None:
    assert str(error_of(404, {}, body))
