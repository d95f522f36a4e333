"""Look-ups with KServe's REST client (`kserve`), unchanged: python run_kserve_look_ups.py URL < requests > answers."""

from __future__ import annotations

import asyncio
import base64
import json
import sys

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput

NAMES = ("item_id", "item_id.found")


async def main(url: str) -> None:
    service, _, model = url.removesuffix("/infer").partition("/v2/models/")
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    for line in sys.stdin:
        name, keys = line.rstrip("\n").split("\t")
        array = np.array(keys.split(), np.int64)
        tensor = InferInput("item_id", [len(array)], "INT64")
        tensor.set_data_from_numpy(array, binary_data=True)
        wanted = [RequestedOutput(output, {"binary_data": True}) for output in NAMES]
        # where there is none it makes one up, another for each request
        given = None if name in ("-", "") else name
        answer = await client.infer(service, InferRequest(model, [tensor], given, request_outputs=wanted), model)
        rows, found = (output.as_numpy() for output in answer.outputs)
        document = {
            **({} if given is None else {"id": answer.id}),
            "outputs": [
                {"name": output, "shape": array.shape, "parameters": {"binary_data_size": array.nbytes}}
                for output, array in zip(NAMES, (rows, found), strict=True)
            ],
        }
        head = json.dumps(document).encode()
        body = head + rows.astype(np.float32).tobytes() + found.astype(np.bool_).tobytes()
        print(len(head), base64.b64encode(body).decode(), flush=True)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
