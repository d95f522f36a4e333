"""A stand-in for `triton_python_backend_utils`, as the backend's process has it: for tests without a server."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np


class Tensor:
    def __init__(self, name: str, values: Any, *, broken: bool = False) -> None:
        self._name, self._values, self._broken = name, values, broken

    @classmethod
    def from_dlpack(cls, name: str, capsule: Any) -> Tensor:
        class Holder:
            def __dlpack__(self, **options: Any) -> Any:
                return capsule

            def __dlpack_device__(self) -> tuple[int, int]:
                return 1, 0

        given = np.from_dlpack(Holder())
        made = cls(name, given.copy(), broken=cls.loses_elements)
        made.address = given.ctypes.data
        return made

    address = 0  # of the memory that it was made of, without a copy

    loses_elements = False  # as with NumPy 2 before Triton 24.11

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return np.full_like(self._values, self._values.flat[0]) if self._broken else self._values

    def __dlpack__(self, **options: Any) -> Any:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._values.__dlpack_device__()


class TritonError:
    INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE = "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE"

    def __init__(self, text: str, code: str) -> None:
        self.text, self.code = text, code


class InferenceResponse:
    def __init__(self, tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.arrays = {tensor.name(): tensor.as_numpy() for tensor in tensors}
        self.addresses = {tensor.name(): tensor.address for tensor in tensors}
        self.error = error


class Request:
    def __init__(self, inputs: dict[str, Any], outputs: list[str], timeout_us: int = 0) -> None:
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]
        self._outputs, self._timeout_us = outputs, timeout_us

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def timeout(self) -> int:
        return self._timeout_us


def module() -> ModuleType:
    made = ModuleType("triton_python_backend_utils")
    vars(made).update(Tensor=Tensor, TritonError=TritonError, InferenceResponse=InferenceResponse)
    return made
