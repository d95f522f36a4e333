"""A predictor of KServe: a logistic regression over the rows of two features. Run in an environment that has `kserve`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer, model_server

ROWS = ("item_id", "clicked")


class Regression(Model):
    def __init__(self, name: str, weights: list[float]) -> None:
        super().__init__(name)
        self._weights = np.array(weights)
        self.ready = True

    async def predict(self, payload: InferRequest, headers: Any = None, response_headers: Any = None) -> InferResponse:
        given = {tensor.name: tensor.as_numpy() for tensor in payload.inputs}
        bias = given.get("bias", np.zeros(1))
        both = np.concatenate([given[name] for name in ROWS], 1).astype(np.float64)
        scores = 1 / (1 + np.exp(-(both @ self._weights + bias)))
        output = InferOutput("score", [len(scores)], "FP64")
        output.set_data_from_numpy(scores, binary_data=False)
        return InferResponse(payload.id, self.name, [output])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[model_server.parser])
    parser.add_argument("--weights", required=True)
    options, _ = parser.parse_known_args()
    ModelServer().start([Regression(options.model_name, [float(word) for word in options.weights.split(",")])])
