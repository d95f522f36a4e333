"""A KServe transformer: ids of a request become rows of a tierstore model, and the predictor behind it gets those.

    python transformer.py --model_name ranking --predictor_host HOST --predictor_protocol grpc-v2 \\
        --tierstore_url http://rows-predictor --tierstore_model ctr

Inputs named like features of the model, with their `.offsets` and `.weights`, go to tierstore; all others go to the predictor as they
came. The predictor's inputs are named like the features. Rows go as bytes with the protocol `grpc-v2`, as JSON with `v2`. A token for tierstore is in the variable TIERSTORE_TOKEN.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import httpx
from kserve import InferenceRESTClient, InferInput, InferRequest, Model, ModelServer, model_server
from kserve.constants.constants import PredictorProtocol
from kserve.errors import InvalidInput
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput

TOKEN = os.environ.get("TIERSTORE_TOKEN")
HEADERS = {} if TOKEN is None else {"authorization": f"Bearer {TOKEN}"}


class RowsOfIds(Model):
    """The transformer. `predict` is the base class's: it sends what `preprocess` returns to the predictor."""

    def __init__(self, name: str, url: str, model: str) -> None:
        super().__init__(name)
        self._url, self._model = url, model
        self._client = InferenceRESTClient(RESTConfig(protocol="v2", retries=3))
        self._features: set[str] = set()

    @property
    def _binary(self) -> bool:
        """Whether the predictor gets bytes: over REST the base class declares that it sends JSON."""
        return self.predictor_config is not None and self.predictor_config.protocol == PredictorProtocol.GRPC_V2.value

    def load(self) -> bool:
        """Learn the features' names; ready from then on."""
        answer = httpx.get(f"{self._url}/v2/models/{self._model}", headers=HEADERS, timeout=30)
        answer.raise_for_status()
        names = {output["name"] for output in answer.json()["outputs"]}
        self._features = {name for name in names if f"{name}.found" in names}
        self.ready = True
        return self.ready

    async def preprocess(self, payload: Any, headers: Any = None, response_headers: Any = None) -> InferRequest:
        if not isinstance(payload, InferRequest):
            raise InvalidInput("expected a request of the Open Inference Protocol v2")
        ids = [tensor for tensor in payload.inputs if tensor.name.partition(".")[0] in self._features]
        others = [tensor for tensor in payload.inputs if tensor not in ids]
        if not ids:
            return payload
        rows = await self._rows(ids)
        for tensor in others:  # all in one form: the protocol does not mix them
            tensor.set_data_from_numpy(tensor.as_numpy(), binary_data=self._binary)
        return InferRequest(self.name, [*rows, *others], payload.id, request_outputs=payload.request_outputs)

    async def _rows(self, ids: list[InferInput]) -> list[InferInput]:
        asked = []
        for tensor in ids:
            asked.append(InferInput(tensor.name, tensor.shape, tensor.datatype))
            asked[-1].set_data_from_numpy(tensor.as_numpy())
        outputs = [RequestedOutput(tensor.name, {"binary_data": True}) for tensor in ids if "." not in tensor.name]
        try:
            request = InferRequest(self._model, asked, request_outputs=outputs)
            answer = await self._client.infer(self._url, request, self._model, headers=HEADERS)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 400:
                raise InvalidInput(error.response.text) from error
            raise
        rows = []
        for output in answer.outputs:
            rows.append(InferInput(output.name, output.shape, output.datatype))
            rows[-1].set_data_from_numpy(output.as_numpy(), binary_data=self._binary)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(parents=[model_server.parser])
    parser.add_argument("--tierstore_url", required=True, help="where tierstore is, such as http://rows-predictor")
    parser.add_argument("--tierstore_model", required=True, help="the model whose features become rows")
    options, _ = parser.parse_known_args()
    transformer = RowsOfIds(options.model_name, options.tierstore_url, options.tierstore_model)
    transformer.load()
    ModelServer().start([transformer])


if __name__ == "__main__":
    main()
