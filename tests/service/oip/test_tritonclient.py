"""What tritonclient does over HTTP alone: codings, its asynchronous clients, documents, errors; `dataplane/test_answers.py` has the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.service.fake_store import VERSION
from tests.service.scenes import KEYS, items
from tests.service.wires import HttpWire
from tierstore.service.server import ServerThread


@pytest.fixture
def client(server: ServerThread) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


tensor, wanted = HttpWire.tensor, HttpWire.wanted


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
    assert "parameters" not in model
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
    assert {"name": "ctr", "version": str(VERSION), "state": "READY", "reason": ""} in index


def test_shared_memory_is_refused_clearly_and_unregistered_gladly(client: triton.InferenceServerClient) -> None:
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    for call in (
        client.get_system_shared_memory_status,
        lambda: client.register_system_shared_memory("region", "/region", 64),
    ):
        with pytest.raises(InferenceServerException, match="shared memory is not enabled"):
            call()
    assert client.get_cuda_shared_memory_status() == []
    with pytest.raises(InferenceServerException, match="CUDA shared memory is not served"):
        client.register_cuda_shared_memory("region", b"aGFuZGxl", 0, 64)
    with pytest.raises(InferenceServerException, match="no CUDA shared memory region"):
        client.get_cuda_shared_memory_status("region")
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
    with pytest.raises(InferenceServerException, match="unknown output 'score'"):
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
