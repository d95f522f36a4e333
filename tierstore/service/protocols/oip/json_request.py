"""Inference requests of the Open Inference Protocol over HTTP: JSON, with tensors in it, behind it, or in shared
memory.

Parses the bytes of a body, independent of transports. Pure functions and immutable values; any thread. A malformed
request is InvalidInput.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from tierstore.errors import InvalidInput, shown
from tierstore.service.dataplane.plan import Request, RequestedOutput
from tierstore.service.dataplane.tensors import (
    Elements,
    TensorSpec,
    check_datatype,
    check_shape,
    check_size,
    elements_from_bytes,
    elements_from_json,
)
from tierstore.service.protocols.oip.parameters import (
    flag,
    named,
    parameter_text,
    refuse_classification,
    span,
    timeout_us,
)
from tierstore.service.protocols.oip.shared_memory import Regions, Span

HEADER_LENGTH = b"inference-header-content-length"


@dataclass(slots=True)
class InBody:
    """Elements that are bytes [begin, end) of the part behind the JSON."""

    begin: int
    end: int


@dataclass(slots=True)
class InJson:
    """Elements that came in the JSON."""

    elements: Elements


@dataclass(slots=True)
class InferRequest:
    """A request's JSON, parsed.

    `sources` say where each input's elements are, `targets` where each requested output goes: to shared memory, binary
    (True) or JSON (False), or None for `binary_default`.
    """

    request: Request | memoryview
    sources: list[InBody | InJson | Span]
    targets: list[Span | bool | None]
    binary_default: bool
    id: str | None
    timeout_us: int | None = None
    span_bytes: int = field(init=False)  # of the inputs in shared memory

    def __post_init__(self) -> None:
        self.span_bytes = sum(source.nbytes for source in self.sources if isinstance(source, Span))


def parse_raw(body: memoryview) -> InferRequest:
    """A request whose body is raw keys without JSON."""
    return InferRequest(body, [], [], True, None)


def split_body(body: memoryview, header_length: int | None) -> tuple[memoryview, memoryview | None]:
    """(JSON, the part behind it) of a body whose JSON is the first `header_length` bytes; None: all of it is JSON."""
    if header_length is None:
        return body, None
    if header_length > len(body):
        raise InvalidInput(f"Inference-Header-Content-Length is {header_length}, but the body has {len(body)} bytes")
    return body[:header_length], body[header_length:]


def parse_request(header: memoryview, tail_bytes: int | None) -> InferRequest:
    """Parse the JSON in front of `tail_bytes` bytes of binary data; None: no binary data can follow."""
    try:
        request = orjson.loads(header)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the request is not valid JSON: {error}") from error
    if not isinstance(request, dict):
        raise InvalidInput("expected the request as a JSON object")
    request_id = request.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise InvalidInput(f"id: expected a string, got {shown(request_id)}")
    parameters = _parameters(request, "request", "")
    default = flag(parameters, "binary_data_output", "request", "")
    outputs, targets = _requested(request)
    inputs, sources = _inputs(request, tail_bytes)
    combiner = parameter_text(parameters, "combiner", "request", "")
    plane_request = Request(inputs, outputs, combiner)
    return InferRequest(plane_request, sources, targets, bool(default), request_id, timeout_us(parameters))


def _inputs(request: dict[str, Any], tail_bytes: int | None) -> tuple[list[TensorSpec], list[InBody | InJson | Span]]:
    inputs: list[TensorSpec] = []
    sources: list[InBody | InJson | Span] = []
    at = 0
    for item in _objects(request, "inputs"):
        name = _name(item, "input")
        parameters = _parameters(item, "input", name)
        datatype = check_datatype(name, item.get("datatype"))
        shape = check_shape(name, item.get("shape"))
        inputs.append(TensorSpec(name, datatype, shape))
        size = parameters.get("binary_data_size")
        if (source := span(parameters, "input", name)) is not None:
            if "data" in item or size is not None:
                raise InvalidInput(f"input {shown(name)} has both a shared memory region and data")
            check_size(name, datatype, shape, source.nbytes)
            sources.append(source)
        elif size is None:
            if "data" not in item:
                raise InvalidInput(f"input {shown(name)} has neither data nor binary_data_size")
            sources.append(InJson(elements_from_json(name, datatype, shape, item["data"])))
        else:
            if item.get("data") is not None:  # KServe's client sends null beside the bytes of an empty batch
                raise InvalidInput(f"input {shown(name)} has both data and binary_data_size")
            if type(size) is not int or size < 0:
                raise InvalidInput(
                    f"input {shown(name)}: binary_data_size is {shown(size)}, expected a number of bytes"
                )
            if tail_bytes is None:
                raise InvalidInput(
                    f"input {shown(name)} has binary_data_size, but the header Inference-Header-Content-Length is "
                    "missing"
                )
            if size > tail_bytes - at:
                raise InvalidInput(
                    f"input {shown(name)}: binary_data_size is {shown(size)}, but {tail_bytes - at} bytes are left in "
                    "the body"
                )
            check_size(name, datatype, shape, size)
            sources.append(InBody(at, at + size))
            at += size
    if tail_bytes is not None and at != tail_bytes:
        raise InvalidInput(f"the inputs take {at} bytes of binary data, the body has {tail_bytes}")
    return inputs, sources


def read_elements(parsed: InferRequest, tail: memoryview | None, regions: Regions) -> list[Elements]:
    """The elements of the inputs. Elements in shared memory are copied, so that no client can change them later."""
    assert isinstance(parsed.request, Request)
    elements: list[Elements] = []
    for spec, source in zip(parsed.request.inputs, parsed.sources, strict=True):
        if isinstance(source, InJson):
            elements.append(source.elements)
            continue
        if isinstance(source, Span):
            data = regions.read(source, f"input {shown(spec.name)}")
        else:
            assert tail is not None
            data = tail[source.begin : source.end]
        elements.append(elements_from_bytes(spec.name, spec.datatype, spec.shape, data))
    return elements


def _requested(request: dict[str, Any]) -> tuple[list[RequestedOutput], list[Span | bool | None]]:
    outputs: list[RequestedOutput] = []
    targets: list[Span | bool | None] = []
    for item in _objects(request, "outputs", required=False):
        name = _name(item, "output")
        parameters = _parameters(item, "output", name)
        refuse_classification(parameters, name)
        datatype = parameter_text(parameters, "dtype", "output", name)
        outputs.append(RequestedOutput(name, datatype, parameter_text(parameters, "combiner", "output", name)))
        binary = flag(parameters, "binary_data", "output", name)
        target = span(parameters, "output", name)
        targets.append(binary if target is None else target)
    return outputs, targets


def _objects(request: dict[str, Any], key: str, *, required: bool = True) -> list[dict[str, Any]]:
    items = request.get(key)
    if items is None and not required:
        return []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InvalidInput(f"{key}: expected a list of objects, got {shown(items)}")
    return items


def _name(item: dict[str, Any], kind: str) -> str:
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"every {kind} needs a name, got {shown(name)}")
    return name


def _parameters(item: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    parameters = item.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidInput(f"{named(kind, name)}: expected parameters as an object, got {shown(parameters)}")
    return parameters
