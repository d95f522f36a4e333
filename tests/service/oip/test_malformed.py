"""Requests whose JSON or tensors are wrong are told what with a 4xx, and the server goes on: by hand (`tools/fuzz.py` tries what nobody thought of)."""

from __future__ import annotations

import gzip
import json
import struct
from typing import Any

import httpx
import numpy as np
import pytest

from tests.service.fake_store import ITEMS, USERS
from tests.service.scenes import rows
from tierstore.errors import InvalidInput
from tierstore.service.protocols.oip.json_request import parse_request

INFER = "/v2/models/ctr/infer"
HEADER_LENGTH = "Inference-Header-Content-Length"


def infer(http: httpx.Client, document: Any, tail: bytes = b"", path: str = INFER, **headers: str) -> httpx.Response:
    """A request of JSON, and of a binary part where `tail` is given."""
    head = document if isinstance(document, bytes) else json.dumps(document).encode()
    if tail:
        headers.setdefault(HEADER_LENGTH, str(len(head)))
    return http.post(path, content=head + tail, headers=headers)


def given_input(
    name: str = "item_id", datatype: str = "INT64", shape: Any = (2,), data: Any = (1, 2), **more: Any
) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data} | more


def refused(response: httpx.Response, status: int, *words: str) -> None:
    assert response.status_code == status, response.text
    message = response.json()["error"]
    for word in words:
        assert word in message, message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (b"", ["not valid JSON"]),
        (b"{", ["not valid JSON"]),
        (b"\xff\xfe", ["not valid JSON"]),
        (b"[" * 5000, ["not valid JSON"]),
        ([], ["JSON object"]),
        ({}, ["inputs"]),
        ({"inputs": {}}, ["inputs"]),
        ({"inputs": []}, ["no inputs", "item_id"]),
        ({"inputs": [1]}, ["list of objects"]),
        ({"inputs": [{}]}, ["needs a name"]),
        ({"inputs": [given_input(name=3)]}, ["needs a name"]),
        ({"inputs": [given_input()], "id": 5}, ["id"]),
        ({"inputs": [given_input()], "parameters": []}, ["parameters"]),
        ({"inputs": [given_input()], "parameters": {"binary_data_output": "yes"}}, ["binary_data_output"]),
        ({"inputs": [given_input(), given_input()]}, ["item_id", "twice"]),
        ({"inputs": [given_input(name="x")]}, ["unknown input 'x'", "item_id"]),
        ({"inputs": [given_input(name="x" * 100_000)]}, ["unknown input"]),
        ({"inputs": [given_input(datatype="INT63")]}, ["unknown datatype", "INT64"]),
        ({"inputs": [given_input(datatype=None)]}, ["unknown datatype"]),
        ({"inputs": [given_input(datatype="INT32")]}, ["int64 keys", "INT32"]),
        ({"inputs": [given_input(datatype="BYTES", data=["1", "2"])]}, ["int64 keys", "BYTES"]),
        ({"inputs": [given_input(shape=None)]}, ["shape"]),
        ({"inputs": [given_input(shape=[])]}, ["shape"]),
        ({"inputs": [given_input(shape=[-2])]}, ["0 to"]),
        ({"inputs": [given_input(shape=[2.0])]}, ["0 to"]),
        ({"inputs": [given_input(shape=[True, 2])]}, ["0 to"]),
        ({"inputs": [given_input(shape=["2"])]}, ["0 to"]),
        ({"inputs": [given_input(shape=[3])]}, ["does not match"]),
        ({"inputs": [given_input(shape=[1 << 31, 1 << 31])]}, ["0 to"]),
        ({"inputs": [given_input(shape=[(1 << 31) - 1] * 8)]}, ["does not match"]),
        ({"inputs": [given_input(shape=[1 << 70])]}, ["0 to"]),
        ({"inputs": [given_input(shape=[1] * 9)]}, ["shape"]),
        ({"inputs": [given_input(shape=[1, 2], data=[[1], [2]])]}, ["does not match"]),
        ({"inputs": [given_input(shape=[2, 2], data=[[1, 2], [3]])]}, ["unevenly", "offsets"]),
        ({"inputs": [given_input(shape=[2, 2], data=[[1, 2], 3])]}, ["unevenly"]),
        ({"inputs": [given_input(data=[[1, 2]])]}, ["nested deeper"]),
        ({"inputs": [given_input(data=None)]}, ["as a list"]),
        ({"inputs": [given_input(data="ab")]}, ["as a list"]),
        ({"inputs": [given_input(data=[1, 2.5])]}, ["holds float"]),
        ({"inputs": [given_input(data=[1, True])]}, ["holds bool"]),
        ({"inputs": [given_input(data=[1, None])]}, ["holds NoneType"]),
        ({"inputs": [given_input(data=["1", {}])]}, ["holds dict, str"]),
        ({"inputs": [given_input(data=[1, 1 << 63])]}, ["INT64"]),
        ({"inputs": [given_input(data=[1, 1 << 64])]}, ["element 1", "does not fit INT64"]),
        ({"inputs": [given_input(data=[1, -(1 << 63) - 1])]}, ["element 1", "does not fit INT64"]),
        ({"inputs": [given_input(name="big", datatype="UINT64", data=[1, 1 << 64])]}, ["does not fit UINT64"]),
        ({"inputs": [given_input(datatype="UINT64", data=[1, 1 << 63])]}, ["int64"]),
        ({"inputs": [given_input(name="big", datatype="UINT64", data=[1, -1])]}, ["UINT64"]),
        ({"inputs": [given_input(name="big", data=[1, -1])]}, ["uint64"]),
        ({"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [2]}]}, ["neither data nor"]),
        ({"inputs": [given_input(parameters={"binary_data_size": 16})]}, ["both data and"]),
        ({"inputs": [given_input(parameters=3)]}, ["parameters"]),
        ({"inputs": [given_input()], "outputs": {}}, ["outputs"]),
        ({"inputs": [given_input()], "outputs": [{}]}, ["needs a name"]),
        ({"inputs": [given_input()], "outputs": [{"name": "item_id"}] * 2}, ["twice"]),
        ({"inputs": [given_input()], "outputs": [{"name": "item_id.offsets"}]}, ["unknown output"]),
        ({"inputs": [given_input()], "outputs": [{"name": "item_id", "parameters": {"dtype": 16}}]}, ["FP16"]),
        (
            {"inputs": [given_input()], "outputs": [{"name": "item_id", "parameters": {"binary_data": 1}}]},
            ["binary_data"],
        ),
    ],
)
def test_the_error_of_a_malformed_request_says_what_is_wrong(
    http: httpx.Client, document: Any, words: list[str]
) -> None:
    refused(infer(http, document), 400, *words)


