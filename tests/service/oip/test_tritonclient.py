"""What tritonclient does beside plain requests (`dataplane/test_answers.py`), over HTTP and gRPC: codings, asynchronous clients, documents, errors."""

from __future__ import annotations

import asyncio
import importlib
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.service.callers import TritonGrpc, TritonHttp
from tests.service.fake_store import VERSION
from tests.service.scenes import KEYS, items, write_small
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

KINDS = pytest.mark.parametrize("kind", [TritonHttp, TritonGrpc])


@pytest.fixture(params=[TritonHttp, TritonGrpc])
def caller(request: pytest.FixtureRequest, server: ServerThread) -> Iterator[TritonHttp]:
    caller: TritonHttp = request.param(server)
    yield caller
    caller.close()


def is_http(caller: TritonHttp) -> bool:
    return type(caller) is TritonHttp


def document(caller: TritonHttp, name: str, *about: str) -> Any:
    """What a method of the client returns, as JSON."""
    return getattr(caller.client, name)(*about, **({} if is_http(caller) else {"as_json": True}))


@pytest.mark.parametrize("response", [None, "gzip", "deflate"])
@pytest.mark.parametrize("request_coding", [None, "gzip", "deflate"])
def test_compressed_both_ways(server: ServerThread, request_coding: str | None, response: str | None) -> None:
    caller = TritonHttp(server)
    answer = caller.client.infer(
        "ctr",
        [caller.tensor("item_id", KEYS)],
        request_compression_algorithm=request_coding,
        response_compression_algorithm=response,
    )
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(KEYS))
    caller.close()


def test_asynchronous_requests_of_one_client(caller: TritonHttp) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    for i in range(3):
        tensors = [caller.tensor("item_id", KEYS + i)]
        if is_http(caller):
            answers.put((i, caller.client.async_infer("ctr", tensors).get_result()))
        else:
            caller.client.async_infer("ctr", tensors, lambda result, error, i=i: answers.put((i, error or result)))
    for _ in range(3):
        i, answer = answers.get(timeout=60)
        np.testing.assert_array_equal(answer.as_numpy("item_id"), items(KEYS + i))


def test_the_aio_client(caller: TritonHttp) -> None:
    module = importlib.import_module(f"{caller.triton.__name__}.aio")

    async def ask() -> None:
        async with module.InferenceServerClient(caller.address()) as client:
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("ctr")
            inputs = [caller.tensor("item_id", KEYS)]
            coding = "response_compression_algorithm" if is_http(caller) else "compression_algorithm"
            answers = await asyncio.gather(
                *(client.infer("ctr", inputs, **{coding: how}) for how in (None, "gzip", "deflate")),
                client.infer("ctr", inputs, str(VERSION)),
                client.infer("ctr", inputs, outputs=[caller.wanted("item_id")]),
            )
            for answer in answers:
                np.testing.assert_array_equal(answer.as_numpy("item_id"), items(KEYS))
            with pytest.raises(InferenceServerException, match="unknown input 'nothing'"):
                await client.infer("ctr", [caller.tensor("nothing", KEYS)])

    asyncio.run(ask())


def numbers(value: Any) -> Any:
    """Protobuf's JSON has strings for 64 bits."""
    return [int(each) for each in value]


def test_metadata_and_configuration(caller: TritonHttp) -> None:
    server = document(caller, "get_server_metadata")
    assert server["name"] == "tierstore"
    assert {"binary_tensor_data", "model_repository", "statistics"} <= set(server["extensions"])
    model = document(caller, "get_model_metadata", "ctr", str(VERSION))
    assert model["versions"] == [str(VERSION)]
    named = {each["name"]: (each["datatype"], numbers(each["shape"])) for each in model["inputs"]}
    assert (named["user"], named["clicked.offsets"]) == (("BYTES", [-1]), ("INT64", [-1]))
    assert ("item_id", "FP32", [-1, 4]) in [
        (of["name"], of["datatype"], numbers(of["shape"])) for of in model["outputs"]
    ]
    assert "parameters" not in model
    config = document(caller, "get_model_config", "ctr")
    config = config if is_http(caller) else config["config"]
    assert (config["name"], config["backend"], config.get("max_batch_size", 0)) == ("ctr", "tierstore", 0)
    assert numbers(config["version_policy"]["specific"]["versions"]) == [VERSION]
    (user,) = [each for each in config["input"] if each["name"] == "user"]
    assert (user["data_type"], numbers(user["dims"]), user["optional"]) == ("TYPE_STRING", [-1], True)


