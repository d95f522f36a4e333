"""`TritonPythonModel`: the class that Triton's Python backend makes an instance of, in a process of its own.

The backend calls it from one thread. It holds nothing that a crash could lose.
"""

from __future__ import annotations

import ctypes
import importlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError, Unreachable
from tierstore.service.error_status import grpc_status, log_failure, message_of
from tierstore.triton.answerers import Answerer, Arrays, answerer_of, until

_BYTES = "TYPE_STRING"
_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "OUT_OF_RANGE": "INVALID_ARG",
    "NOT_FOUND": "NOT_FOUND",
    "INTERNAL": "INTERNAL",
}
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass(slots=True)
class _Received:
    """A request: its tensors, the outputs that it is to get, and in which time; or what is wrong with it."""

    inputs: Arrays
    outputs: list[str]
    timeout_us: int | None

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for requests that differ in their first dimension alone."""
        tensors = [(name, array.dtype, array.shape[1:]) for name, array in self.inputs.items()]
        return (*tensors, *self.outputs)

    @property
    def items(self) -> int:
        return len(next(iter(self.inputs.values()), ()))


class TritonPythonModel:
    """Look-ups and predictions of one tierstore model. Its parameters are in `config.pbtxt`, see docs/triton.md."""

    _answerer: Answerer | None = None

    def initialize(self, args: dict[str, str]) -> None:
        """Find what answers, and wait until it does. Raises what keeps the model from being loaded."""
        self._backend = importlib.import_module("triton_python_backend_utils")
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._model = parameters.get("model", args["model_name"])
        self._outputs = {entry["name"] for entry in config["output"]}
        self._rows = {name for name in self._outputs if f"{name.removesuffix('.found')}.found" in self._outputs}
        self._strings = {entry["name"] for entry in config["input"] if entry["data_type"] == _BYTES}
        if self._strings and not self._reads_strings():
            raise ConfigError(
                f"inputs {', '.join(sorted(self._strings))}: this Python backend loses strings with NumPy "
                f"{np.__version__}; expected Triton 24.11 or later, or NumPy 1.26 beside it"
            )
        self._batches = config["max_batch_size"] > 0
        self._on_gpu = args.get("model_instance_kind") == "GPU"
        self._answerer = answerer = answerer_of(parameters, self._model)
        try:
            until(lambda: answerer.check(), Unreachable)
        except BaseException:
            self.finalize()
            raise

    def _reads_strings(self) -> bool:
        """Whether the backend was built for this NumPy: if not, it reads an array's elements from wrong places."""
        probe = np.arange(1, 4)
        return np.array_equal(self._tensor("probe", probe).as_numpy(), probe)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests, each with its outputs or its own error: those that are alike by one look-up."""
        answers: list[Arrays | Exception] = [self._read(request) for request in requests]
        for places in self._alike(answers):
            received: list[Any] = [answers[place] for place in places]
            for place, answer in zip(places, self._together(received), strict=True):
                answers[place] = answer
        return [self._response(answer) for answer in answers]

    def finalize(self) -> None:
        """End what answers, if it is of this process."""
        if self._answerer is not None:
            self._answerer.close()

    # --- one step each

    def _read(self, request: Any) -> Any:
        try:
            inputs = {tensor.name(): self._array(tensor) for tensor in request.inputs()}
            names = list(request.requested_output_names())
            if len(names) == len(self._outputs):  # as where a client names none: what its inputs allow
                names = [name for name in names if name not in self._rows or name.removesuffix(".found") in inputs]
            return _Received(inputs, names, request.timeout() or None)
        except Exception as error:  # noqa: BLE001 - it is the answer to this request alone
            return error

    def _array(self, tensor: Any) -> npt.NDArray[Any]:
        """A tensor's elements, where they lie if compiled code can read them there."""
        if tensor.name() in self._strings:
            array: npt.NDArray[Any] = tensor.as_numpy()
            return array
        array = np.from_dlpack(tensor)  # not `as_numpy`, see `_reads_strings`
        return array if array.flags.aligned else array.copy()

    def _alike(self, received: Sequence[Any]) -> Iterable[list[int]]:
        """The places of requests that one look-up may answer."""
        groups: dict[Any, list[int]] = {}
        for place, one in enumerate(received):
            if isinstance(one, _Received):
                groups.setdefault((one.form, one.timeout_us) if self._batches else place, []).append(place)
        return groups.values()

    def _together(self, received: list[_Received]) -> list[Arrays | Exception]:
        """The answers to requests of one form."""
        if len(received) > 1:
            joint = {name: np.concatenate([one.inputs[name] for one in received]) for name in received[0].inputs}
            arrays = self._answer(_Received(joint, received[0].outputs, received[0].timeout_us))
            total = sum(one.items for one in received)
            if isinstance(arrays, dict) and all(len(array) == total for array in arrays.values()):
                ends = np.cumsum([one.items for one in received])
                return [
                    {name: array[end - one.items : end] for name, array in arrays.items()}
                    for one, end in zip(received, ends.tolist(), strict=True)
                ]
        return [self._answer(one) for one in received]  # one by one also where one of them is wrong: the others are not

    def _answer(self, received: _Received) -> Arrays | Exception:
        assert self._answerer is not None
        try:
            return self._answerer.answer(received.inputs, received.outputs, received.timeout_us, on_gpu=self._on_gpu)
        except Exception as error:  # noqa: BLE001 - it is the answer to this request alone
            return error

    def _response(self, answer: Arrays | Exception) -> Any:
        backend = self._backend
        if isinstance(answer, Exception):
            log_failure(answer, f"a request to {self._model}")
            status = "UNAVAILABLE" if isinstance(answer, Unreachable) else grpc_status(answer)
            code = getattr(backend.TritonError, _CODES.get(status, "UNAVAILABLE"))
            return backend.InferenceResponse([], backend.TritonError(message_of(answer), code))
        return backend.InferenceResponse([self._tensor(name, array) for name, array in answer.items()])

    def _tensor(self, name: str, array: npt.NDArray[Any]) -> Any:
        if array.dtype.hasobject:
            return self._backend.Tensor(name, array)
        if name == "OUTPUT0" and self._batches and array.ndim == 1:  # of HPS: rows of all tables, for the batch of one
            array = array.reshape(1, -1)
        capsule: Any = array.__dlpack__()
        tensor = self._backend.Tensor.from_dlpack(name, capsule)
        _set_name(capsule, b"used_dltensor")  # the standard's word; the backend's own makes NumPy complain
        return tensor