def test_datatypes_of_the_parts_of_a_bag(http: httpx.Client) -> None:
    for part, words in (
        ({"name": "clicked.offsets", "shape": [1], "data": [0], "datatype": "INT32"}, ["INT64"]),
        ({"name": "clicked.weights", "shape": [2], "data": [0, 1], "datatype": "FP64"}, ["FP32"]),
        ({"name": "clicked.weights", "shape": [2], "data": [0, 1e300], "datatype": "FP32"}, ["element 1", "1e+300"]),
    ):
        refused(infer(http, {"inputs": [given_input(name="clicked"), part]}), 400, part["name"], *words)


def binary_input(size: Any, name: str = "item_id", datatype: str = "INT64", shape: Any = (2,)) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}]}


TWO = struct.pack("<2q", 1, 2)


@pytest.mark.parametrize(
    ("document", "tail", "headers", "words"),
    [
        (binary_input(16), b"", {}, [HEADER_LENGTH, "missing"]),
        (binary_input(16), TWO, {HEADER_LENGTH: "99999"}, [HEADER_LENGTH]),
        (binary_input(16), TWO, {HEADER_LENGTH: "-1"}, [HEADER_LENGTH]),
        (binary_input(16), TWO, {HEADER_LENGTH: "1e2"}, [HEADER_LENGTH]),
        (binary_input(16), TWO, {HEADER_LENGTH: "9" * 30}, [HEADER_LENGTH]),
        (binary_input(16), TWO, {HEADER_LENGTH: "20"}, ["not valid JSON"]),
        (binary_input(24), TWO, {}, ["16 bytes are left"]),
        (binary_input(8), TWO, {}, ["takes 16 bytes, got 8"]),
        (binary_input(16), TWO + b"x", {}, ["the body has 17"]),
        (binary_input(-16), TWO, {}, ["number of bytes"]),
        (binary_input("16"), TWO, {}, ["number of bytes"]),
        (binary_input(1 << 80), TWO, {}, ["number of bytes"]),
        (binary_input(1 << 62), TWO, {}, ["are left"]),
        (binary_input(16, shape=[(1 << 31) - 1] * 2), TWO, {}, ["takes"]),
        (binary_input(6, "user", "BYTES", [1]), struct.pack("<I", 3) + b"ab", {}, ["malformed BYTES"]),
        (binary_input(6, "user", "BYTES", [1]), struct.pack("<I", 1) + b"ab", {}, ["malformed BYTES"]),
        (binary_input(6, "user", "BYTES", [2]), struct.pack("<I", 2) + b"ab", {}, ["malformed BYTES"]),
        (binary_input(4, "user", "BYTES", [1]), b"\xff\xff\xff\xff", {}, ["malformed BYTES"]),
        (binary_input(6, "user", "BYTES", [1]), struct.pack("<I", 2) + b"\xff\xfe", {}, ["UTF-8"]),
    ],
)
def test_a_malformed_binary_part(
    http: httpx.Client, document: Any, tail: bytes, headers: dict[str, str], words: list[str]
) -> None:
    refused(infer(http, document, tail, **headers), 400, *words)


