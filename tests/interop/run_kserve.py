"""Asks with KServe's own clients (`kserve`), unchanged. Run in an environment that has them."""

from __future__ import annotations

import asyncio
from typing import Any

import exchange
import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput


def request_of(case: exchange.Case, *, binary: bool) -> InferRequest:
    inputs = []
    for name, array in case.inputs.items():
        tensor = InferInput(name, list(array.shape), case.datatypes[name])
        tensor.set_data_from_numpy(array, binary_data=binary)
        inputs.append(tensor)
    outputs = None
    if case.outputs is not None:
        outputs = [
            RequestedOutput(name, {} if dtype is None else {"dtype": dtype}) for name, dtype in case.outputs.items()
        ]
        if binary:
            for output in outputs:
                output.parameters["binary_data"] = True
    version = None if case.version is None else str(case.version)
    return InferRequest(case.model, inputs, request_outputs=outputs, model_version=version)


def path_of(case: exchange.Case, labels: str) -> str:
    """The model as the client puts it into a URL, which has no argument for versions."""
    if case.version is None:
        return case.model
    return f"{case.model}/{'versions' if isinstance(case.version, int) else labels}/{case.version}"


def columns_of(case: exchange.Case) -> dict[str, Any]:
    """The column form of the older protocol, which TensorFlow Serving has too."""
    body: dict[str, Any] = {"inputs": {name: array.tolist() for name, array in case.inputs.items()}}
    if case.outputs is not None:
        body["output_filter"] = list(case.outputs)
        if "FP16" in case.outputs.values():
            body["signature_name"] = "lookup_float16"
    return body


async def answer_all(job: exchange.Job) -> dict[str, dict[str, exchange.Answer]]:
    answers: dict[str, dict[str, exchange.Answer]] = {
        client: {} for client in ("kserve_json", "kserve_binary", "kserve_v1", "kserve_grpc")
    }
    url = f"http://{job.http}"
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    old = InferenceRESTClient(RESTConfig(protocol="v1"))
    rpc = InferenceGRPCClient(job.grpc, retries=0)
    for case in job.cases:
        for client, of in answers.items():
            try:
                if client == "kserve_v1":
                    outputs = (await old.infer(url, columns_of(case), path_of(case, "labels")))["outputs"]
                    named = outputs if isinstance(outputs, dict) else {"": outputs}
                    of[case.name] = {name: np.array(value) for name, value in named.items()}
                    continue
                if client == "kserve_grpc":
                    answer = await rpc.infer(request_of(case, binary=True))
                else:
                    request = request_of(case, binary=client == "kserve_binary")
                    answer = await rest.infer(url, request, path_of(case, "versions"))
                of[case.name] = {output.name: output.as_numpy() for output in answer.outputs}
            except httpx.HTTPStatusError as error:
                of[case.name] = str(error)
            except grpc.RpcError as error:
                of[case.name] = error.details()
    await rest.close()
    await old.close()
    await rpc.close()
    return answers


if __name__ == "__main__":
    exchange.run(lambda job: asyncio.run(answer_all(job)))
