"""A model of Triton's Python backend that answers rows of a table with `numpy.take`: what its users write for look-ups.

Runs in the backend's process, in a virtual environment of its own, and so imports nothing of this project. Keys are the rows'
numbers: nothing has to be found. The file of the table is the parameter `table` of the model.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as backend  # type: ignore[import-not-found]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._table = np.load(config["parameters"]["table"]["string_value"])
        self._input, self._output = config["input"][0]["name"], config["output"][0]["name"]

    def execute(self, requests: list[Any]) -> list[Any]:
        answers = []
        for request in requests:
            rows = backend.get_input_tensor_by_name(request, self._input).as_numpy()
            taken = np.take(self._table, rows, axis=0)
            answers.append(backend.InferenceResponse([backend.Tensor(self._output, taken)]))
        return answers
