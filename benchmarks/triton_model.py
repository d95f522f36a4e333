"""A model of Triton's Python backend that answers rows of a table with `numpy.take`: what its users write for look-ups.

Runs in the backend's process, and imports nothing of this project. Keys are the rows' numbers: nothing has to be found. The file
of the table is the parameter `table` of the model. Tensors are taken and given by DLPack, without a copy: as arrays, the backend of Triton
24.10 cannot take them from NumPy 2. It misnames the capsule that it has used, of which NumPy would complain in the log.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import numpy as np
import triton_python_backend_utils as backend  # type: ignore[import-not-found]

rename = ctypes.pythonapi.PyCapsule_SetName
rename.argtypes = [ctypes.py_object, ctypes.c_char_p]


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._table = np.load(config["parameters"]["table"]["string_value"])
        self._input, self._output = config["input"][0]["name"], config["output"][0]["name"]

    def execute(self, requests: list[Any]) -> list[Any]:
        answers = []
        for request in requests:
            rows = np.from_dlpack(backend.get_input_tensor_by_name(request, self._input))
            capsule: Any = np.take(self._table, rows, axis=0).__dlpack__()
            taken = backend.Tensor.from_dlpack(self._output, capsule)
            rename(capsule, b"used_dltensor")
            answers.append(backend.InferenceResponse([taken]))
        return answers