def test_an_element_may_not_grow_into_its_neighbours(http: httpx.Client) -> None:
    # the first element claims what belongs to the nine behind it
    tail = struct.pack("<I", 96) + bytes(96)
    refused(infer(http, binary_input(100, "user", "BYTES", [10]), tail), 400, "malformed BYTES")


def test_a_raw_body_is_the_keys_of_a_models_only_feature(http: httpx.Client) -> None:
    answer = http.post("/v2/models/one/infer", content=TWO, headers={HEADER_LENGTH: "0"})
    assert answer.status_code == 200, answer.text
    split = int(answer.headers[HEADER_LENGTH])
    document = json.loads(answer.content[:split])
    assert document["outputs"] == [
        {"name": "item_id", "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": 32}}
    ]
    np.testing.assert_array_equal(
        np.frombuffer(answer.content[split:], np.float32).reshape(2, 4), rows("item", [ITEMS[1], ITEMS[2]])
    )
    answer = http.post("/v2/models/names/infer", content=b"u7", headers={HEADER_LENGTH: "0"})
    np.testing.assert_array_equal(np.frombuffer(answer.content[-32:], np.float32), rows("user", [USERS["u7"]])[0])
    refused(http.post("/v2/models/one/infer", content=TWO[:-1], headers={HEADER_LENGTH: "0"}), 400, "multiple of 8")
    refused(http.post(INFER, content=TWO, headers={HEADER_LENGTH: "0"}), 400, "exactly one input")


def test_null_beside_the_bytes_of_an_empty_batch_is_no_data(http: httpx.Client) -> None:
    """As KServe's client sends it."""
    header = json.dumps(
        {"inputs": [given_input(shape=[0], data=None, parameters={"binary_data_size": 0})]}, separators=(",", ":")
    ).encode()
    answer = http.post(INFER, content=header, headers={HEADER_LENGTH: str(len(header))})
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["shape"] == [0, 4]


def test_bodies_and_answers_have_bounds(http: httpx.Client) -> None:
    refused(http.post(INFER, content=b"x" * ((1 << 20) + 1)), 413, "1048576")
    refused(http.post(INFER, content=iter([b"x" * (1 << 19)] * 3)), 413, "1048576")
    for feature, shape in (("clicked", [1 << 30, 0]), ("clicked", [(1 << 31) - 1, 0])):
        refused(infer(http, {"inputs": [given_input(name=feature, shape=shape, data=[])]}), 413, "split it")
    flat = json.dumps({"inputs": [given_input(shape=[530_000], data=[1] * 530_000)]}, separators=(",", ":")).encode()
    refused(
        http.post(INFER, content=gzip.compress(flat, mtime=0), headers={"Content-Encoding": "gzip"}),
        413,
        "decoded body",
    )
    # rows that are held only to be pooled count as well: 16 bytes each, of 8 MiB
    many = json.dumps(
        {"inputs": [given_input("clicked", shape=[1, 500_000], data=[1] * 500_000)]}, separators=(",", ":")
    ).encode()
    assert infer(http, many).status_code == 200
    keys = gzip.compress(
        json.dumps(
            {"inputs": [given_input(name, shape=[1, 260_000], data=[1] * 260_000) for name in ("item_id", "clicked")]}
        ).encode()
    )
    assert infer(http, keys, **{"Content-Encoding": "gzip"}).status_code == 413


