"""Inference requests and answers of the Open Inference Protocol over HTTP: JSON, with tensors in it or behind it.

Knows the bytes of a body and the headers that describe it, not how they travel. Pure functions; any thread.
A malformed request is InvalidInput.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tierstore.errors import InvalidInput
from tierstore.service.dataplane import Answer, OutputSpec, RequestedOutput
from tierstore.service.tensors import (
    InputTensor,
    check_datatype,
    check_shape,
    elements_from_bytes,
    elements_from_json,
    shown,
)

HEADER_LENGTH = b"inference-header-content-length"
_NO_SHARED_MEMORY = "shared memory is not enabled on this server: send the tensor's data in the request"


@dataclass(slots=True)
class InferRequest:
    """A parsed request. `binary[i]` says whether output i goes binary; `binary_default` for those without a say."""

    inputs: list[InputTensor] | memoryview
    outputs: list[RequestedOutput]
    binary: list[bool | None]
    binary_default: bool
    id: str | None


def parse_request(body: memoryview, header_length: int | None) -> InferRequest:
    """Parse a body whose JSON takes the first `header_length` bytes (None: all of it; 0: raw keys without any JSON)."""
    if header_length == 0:
        return InferRequest(body, [], [], True, None)
    if header_length is None:
        header, tail = body, None
    elif header_length <= len(body):
        header, tail = body[:header_length], body[header_length:]
    else:
        raise InvalidInput(f"Inference-Header-Content-Length is {header_length}, but the body has {len(body)} bytes")
    try:
        request = orjson.loads(header)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the request is not valid JSON: {error}") from error
    if not isinstance(request, dict):
        raise InvalidInput("expected the request as a JSON object")
    request_id = request.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise InvalidInput(f"id: expected a string, came {shown(request_id)}")
    parameters = _parameters(request, "request", "")
    default = _flag(parameters, "binary_data_output", "request", "")
    outputs, binary = _requested(request)
    return InferRequest(_inputs(request, tail), outputs, binary, bool(default), request_id)


def _inputs(request: dict[str, Any], tail: memoryview | None) -> list[InputTensor]:
    inputs = []
    at = 0
    for item in _objects(request, "inputs"):
        name = _name(item, "input")
        parameters = _parameters(item, "input", name)
        datatype = check_datatype(name, item.get("datatype"))
        shape = check_shape(name, item.get("shape"))
        if "shared_memory_region" in parameters:
            raise InvalidInput(f"input {shown(name)}: {_NO_SHARED_MEMORY}")
        size = parameters.get("binary_data_size")
        if size is None:
            if "data" not in item:
                raise InvalidInput(f"input {shown(name)} has neither data nor binary_data_size")
            elements = elements_from_json(name, datatype, shape, item["data"])
        else:
            if "data" in item:
                raise InvalidInput(f"input {shown(name)} has both data and binary_data_size")
            if type(size) is not int or size < 0:
                raise InvalidInput(
                    f"input {shown(name)}: binary_data_size is {shown(size)}, expected a number of bytes"
                )
            if tail is None:
                raise InvalidInput(
                    f"input {shown(name)} has binary_data_size, but the header Inference-Header-Content-Length is missing"
                )
            if size > len(tail) - at:
                raise InvalidInput(
                    f"input {shown(name)}: binary_data_size is {shown(size)}, but {len(tail) - at} bytes are left in the body"
                )
            elements = elements_from_bytes(name, datatype, shape, tail[at : at + size])
            at += size
        inputs.append(InputTensor(name, datatype, shape, elements))
    if tail is not None and at != len(tail):
        raise InvalidInput(f"the inputs take {at} bytes of binary data, the body has {len(tail)}")
    return inputs


def _requested(request: dict[str, Any]) -> tuple[list[RequestedOutput], list[bool | None]]:
    outputs, binary = [], []
    for item in _objects(request, "outputs", required=False):
        name = _name(item, "output")
        parameters = _parameters(item, "output", name)
        if "shared_memory_region" in parameters:
            raise InvalidInput(f"output {shown(name)}: {_NO_SHARED_MEMORY}")
        if parameters.get("classification"):
            raise InvalidInput(f"output {shown(name)}: the classification extension is not served")
        datatype = parameters.get("dtype")
        if datatype is not None and not isinstance(datatype, str):
            raise InvalidInput(f"output {shown(name)}: parameter dtype is {shown(datatype)}, expected FP32 or FP16")
        outputs.append(RequestedOutput(name, datatype))
        binary.append(_flag(parameters, "binary_data", "output", name))
    return outputs, binary


def _objects(request: dict[str, Any], key: str, *, required: bool = True) -> list[dict[str, Any]]:
    items = request.get(key)
    if items is None and not required:
        return []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InvalidInput(f"{key}: expected a list of objects, came {shown(items)}")
    return items


def _name(item: dict[str, Any], kind: str) -> str:
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"every {kind} needs a name, came {shown(name)}")
    return name


def _parameters(item: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    parameters = item.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidInput(f"{_place(kind, name)}: expected parameters as an object, came {shown(parameters)}")
    return parameters


def _flag(parameters: dict[str, Any], key: str, kind: str, name: str) -> bool | None:
    value = parameters.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidInput(f"{_place(kind, name)}: parameter {key} is {shown(value)}, expected true or false")
    return value


def _place(kind: str, name: str) -> str:
    return f"{kind} {shown(name)}" if name else f"the {kind}"


class AnswerBuffer:
    """Memory of one answer: binary outputs lie end to end in one buffer, filled in place. One thread at a time."""

    def __init__(self, request: InferRequest) -> None:
        self._request = request
        self._binary: list[bool] = []
        self._late: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
        self.tail: npt.NDArray[np.uint8] | None = None

    def allocate(self, version: int, specs: Sequence[OutputSpec]) -> list[npt.NDArray[Any]]:
        """An array a spec. One that would lie unaligned in the buffer is filled apart and copied at the end."""
        request = self._request
        total = 0
        for spec in specs:
            say = None if spec.index is None else request.binary[spec.index]
            self._binary.append(binary := request.binary_default if say is None else say)
            if binary:
                total += spec.nbytes
        if any(self._binary):
            self.tail = np.empty(total, np.uint8)
        arrays = []
        at = 0
        for spec, binary in zip(specs, self._binary, strict=True):
            if not binary or self.tail is None:
                arrays.append(np.empty(spec.shape, spec.dtype))
                continue
            part = self.tail[at : at + spec.nbytes]
            if at % spec.dtype.itemsize == 0:
                arrays.append(part.view(spec.dtype).reshape(spec.shape))
            else:
                array = np.empty(spec.shape, spec.dtype)
                self._late.append((part, array))
                arrays.append(array)
            at += spec.nbytes
        return arrays

    def encode(self, model: str, answer: Answer) -> tuple[bytes, memoryview | None]:
        """The answer's JSON and, where any output goes binary, the bytes behind it."""
        for part, array in self._late:
            part[:] = array.reshape(-1).view(np.uint8)
        outputs: list[dict[str, Any]] = []
        for spec, array, binary in zip(answer.specs, answer.arrays, self._binary, strict=True):
            output: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}
            if binary:
                output["parameters"] = {"binary_data_size": spec.nbytes}
            else:
                output["data"] = array.reshape(-1)
            outputs.append(output)
        document: dict[str, Any] = {"model_name": model, "model_version": str(answer.version), "outputs": outputs}
        if self._request.id is not None:
            document["id"] = self._request.id
        header = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
        return header, None if self.tail is None else self.tail.data
