"""Clients of the tests' own environment that `tests/service/callers.py` does not ask with: those of asyncio, and of shared memory."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

import tierstore
from tests.interop.exchange import Answer, Case, Job
from tierstore.errors import TierstoreError

Answers = dict[str, Answer]
ROOM = 1 << 16  # bytes of shared memory for a request, and for its answer


def _inputs(triton: Any, case: Case) -> list[Any]:
    inputs = []
    for name, array in case.inputs.items():
        given = triton.InferInput(name, list(array.shape), case.datatypes[name])
        given.set_data_from_numpy(array)
        inputs.append(given)
    return inputs


def _outputs(triton: Any, case: Case) -> list[Any] | None:
    if case.outputs is None:
        return None
    outputs = []
    for name, datatype in case.outputs.items():
        output = triton.InferRequestedOutput(name)
        if datatype is not None:
            _parameter(output, "dtype", datatype)
        outputs.append(output)
    return outputs


def _parameter(output: Any, name: str, value: str) -> None:
    """Neither client has an argument for parameters of its own."""
    if hasattr(output, "_parameters"):
        output._parameters[name] = value
    else:
        output._output.parameters[name].string_param = value


def _version(case: Case) -> str:
    return "" if case.version is None else str(case.version)


def _arrays(result: Any, case: Case) -> dict[str, np.ndarray]:
    response = result.get_response()
    if isinstance(response, dict):
        names = [output["name"] for output in response["outputs"]]
    else:
        names = [output.name for output in response.outputs]
    return {name: _text(result.as_numpy(name)) for name in names}


def _text(array: np.ndarray) -> np.ndarray:
    """Strings as str, which some clients give as bytes."""
    if array.dtype != object:
        return array
    flat = [text.decode() if isinstance(text, bytes) else text for text in array.reshape(-1).tolist()]
    return np.array(flat, object).reshape(array.shape)


def _each(job: Job, ask: Callable[[Case], dict[str, np.ndarray]]) -> Answers:
    answers: Answers = {}
    for case in job.cases:
        try:
            answers[case.name] = ask(case)
        except (InferenceServerException, TierstoreError) as error:
            answers[case.name] = str(error)
    return answers


def _triton_aio(module: Any, plain: Any, address: str, job: Job) -> Answers:
    async def run() -> Answers:
        answers: Answers = {}
        async with module.InferenceServerClient(address) as client:
            for case in job.cases:
                try:
                    result = await client.infer(
                        case.model, _inputs(plain, case), model_version=_version(case), outputs=_outputs(plain, case)
                    )
                    answers[case.name] = _arrays(result, case)
                except InferenceServerException as error:
                    answers[case.name] = str(error)
        return answers

    return asyncio.run(run())


def _triton_shm(triton: Any, address: str, job: Job) -> Answers:
    """Tensors in system shared memory, both ways. An output needs a place, so each must be named."""
    key = f"/clients-{uuid.uuid4().hex}"
    region = shm.create_shared_memory_region(key[1:], key, 2 * ROOM)
    try:
        with triton.InferenceServerClient(address) as client:
            client.register_system_shared_memory(key[1:], key, 2 * ROOM)
            try:
                return _each(job, lambda case: _ask_shm(triton, client, key[1:], region, case))
            finally:
                client.unregister_system_shared_memory(key[1:])
    finally:
        shm.destroy_shared_memory_region(region)


def _ask_shm(triton: Any, client: Any, name: str, region: Any, case: Case) -> dict[str, np.ndarray]:
    inputs, at = [], 0
    for tensor, array in case.inputs.items():
        data = np.frombuffer(serialize_byte_tensor(array).item(), np.uint8) if array.dtype == object else array
        shm.set_shared_memory_region(region, [data], offset=at)
        given = triton.InferInput(tensor, list(array.shape), case.datatypes[tensor])
        given.set_shared_memory(name, data.nbytes, offset=at)
        inputs.append(given)
        at += (data.nbytes + 15) // 16 * 16
    names = case.outputs or dict.fromkeys(case.answers)
    outputs = _outputs(triton, Case(case.name, case.model, {}, names))
    assert outputs is not None
    room = ROOM // len(outputs)
    for i, output in enumerate(outputs):
        output.set_shared_memory(name, room, offset=ROOM + i * room)
    result = client.infer(case.model, inputs, model_version=_version(case), outputs=outputs)
    arrays = {}
    for i, output in enumerate(names):
        about = result.get_output(output)
        shape, datatype = (
            (about["shape"], about["datatype"]) if isinstance(about, dict) else (about.shape, about.datatype)
        )
        dtype = {"FP32": np.float32, "FP16": np.float16, "BOOL": np.bool_, "BYTES": np.object_}[datatype]
        arrays[output] = _text(shm.get_contents_as_numpy(region, dtype, list(shape), offset=ROOM + i * room).copy())
    return arrays


def _tierstore_aio(job: Job) -> Answers:
    async def run() -> Answers:
        answers: Answers = {}
        async with tierstore.AsyncClient(f"http://{job.http}") as client:
            for case in job.cases:
                try:
                    answers[case.name] = _understood(case, await _verb(client, case))
                except TierstoreError as error:
                    answers[case.name] = str(error)
        return answers

    return asyncio.run(run())


def _verb(client: Any, case: Case) -> Any:
    """The call that asks it, of either client: look-ups where there is a verb for them, else `predict`."""
    outputs = case.outputs or {}
    options: dict[str, Any] = {"version": case.version}
    features = [name for name in case.inputs if "." not in name]
    if len(case.inputs[features[0]].shape) > 1 or any(name in outputs for name in ("score", "verdict")):
        return client.predict(case.model, case.inputs, outputs=list(outputs) or case.answers, **options)
    if case.outputs is None and "score" in case.answers:
        return client.predict(case.model, case.inputs, **options)
    options["return_found"] = any(name.endswith(".found") for name in outputs)
    if "FP16" in outputs.values():
        options["dtype"] = "float16"
    if len(features) > 1:
        return client.lookup_many(case.model, {name: case.inputs[name] for name in features}, **options)
    (feature,) = features
    keys = case.inputs[feature]
    if f"{feature}.offsets" in case.inputs:
        options["weights"] = case.inputs.get(f"{feature}.weights")
        return client.lookup_bags(case.model, feature, keys, case.inputs[f"{feature}.offsets"], **options)
    return client.lookup(case.model, feature, keys, **options)


def _understood(case: Case, answer: Any) -> dict[str, np.ndarray]:
    if isinstance(answer, tuple):
        answer = dict(zip(case.answers, answer, strict=True))
    elif not isinstance(answer, dict):
        answer = {case.answers[0]: answer}
    return {name: _text(array) for name, array in answer.items()}


CLIENTS: dict[str, Callable[[Job], Answers]] = {
    "triton_http_aio": lambda job: _triton_aio(triton_http_aio, triton_http, job.http, job),
    "triton_grpc_aio": lambda job: _triton_aio(triton_grpc_aio, triton_grpc, job.grpc, job),
    "triton_http_shm": lambda job: _triton_shm(triton_http, job.http, job),
    "triton_grpc_shm": lambda job: _triton_shm(triton_grpc, job.grpc, job),
    "tierstore_aio": _tierstore_aio,
}
