"""The client's own work: tensors as bytes, look-ups in parts, refusals turned back into errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import serialize_byte_tensor

from tierstore.client import Client, batches, sync, wire
from tierstore.client.transport import error_of
from tierstore.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    SequenceGap,
    SnapshotError,
    TierstoreError,
    TooLarge,
    Unreachable,
)

# --- tensors as bytes


@given(st.lists(st.text(max_size=20), max_size=50), st.integers(0, 3))
def test_strings_travel_as_the_protocols_own_client_sends_them(texts: list[str], skipped: int) -> None:
    array = pa.array(["skipped"] * skipped + texts, pa.large_string())[skipped:]
    tensor = wire.strings("user", array)
    expected = serialize_byte_tensor(np.array([text.encode() for text in texts], object))
    assert bytes(tensor.data) == (expected.item() if texts else b"")
    assert (tensor.datatype, tensor.shape) == ("BYTES", (len(texts),))


def test_a_request_is_its_header_and_then_its_tensors_in_order() -> None:
    keys, offsets = np.array([1, -1, 2**62]), np.array([0, 1])
    headers, body = wire.request(
        [wire.numbers("a", keys), wire.numbers("a.offsets", offsets)], [wire.Output("a", {"dtype": "FP16"})]
    )
    length = int(headers[wire.HEADER_LENGTH])
    header = json.loads(body[:length])
    assert [(i["name"], i["datatype"], i["shape"], i["parameters"]["binary_data_size"]) for i in header["inputs"]] == [
        ("a", "INT64", [3], 24),
        ("a.offsets", "INT64", [2], 16),
    ]
    assert header["outputs"] == [{"name": "a", "parameters": {"binary_data": True, "dtype": "FP16"}}]
    assert body[length:] == keys.tobytes() + offsets.tobytes()


def laid_out(outputs: dict[str, np.ndarray], version: int = 7) -> tuple[np.ndarray, int]:
    """An answer as a service sends it, received into a buffer of ours; and the length of its header."""
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
    body = header + b"".join(a.tobytes() for a in outputs.values())
    memory = wire.buffer(len(body), len(header))
    memory[:] = np.frombuffer(body, np.uint8)
    return memory, len(header)


@pytest.mark.parametrize("version", [7, 77, 777, 7777])  # headers of each length modulo 4
def test_an_answer_is_read_without_a_copy(version: int) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = np.array([True, False, True])
    memory, length = laid_out({"a": rows, "a.found": found}, version)
    answer = wire.answer(memory, length)
    assert answer.version == version
    for name, expected in (("a", rows), ("a.found", found)):
        array = answer.outputs[name]
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == expected.dtype
        assert np.shares_memory(array, memory)
        assert array.flags.aligned
        assert array.flags.writeable


def test_a_tensor_that_lies_askew_is_aligned_by_a_copy() -> None:
    memory, length = laid_out({"b": np.array([True]), "a": np.ones((2, 2), np.float32)})
    array = wire.answer(memory, length).outputs["a"]
    assert array.flags.aligned
    np.testing.assert_array_equal(array, np.ones((2, 2), np.float32))


@pytest.mark.parametrize("cut", [1, 8, 40, 90])
def test_an_answer_that_is_cut_is_an_error_of_ours(cut: int) -> None:
    memory, length = laid_out({"a": np.ones((2, 2), np.float32)})
    with pytest.raises(TierstoreError, match="not one of the Open Inference Protocol"):
        wire.answer(memory[:-cut], min(length, len(memory) - cut))


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
def test_integer_keys_of_any_kind_are_taken(keys: Any, datatype: str, values: list[int]) -> None:
    (tensor,) = batches.Batch.of("f", keys).inputs()
    assert (tensor.datatype, tensor.shape) == (datatype, (len(values),))
    assert np.frombuffer(tensor.data, np.int64 if datatype == "INT64" else np.uint64).tolist() == values


@pytest.mark.parametrize(
    "keys", [["a", "bc"], ["a", b"bc"], np.array(["a", "bc"]), np.array(["a", "bc"], object), pa.array(["a", "bc"])]
)
def test_string_keys_of_any_kind_are_taken(keys: Any) -> None:
    (tensor,) = batches.Batch.of("f", keys).inputs()
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
        batches.Batch.of("f", keys)


@pytest.mark.parametrize("offsets", [[1], [0, 2, 1], [0, 4], [], [[0]], [0.5], [-1]])
def test_offsets_that_are_none_are_refused(offsets: Any) -> None:
    with pytest.raises(InvalidInput, match="offsets"):
        batches.Batch.of("f", [1, 2, 3], offsets)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 12), st.booleans())
def test_parts_make_up_the_whole_and_never_cut_a_bag(sizes: list[int], most: int, weighted: bool) -> None:
    n = sum(sizes)
    offsets = np.cumsum([0, *sizes])[:-1]
    whole = batches.Batch.of("f", np.arange(n), offsets, np.arange(n) / 2 if weighted else None)
    parts = batches.split(whole, most)
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
    parts = batches.split(batches.Batch.of("f", np.arange(n)), most)
    assert np.concatenate([part.keys for part in parts]).tolist() == list(range(n))
    assert all(part.n == most for part in parts[:-1])


# --- a service that is scripted, for what a real one does not do on demand

Handler = Callable[[httpx.Request], httpx.Response]


def scripted(handler: Handler) -> Client:
    client = Client("http://127.0.0.1:8000")
    client._transport._http = httpx.Client(base_url="http://127.0.0.1:8000", transport=httpx.MockTransport(handler))
    return client


def doubling(request: httpx.Request, version: int) -> httpx.Response:
    """Answer each INT64 key with itself, twice, as its row."""
    length = int(request.headers[wire.HEADER_LENGTH])
    keys = np.frombuffer(request.content[length:], np.int64)
    memory, header = laid_out({"f": np.repeat(keys[:, None], 2, axis=1).astype(np.float32)}, version)
    body = memory.tobytes()
    return httpx.Response(
        200, stream=httpx.ByteStream(body), headers={wire.HEADER_LENGTH: str(header), "Content-Length": str(len(body))}
    )


def test_a_large_lookup_goes_out_in_parts_and_comes_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "SPLIT_KEYS", 10)
    asked = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return doubling(request, version=1)

    with scripted(handler) as client:
        rows = client.model("m").lookup("f", np.arange(95))
    np.testing.assert_array_equal(rows, np.repeat(np.arange(95)[:, None], 2, axis=1))
    assert asked == ["/v2/models/m/infer"] * 10


def test_parts_of_two_versions_are_never_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "SPLIT_KEYS", 10)
    calls = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return doubling(request, version=1 if len(calls) < 3 else 2)  # the switch falls amid the first four

    with scripted(handler) as client:
        assert len(client.model("m").lookup("f", np.arange(40))) == 40
    assert len(calls) == 8

    def restless(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return doubling(request, version=len(calls))

    with scripted(restless) as client, pytest.raises(NotReady, match="changed its version"):
        client.model("m").lookup("f", np.arange(40))


def test_a_refused_lookup_of_a_model_that_does_not_serve_is_not_ready() -> None:
    def handler(ready: bool) -> Handler:
        def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/ready"):
                return httpx.Response(200 if ready else 400)
            return httpx.Response(400, json={"error": "no"})

        return answer

    with scripted(handler(ready=False)) as client, pytest.raises(NotReady, match="no"):
        client.lookup("m", "f", [1])
    with scripted(handler(ready=True)) as client, pytest.raises(InvalidInput, match="no"):
        client.lookup("m", "f", [1])


def test_a_load_is_followed_to_its_end() -> None:
    documents = iter(
        [
            {"state": "running", "phase": "queued", "done": 0, "total": 0},
            {"state": "running", "phase": "read", "done": 5, "total": 10},
            {"state": "running", "phase": "read", "done": 5, "total": 10},
            {"state": "done", "phase": "warm", "done": 10, "total": 10, "version": 3},
        ]
    )

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            assert request.url.path == "/admin/models/ctr/snapshots"
            assert json.loads(request.content) == {"source": "s3://x/1", "activate": False}
            return httpx.Response(202, json={"job": "j1"})
        assert request.url.path == "/admin/jobs/j1"
        return httpx.Response(200, json=next(documents))

    seen = []
    with scripted(handler) as client:
        assert client.load_snapshot("s3://x/1", model="ctr", activate=False, progress=seen.append) == 3
    assert [(p.phase, p.done) for p in seen] == [("queued", 0), ("read", 5), ("warm", 10)]


def test_a_load_that_fails_is_a_snapshot_error() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return (
            httpx.Response(202, json={"job": "j"})
            if request.method == "POST"
            else httpx.Response(200, json={"state": "failed", "error": "row 3"})
        )

    with scripted(handler) as client, pytest.raises(SnapshotError, match="row 3"):
        client.load_snapshot("s", model="ctr")


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind"),
    [
        (400, {}, {"error": "e"}, InvalidInput),
        (422, {}, {"detail": "e"}, InvalidInput),
        (401, {}, {"detail": "e"}, Forbidden),
        (403, {}, {"detail": "e"}, Forbidden),
        (404, {}, {"error": "e"}, NotFound),
        (409, {}, {"detail": "e"}, Conflict),
        (409, {}, {"detail": "e", "expected_seq": 5}, SequenceGap),
        (413, {}, {"detail": "e"}, TooLarge),
        (429, {"Retry-After": "2"}, {"detail": "e"}, Overloaded),
        (503, {"Retry-After": "2"}, {"error": "e"}, Overloaded),
        (503, {}, {"error": "e"}, NotReady),
        (500, {}, {"error": "e"}, TierstoreError),
    ],
)
def test_a_refusal_comes_back_as_the_error_it_was(
    status: int, headers: dict[str, str], body: dict[str, Any], kind: type[TierstoreError]
) -> None:
    error = error_of(status, httpx.Headers(headers), json.dumps(body).encode())
    assert type(error) is kind
    assert "e" in str(error)
    if isinstance(error, SequenceGap):
        assert error.expected_seq == 5
    if isinstance(error, Overloaded):
        assert error.retry_after_s == 2.0


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b"\xff", b'{"detail": [{"msg": "x"}]}'])
def test_a_refusal_that_says_nothing_is_an_error_all_the_same(body: bytes) -> None:
    assert str(error_of(404, {}, body))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "127.0.0.1", "http://[::1"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"http://127\.0\.0\.1:8000"):
        Client(url)


def test_no_service_is_unreachable() -> None:
    with Client("http://127.0.0.1:1") as client:
        for attempt in (client.ready, client.status, lambda: client.lookup("m", "f", [1])):
            with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
                attempt()