def test_statistics_count_what_was_answered(caller: TritonHttp) -> None:
    def counts() -> dict[str, dict[str, int]]:
        (model,) = document(caller, "get_inference_statistics", "one")["model_stats"]
        of = model["inference_stats"]
        found = {name: {part: int(of[name].get(part, 0)) for part in ("count", "ns")} for name in of}
        assert int(model["inference_count"]) == found["success"]["count"]
        return found

    for _ in range(2):  # of both outcomes, so that there is something to count on
        caller.ask("one", {"item_id": KEYS})
        with pytest.raises(InferenceServerException):
            caller.client.infer("one", [caller.tensor("item_id", KEYS.astype(np.float32))])
    before = counts()
    caller.ask("one", {"item_id": KEYS})
    with pytest.raises(InferenceServerException):
        caller.client.infer("one", [caller.tensor("item_id", KEYS.astype(np.float32))])
    after = counts()
    for name in ("success", "queue", "fail"):
        assert after[name]["count"] - before[name]["count"] == 1
    assert after["queue"]["ns"] >= before["queue"]["ns"]  # what a reactor answers never waits
    assert after["compute_infer"]["ns"] > before["compute_infer"]["ns"]
    every = document(caller, "get_inference_statistics")["model_stats"]
    assert {model["name"] for model in every} == {"ctr", "one", "names"}


@KINDS
def test_the_repository(own: tuple[Store, ServerThread, httpx.Client], tmp_path: Path, kind: type[TritonHttp]) -> None:
    store, server, _ = own
    store.load_snapshot(write_small(tmp_path, "one", "item"))
    caller = kind(server)
    index = document(caller, "get_model_repository_index")
    (entry,) = index if is_http(caller) else index["models"]
    assert (entry["name"], entry["version"], entry["state"]) == ("one", str(VERSION), "READY")
    caller.client.unload_model("one")
    assert not caller.client.is_model_ready("one")
    with pytest.raises(InferenceServerException) as caught:
        caller.client.infer("one", [caller.tensor("item_id", KEYS)])
    assert caught.value.status() in ("400", "StatusCode.UNAVAILABLE")
    caller.client.load_model("one")
    present = KEYS[:3]
    np.testing.assert_array_equal(caller.ask("one", {"item_id": present})["item_id"], items(present))
    with pytest.raises(InferenceServerException, match="cannot be overridden"):
        caller.client.load_model("one", config="{}")
    caller.close()


def test_shared_memory_is_refused_clearly_and_unregistered_gladly(caller: TritonHttp) -> None:
    client = caller.client
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    given = caller.triton.InferInput("item_id", [8], "INT64")
    given.set_shared_memory("region", 64)
    output = caller.triton.InferRequestedOutput("item_id")
    output.set_shared_memory("region", 64)
    for call in (
        client.get_system_shared_memory_status,
        lambda: client.register_system_shared_memory("region", "/region", 64),
        lambda: client.infer("ctr", [given]),
        lambda: client.infer("ctr", [caller.tensor("item_id", KEYS)], outputs=[output]),
    ):
        with pytest.raises(InferenceServerException, match="shared memory is not enabled"):
            call()
    assert document(caller, "get_cuda_shared_memory_status") in ([], {})
    with pytest.raises(InferenceServerException, match="CUDA shared memory is not served"):
        client.register_cuda_shared_memory("region", b"aGFuZGxl", 0, 64)
    with pytest.raises(InferenceServerException, match="no CUDA shared memory region"):
        client.get_cuda_shared_memory_status("region")


def test_what_is_not_served_says_so(caller: TritonHttp) -> None:
    client = caller.client
    for call in (
        client.get_trace_settings,
        lambda: client.get_trace_settings("ctr"),
        client.get_log_settings,
        lambda: client.update_log_settings({}),
    ):
        with pytest.raises(InferenceServerException, match="extension is not served") as caught:
            call()
        assert is_http(caller) or caught.value.status() == "StatusCode.UNIMPLEMENTED"
    classes = [caller.triton.InferRequestedOutput("item_id", class_count=2)]
    with pytest.raises(InferenceServerException, match="classification extension is not served"):
        client.infer("ctr", [caller.tensor("item_id", KEYS)], outputs=classes)
    with pytest.raises(InferenceServerException, match="cannot be overridden"):
        client.load_model("ctr", config="{}")


def test_what_is_not_there_is_not_found_and_not_ready(caller: TritonHttp) -> None:
    """Clients ask until a model is ready, and end at an error."""
    for model, version in (("nobody", ""), ("ctr", "7"), ("a/../b", "")):
        for call in (
            lambda model=model, version=version: caller.client.infer(model, [caller.tensor("item_id", KEYS)], version),
            lambda model=model, version=version: caller.client.get_model_metadata(model, version),
        ):
            with pytest.raises(InferenceServerException) as caught:
                call()
            assert caught.value.status() in ("404", "StatusCode.NOT_FOUND")
        if "/" not in model or not is_http(caller):  # of which the client makes another path
            assert not caller.client.is_model_ready(model, version)


def test_a_parameter_of_an_output_that_cannot_be(caller: TritonHttp) -> None:
    for wanted, says in (
        (caller.wanted("item_id", combiner=1), "expected sum, mean or sqrtn"),
        (caller.wanted("item_id.found", combiner="sum"), "only a feature's vectors"),
        (caller.wanted("item_id", dtype="FP64"), "FP64.*FP16|FP16.*FP64"),
        (caller.wanted("item_id.found", dtype="FP16"), "BOOL"),
        (caller.wanted("clicked"), "needs an input 'clicked'"),
    ):
        with pytest.raises(InferenceServerException, match=says):
            caller.client.infer("ctr", [caller.tensor("item_id", KEYS)], outputs=[wanted])
