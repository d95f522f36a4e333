"""Unchanged clients of the protocol get the rows of a real store: tritonclient over HTTP, blocking and asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tierstore.service.server import ServerThread

from .fake_store import DEFAULT, ITEMS, USERS, VERSION
from .scenes import rows

LOW, HIGH = -(1 << 63), (1 << 63) - 1


@pytest.fixture
def client(server: ServerThread) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


def tensor(name: str, array: np.ndarray, datatype: str, *, binary: bool = True) -> triton.InferInput:
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def wanted(name: str, *, binary: bool = True, **parameters: Any) -> triton.InferRequestedOutput:
    output = triton.InferRequestedOutput(name, binary_data=binary)
    output._parameters.update(parameters)  # the client has no argument for parameters of its own
    return output


def items(keys: np.ndarray) -> np.ndarray:
    return rows("item", [ITEMS.get(int(key), DEFAULT) for key in keys.ravel()]).reshape(*keys.shape, 4)


KEYS = np.array([5, 0, 99, 100, LOW, HIGH, -1, 5], np.int64)


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
def test_rows_in_the_order_of_the_keys(client: triton.InferenceServerClient, binary_in: bool, binary_out: bool) -> None:
    answer = client.infer(
        "ctr", [tensor("item_id", KEYS, "INT64", binary=binary_in)], outputs=[wanted("item_id", binary=binary_out)]
    )
    assert answer.as_numpy("item_id").dtype == np.float32
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(KEYS))
    assert answer.get_response()["model_version"] == str(VERSION)


def test_without_outputs_every_given_feature_is_answered(client: triton.InferenceServerClient) -> None:
    users = np.array([b"u1", b"nobody"], object)
    answer = client.infer("ctr", [tensor("item_id", KEYS, "INT64"), tensor("user", users, "BYTES")], request_id="r-7")
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["item_id", "user"]
    assert answer.get_response()["id"] == "r-7"
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(KEYS))
    np.testing.assert_array_equal(answer.as_numpy("user"), rows("user", [USERS["u1"], 0.0]))


@pytest.mark.parametrize("binary", [True, False])
def test_string_keys(client: triton.InferenceServerClient, binary: bool) -> None:
    keys = ["u3", "", "λ", "u3", "missing", "u49"]
    array = np.array([key.encode() for key in keys], object)
    answer = client.infer(
        "ctr", [tensor("user", array, "BYTES", binary=binary)], outputs=[wanted("user"), wanted("user.found")]
    )
    np.testing.assert_array_equal(answer.as_numpy("user"), rows("user", [USERS.get(key, 0.0) for key in keys]))
    assert answer.as_numpy("user.found").tolist() == [key in USERS for key in keys]


@pytest.mark.parametrize("binary", [True, False])
def test_unsigned_keys(client: triton.InferenceServerClient, binary: bool) -> None:
    keys = np.array([1 << 63, 5, (1 << 64) - 1], np.uint64)
    answer = client.infer("ctr", [tensor("big", keys, "UINT64", binary=binary)])
    np.testing.assert_array_equal(answer.as_numpy("big"), rows("big", [9.0, 5.0, 0.0]))


def test_found_has_the_shape_of_the_keys_and_may_stand_anywhere(client: triton.InferenceServerClient) -> None:
    keys = KEYS[:3].reshape(1, 3)  # three bytes of `found` leave what follows them unaligned
    outputs = [
        wanted("item_id.found"),
        wanted("item_id"),
        wanted("clicked", dtype="FP16"),
        wanted("clicked.found", binary=False),
    ]
    answer = client.infer("ctr", [tensor("item_id", keys, "INT64"), tensor("clicked", keys, "INT64")], outputs=outputs)
    assert answer.as_numpy("item_id.found").tolist() == [[True, True, True]]
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(keys))
    assert answer.as_numpy("clicked").dtype == np.float16
    np.testing.assert_allclose(answer.as_numpy("clicked"), items(keys).mean(1), rtol=1e-3)
    assert answer.as_numpy("clicked.found").tolist() == [[True, True, True]]


def test_found_alone_tells_rows_from_defaults(client: triton.InferenceServerClient) -> None:
    answer = client.infer("ctr", [tensor("clicked", KEYS.reshape(2, 4), "INT64")], outputs=[wanted("clicked.found")])
    assert answer.as_numpy("clicked.found").tolist() == [[True, True, True, False], [True, True, False, True]]


@pytest.mark.parametrize(("dtype", "numpy"), [("FP16", np.float16), ("FP32", np.float32)])
def test_a_client_chooses_the_datatype(client: triton.InferenceServerClient, dtype: str, numpy: type) -> None:
    answer = client.infer("ctr", [tensor("item_id", KEYS, "INT64")], outputs=[wanted("item_id", dtype=dtype)])
    assert answer.as_numpy("item_id").dtype == numpy
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(KEYS).astype(numpy))


def test_rows_of_a_batch_are_pooled(client: triton.InferenceServerClient) -> None:
    keys = np.array([[1, 2, 3], [4, 100, 6]], np.int64)
    answer = client.infer("ctr", [tensor("clicked", keys, "INT64")])
    np.testing.assert_allclose(answer.as_numpy("clicked"), items(keys).mean(1), rtol=1e-6)


def test_ragged_bags_with_weights(client: triton.InferenceServerClient) -> None:
    keys, offsets = np.array([1, 2, 3, 4], np.int64), np.array([0, 3, 3], np.int64)
    weights = np.array([1, 2, 1, 5], np.float32)
    answer = client.infer(
        "ctr",
        [
            tensor("clicked.offsets", offsets, "INT64"),
            tensor("clicked.weights", weights, "FP32"),
            tensor("clicked", keys, "INT64"),
        ],
    )
    expected = np.stack([(items(keys[:3]) * weights[:3, None]).sum(0) / 4, np.zeros(4), items(keys[3:])[0]])
    np.testing.assert_allclose(answer.as_numpy("clicked"), expected, rtol=1e-6)


def test_a_request_may_name_the_combiner(client: triton.InferenceServerClient) -> None:
    keys = np.array([[1, 2, 3], [4, 100, 6]], np.int64)
    inputs = [tensor("clicked", keys, "INT64"), tensor("item_id", keys, "INT64")]
    answer = client.infer("ctr", inputs, outputs=[wanted("clicked", combiner="sum"), wanted("item_id")])
    np.testing.assert_allclose(answer.as_numpy("clicked"), items(keys).sum(1), rtol=1e-6)
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(keys))
    answer = client.infer("ctr", inputs, parameters={"combiner": "sqrtn"})
    for name in ("clicked", "item_id"):
        np.testing.assert_allclose(answer.as_numpy(name), items(keys).sum(1) / np.sqrt(3), rtol=1e-6)
    for outputs, words in (
        ([wanted("clicked", combiner="max")], "sum, mean or sqrtn"),
        ([wanted("clicked", combiner=1)], "expected sum, mean or sqrtn"),
        ([wanted("clicked.found", combiner="sum")], "only a feature's vectors"),
    ):
        with pytest.raises(InferenceServerException, match=words):
            client.infer("ctr", inputs, outputs=outputs)


def test_flat_keys_without_offsets_are_bags_of_one(client: triton.InferenceServerClient) -> None:
    inputs = [tensor("clicked", KEYS, "INT64")]
    np.testing.assert_array_equal(client.infer("ctr", inputs).as_numpy("clicked"), items(KEYS))
    inputs.append(tensor("clicked.weights", np.array([0, *[3] * 7], np.float32), "FP32"))
    expected = np.concatenate([np.zeros((1, 4)), items(KEYS)[1:]])
    np.testing.assert_allclose(client.infer("ctr", inputs).as_numpy("clicked"), expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("feature", ["item_id", "clicked"])
def test_empty_requests_have_empty_answers(
    client: triton.InferenceServerClient, feature: str, shape: tuple[int, ...]
) -> None:
    answer = client.infer("ctr", [tensor(feature, np.empty(shape, np.int64), "INT64")])
    lead = shape if feature == "item_id" else shape[:1]
    assert answer.as_numpy(feature).shape == (*lead, 4)
    assert not answer.as_numpy(feature).any()


@pytest.mark.parametrize("response", [None, "gzip", "deflate"])
@pytest.mark.parametrize("request_coding", [None, "gzip", "deflate"])
def test_compressed_both_ways(
    client: triton.InferenceServerClient, request_coding: str | None, response: str | None
) -> None:
    answer = client.infer(
        "ctr",
        [tensor("item_id", KEYS, "INT64")],
        request_compression_algorithm=request_coding,
        response_compression_algorithm=response,
    )
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(KEYS))


def test_a_large_answer_comes_whole(client: triton.InferenceServerClient) -> None:
    keys = np.arange(100_000, dtype=np.int64) % 120
    answer = client.infer("ctr", [tensor("item_id", keys, "INT64")])
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(keys))


def test_asynchronous_requests_of_one_client(client: triton.InferenceServerClient) -> None:
    pending = [client.async_infer("ctr", [tensor("item_id", KEYS + i, "INT64")]) for i in (0, 1, 2)]
    for i, request in enumerate(pending):
        np.testing.assert_array_equal(request.get_result().as_numpy("item_id"), items(KEYS + i))


def test_the_aio_client(server: ServerThread) -> None:
    async def ask() -> None:
        async with triton_aio.InferenceServerClient(server.url.removeprefix("http://")) as client:
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("ctr")
            inputs = [tensor("item_id", KEYS, "INT64")]
            answers = await asyncio.gather(
                *(
                    client.infer("ctr", inputs, response_compression_algorithm=coding)
                    for coding in (None, "gzip", "deflate")
                ),
                client.infer("ctr", inputs, str(VERSION), request_compression_algorithm="gzip"),
                client.infer("ctr", inputs, outputs=[wanted("item_id", binary=False)]),
            )
            for answer in answers:
                np.testing.assert_array_equal(answer.as_numpy("item_id"), items(KEYS))
            with pytest.raises(InferenceServerException, match="unknown input 'nothing'"):
                await client.infer("ctr", [tensor("nothing", KEYS, "INT64")])

    asyncio.run(ask())


def test_metadata_and_configuration(client: triton.InferenceServerClient) -> None:
    server = client.get_server_metadata()
    assert server["name"] == "tierstore"
    assert {"binary_tensor_data", "model_repository", "statistics"} <= set(server["extensions"])
    model = client.get_model_metadata("ctr", str(VERSION))
    assert model["versions"] == [str(VERSION)]
    assert {"name": "user", "datatype": "BYTES", "shape": [-1]} in model["inputs"]
    assert {"name": "clicked.offsets", "datatype": "INT64", "shape": [-1]} in model["inputs"]
    assert {"name": "item_id", "datatype": "FP32", "shape": [-1, 4]} in model["outputs"]
    assert "not served" in model["parameters"]["dense"]
    config = client.get_model_config("ctr")
    assert config["max_batch_size"] == 0
    assert {"name": "user", "data_type": "TYPE_STRING", "dims": [-1], "optional": True} in config["input"]


def test_statistics_count_what_was_answered(client: triton.InferenceServerClient) -> None:
    def counts() -> dict[str, Any]:
        (model,) = client.get_inference_statistics("one")["model_stats"]
        assert model["inference_count"] == model["inference_stats"]["success"]["count"]
        return model["inference_stats"]

    before = counts()
    client.infer("one", [tensor("item_id", KEYS, "INT64")])
    with pytest.raises(InferenceServerException):
        client.infer("one", [tensor("item_id", KEYS.astype(np.float32), "FP32")])
    after = counts()
    assert after["success"]["count"] - before["success"]["count"] == 1
    assert after["queue"]["count"] - before["queue"]["count"] == 1
    assert after["compute_infer"]["ns"] > before["compute_infer"]["ns"]
    assert after["fail"]["count"] - before["fail"]["count"] == 1
    assert {model["name"] for model in client.get_inference_statistics()["model_stats"]} == {"ctr", "one", "names"}


def test_repository_index(client: triton.InferenceServerClient) -> None:
    index = client.get_model_repository_index()
    assert {"name": "ctr", "version": str(VERSION), "state": "READY"} in index


def test_shared_memory_is_refused_clearly_and_unregistered_gladly(client: triton.InferenceServerClient) -> None:
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    for call in (
        client.get_system_shared_memory_status,
        client.get_cuda_shared_memory_status,
        lambda: client.register_system_shared_memory("region", "/region", 64),
    ):
        with pytest.raises(InferenceServerException, match="shared memory is not enabled"):
            call()
    given = triton.InferInput("item_id", [8], "INT64")
    given.set_shared_memory("region", 64)
    with pytest.raises(InferenceServerException, match="shared memory is not enabled"):
        client.infer("ctr", [given])
    output = triton.InferRequestedOutput("item_id")
    output.set_shared_memory("region", 64)
    with pytest.raises(InferenceServerException, match="shared memory is not enabled"):
        client.infer("ctr", [tensor("item_id", KEYS, "INT64")], outputs=[output])


def test_what_is_not_served_says_so(client: triton.InferenceServerClient) -> None:
    for call in (
        client.get_trace_settings,
        lambda: client.get_trace_settings("ctr"),
        client.get_log_settings,
        lambda: client.update_log_settings({}),
    ):
        with pytest.raises(InferenceServerException, match="extension is not served"):
            call()
    with pytest.raises(InferenceServerException, match="classification extension is not served"):
        client.infer(
            "ctr", [tensor("item_id", KEYS, "INT64")], outputs=[triton.InferRequestedOutput("item_id", class_count=2)]
        )
    with pytest.raises(InferenceServerException, match="dense predictor is not available"):
        client.infer("ctr", [tensor("item_id", KEYS, "INT64")], outputs=[wanted("score")])
    with pytest.raises(InferenceServerException, match="cannot be overridden"):
        client.load_model("ctr", config="{}")


def test_statuses(client: triton.InferenceServerClient) -> None:
    inputs = [tensor("item_id", KEYS, "INT64")]
    for model, version, status in (("nobody", "", "404"), ("ctr", "7", "404"), ("a/../b", "", "404")):
        with pytest.raises(InferenceServerException) as caught:
            client.infer(model, inputs, version)
        assert caught.value.status() == status
    assert not client.is_model_ready("nobody")
    assert not client.is_model_ready("ctr", "7")
