"""Models of a Triton repository that stand around tierstore's: a dense part, an ensemble of both, and one that calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# How these models take and gives tensors: by DLPack, as Triton 24.10 loses elements of NumPy 2's arrays.
_TENSORS = """
import ctypes
import numpy as np
import triton_python_backend_utils as backend

rename = ctypes.pythonapi.PyCapsule_SetName
rename.argtypes = [ctypes.py_object, ctypes.c_char_p]


def tensor(name, array):
    capsule = array.__dlpack__()
    made = backend.Tensor.from_dlpack(name, capsule)
    rename(capsule, b"used_dltensor")
    return made


def array(tensor):
    return np.from_dlpack(tensor).copy()
"""

_DENSE = """
import json
import onnxruntime


class TritonPythonModel:
    def initialize(self, args):
        path = json.loads(args["model_config"])["parameters"]["graph"]["string_value"]
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        answers = []
        for request in requests:
            given = {tensor.name(): array(tensor) for tensor in request.inputs()}
            (scores,) = self.session.run(["score"], given)
            answers.append(backend.InferenceResponse([tensor("score", scores)]))
        return answers
"""

_CALLER = """
import json


class TritonPythonModel:
    def initialize(self, args):
        self.model = json.loads(args["model_config"])["parameters"]["calls"]["string_value"]

    def execute(self, requests):
        answers = []
        for request in requests:
            ids = array(backend.get_input_tensor_by_name(request, "ids"))
            call = backend.InferenceRequest(
                model_name=self.model, requested_output_names=["item_id"], inputs=[tensor("item_id", ids)]
            )
            answer = call.exec()
            if answer.has_error():
                answers.append(backend.InferenceResponse([], answer.error()))
                continue
            rows = array(backend.get_output_tensor_by_name(answer, "item_id"))
            answers.append(backend.InferenceResponse([tensor("sums", rows.sum(1, keepdims=True))]))
        return answers
"""


def _write(folder: Path, script: str | None, config: str) -> None:
    (folder / "1").mkdir(parents=True)
    if script is not None:
        (folder / "1/model.py").write_text(_TENSORS + script, encoding="utf-8")
        config = f'backend: "python"\ninstance_group [{{ kind: KIND_CPU }}]\n{config}'
    (folder / "config.pbtxt").write_text(f"max_batch_size: 0\n{config}", encoding="utf-8")


def write_dense(folder: Path, graph: Path, features: Sequence[str], dim: int) -> None:
    """A network in ONNX Runtime: its inputs are rows of these features, `score` is what it gives."""
    ports = ", ".join(f'{{ name: "{name}" data_type: TYPE_FP32 dims: [-1, {dim}] }}' for name in features)
    _write(
        folder,
        _DENSE,
        f'input [ {ports} ]\noutput [ {{ name: "score" data_type: TYPE_FP32 dims: [-1, 1] }} ]\n'
        f'parameters {{ key: "graph" value {{ string_value: "{graph}" }} }}\n',
    )


def write_ensemble(folder: Path, rows: str, dense: str, ids: Sequence[str]) -> None:
    """Ids to rows to scores, by the model `rows` and the model `dense`, without code. Among ids are offsets of bags."""
    features = [name for name in ids if "." not in name]
    ports = ", ".join(f'{{ name: "{name}" data_type: TYPE_INT64 dims: [-1] }}' for name in ids)
    keys = " ".join(f'input_map {{ key: "{name}" value: "{name}" }}' for name in ids)
    found = " ".join(f'output_map {{ key: "{name}" value: "rows_of_{name}" }}' for name in features)
    scored = " ".join(f'input_map {{ key: "{name}" value: "rows_of_{name}" }}' for name in features)
    _write(
        folder,
        None,
        f'platform: "ensemble"\ninput [ {ports} ]\noutput [ {{ name: "score" data_type: TYPE_FP32 dims: [-1, 1] }} ]\n'
        f'ensemble_scheduling {{ step [ {{ model_name: "{rows}" model_version: -1 {keys} {found} }}, '
        f'{{ model_name: "{dense}" model_version: -1 {scored} output_map {{ key: "score" value: "score" }} }} ] }}\n',
    )


def write_bls(folder: Path, model: str) -> None:
    """A model that asks another for rows, and answers their sums."""
    _write(
        folder,
        _CALLER,
        'input [ { name: "ids" data_type: TYPE_INT64 dims: [-1] } ]\n'
        'output [ { name: "sums" data_type: TYPE_FP32 dims: [-1, 1] } ]\n'
        f'parameters {{ key: "calls" value {{ string_value: "{model}" }} }}\n',
    )