def test_json_answers_hold_flat_lists(http: httpx.Client) -> None:
    nested = given_input(name="clicked", shape=[2, 2], data=[[1, 2], [3, 4]])
    answer = infer(
        http,
        {
            "id": "",
            "inputs": [nested],
            "outputs": [{"name": "clicked.found"}, {"name": "clicked", "parameters": {"dtype": "FP16"}}],
        },
    )
    assert answer.status_code == 200, answer.text
    document = answer.json()
    assert document["id"] == ""
    assert document["outputs"][0] == {"name": "clicked.found", "datatype": "BOOL", "shape": [2, 2], "data": [True] * 4}
    assert document["outputs"][1]["data"] == [1.5, 3.0, 4.5, 6.0, 3.5, 7.0, 10.5, 14.0]
    assert answer.headers["content-type"] == "application/json"


def test_repository_requests_check_their_body(http: httpx.Client) -> None:
    assert http.post("/v2/repository/index").status_code == 200
    assert http.post("/v2/repository/index", json={"ready": True}).status_code == 200
    refused(http.post("/v2/repository/index", content=b"{"), 400, "not valid JSON")
    refused(http.post("/v2/repository/index", json=[]), 400, "JSON object")
    refused(http.post("/v2/repository/models/ctr/load", json={"parameters": 1}), 400, "parameters")
    refused(
        http.post("/v2/repository/models/ctr/load", json={"parameters": {"file:1/model.onnx": "AAAA"}}),
        400,
        "overridden",
    )
    refused(http.post("/v2/repository/index", content=b"[" + b"0," * (1 << 19) + b"0]"), 413)


@pytest.mark.parametrize(
    ("datatype", "data", "words"),
    [
        ("FP32", "[1, 1e39]", ["1e+39", "element 1", "FP32"]),
        ("FP32", "[[1, 2], [3, -3.5e38]]", ["-3.5e+38", "element [1, 1]", "FP32"]),
        # the first that rounds to no number
        ("FP32", "[1, 340282356779733661637539395458142568448]", ["3.4028", "element 1"]),
        ("FP16", "[65520, 1]", ["65520", "element 0", "FP16"]),
        ("FP64", "[0, 1%s]" % ("0" * 400), ["element 1|JSON", "FP64|number"]),
        ("INT8", "[1, 128]", ["128", "element 1", "INT8"]),
        ("INT8", "[[1], [-129]]", ["-129", "element [1, 0]", "INT8"]),
        ("UINT8", "[-1, 0]", ["-1", "element 0", "UINT8"]),
        ("UINT64", "[0, 18446744073709551616]", ["1.8446744073709552e+19|18446744073709551616"]),
        ("INT64", "[9223372036854775808, 0]", ["9223372036854775808", "element 0", "INT64"]),
    ],
)
def test_a_number_beyond_its_datatype_is_refused_by_name_and_place(datatype: str, data: str, words: list[str]) -> None:
    shape = [2, 2] if "2], [" in data else [2, 1] if "], [" in data else [2]
    text = f'{{"inputs": [{{"name": "hour", "datatype": "{datatype}", "shape": {shape}, "data": {data}}}]}}'
    with pytest.raises(InvalidInput) as caught:
        parse_request(memoryview(text.encode()), None)
    for word in words:
        assert any(one in str(caught.value) for one in word.split("|")), str(caught.value)


@pytest.mark.parametrize(
    ("datatype", "number"),
    [
        ("FP32", 3.4028235e38),
        ("FP32", 340282356779733623858607532500980858880),
        ("FP16", 65519),
        ("FP64", 1.7e308),
        ("FP32", 1e-60),
    ],
)
def test_the_largest_numbers_of_a_datatype_are_taken(datatype: str, number: float) -> None:
    text = json.dumps({"inputs": [{"name": "hour", "datatype": datatype, "shape": [1], "data": [number]}]})
    (source,) = parse_request(memoryview(text.encode()), None).sources
    assert np.isfinite(source.elements).all()  # type: ignore[union-attr]
