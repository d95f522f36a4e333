"""Inference requests and answers of the Open Inference Protocol over HTTP: JSON, with tensors in it, behind it, or elsewhere.

Knows the bytes of a body and the headers that describe it, not how they travel. Pure functions and values that are not
changed once made; any thread. A malformed request is InvalidInput.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from tierstore.errors import InvalidInput
from tierstore.service.oip.parameters import flag, place, refuse_classification, span, text, timeout_us
from tierstore.service.oip.shared_memory import Regions, Span
from tierstore.service.plane.known import KnownRequests
from tierstore.service.plane.plan import OutputSpec, Plan, Request, RequestedOutput
from tierstore.service.plane.tensors import (
    Elements,
    TensorSpec,
    check_datatype,
    check_shape,
    check_size,
    elements_from_bytes,
    elements_from_json,
    shown,
    wire_bytes,
)

HEADER_LENGTH = b"inference-header-content-length"
_ALIGNMENT = 16  # of what malloc gives


@dataclass(slots=True)
class InBody:
    """Elements that are bytes [begin, end) of what follows the JSON."""

    begin: int
    end: int


@dataclass(slots=True)
class InJson:
    """Elements that came in the JSON."""

    elements: Elements


@dataclass(slots=True)
class InferRequest:
    """A request's JSON, parsed. Nothing of a body is in it unless it came in the JSON (`reusable` false).

    `sources` say where each input's elements are, `targets` where each requested output goes: a place in shared memory,
    binary or not, or None for `binary_default`.
    """

    request: Request | memoryview
    sources: list[InBody | InJson | Span]
    targets: list[Span | bool | None]
    binary_default: bool
    id: str | None
    timeout_us: int | None = None
    span_bytes: int = field(init=False)  # of the inputs that lie in shared memory

    def __post_init__(self) -> None:
        self.span_bytes = sum(source.nbytes for source in self.sources if isinstance(source, Span))

    @property
    def reusable(self) -> bool:
        """Whether the same JSON before as many bytes means the same request."""
        return self.id is None and not any(type(source) is InJson for source in self.sources)


def parse_raw(body: memoryview) -> InferRequest:
    """A body that is raw keys without any JSON."""
    return InferRequest(body, [], [], True, None)


def split_body(body: memoryview, header_length: int | None) -> tuple[memoryview, memoryview | None]:
    """(JSON, what follows it) of a body whose JSON takes the first `header_length` bytes; None: all of it."""
    if header_length is None:
        return body, None
    if header_length > len(body):
        raise InvalidInput(f"Inference-Header-Content-Length is {header_length}, but the body has {len(body)} bytes")
    return body[:header_length], body[header_length:]


def parse_request(header: memoryview, tail_bytes: int | None) -> InferRequest:
    """Parse the JSON that stands before `tail_bytes` bytes of binary data; None: nothing can follow it."""
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
    default = flag(parameters, "binary_data_output", "request", "")
    outputs, targets = _requested(request)
    inputs, sources = _inputs(request, tail_bytes)
    combiner = text(parameters, "combiner", "request", "")
    asked = Request(inputs, outputs, combiner)
    return InferRequest(asked, sources, targets, bool(default), request_id, timeout_us(parameters))


def parse_known(known: KnownRequests, model: str, header: memoryview, tail_bytes: int | None) -> InferRequest:
    """`parse_request`, or what it gave for the same bytes before."""
    key = (model, -1 if tail_bytes is None else tail_bytes, bytes(header))
    asked: InferRequest | None = known.find(key)
    if asked is None:
        asked = parse_request(header, tail_bytes)
        if asked.reusable:
            known.keep(key, asked)
    return asked


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
            if "data" in item:
                raise InvalidInput(f"input {shown(name)} has both data and binary_data_size")
            if type(size) is not int or size < 0:
                raise InvalidInput(
                    f"input {shown(name)}: binary_data_size is {shown(size)}, expected a number of bytes"
                )
            if tail_bytes is None:
                raise InvalidInput(
                    f"input {shown(name)} has binary_data_size, but the header Inference-Header-Content-Length is missing"
                )
            if size > tail_bytes - at:
                raise InvalidInput(
                    f"input {shown(name)}: binary_data_size is {shown(size)}, but {tail_bytes - at} bytes are left in the body"
                )
            check_size(name, datatype, shape, size)
            sources.append(InBody(at, at + size))
            at += size
    if tail_bytes is not None and at != tail_bytes:
        raise InvalidInput(f"the inputs take {at} bytes of binary data, the body has {tail_bytes}")
    return inputs, sources


def read_elements(asked: InferRequest, tail: memoryview | None, regions: Regions) -> list[Elements]:
    """The elements of the inputs. Those in shared memory are copied out of it, so that no client can change them later."""
    assert isinstance(asked.request, Request)
    elements: list[Elements] = []
    for spec, source in zip(asked.request.inputs, asked.sources, strict=True):
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
        datatype = text(parameters, "dtype", "output", name)
        outputs.append(RequestedOutput(name, datatype, text(parameters, "combiner", "output", name)))
        binary = flag(parameters, "binary_data", "output", name)
        target = span(parameters, "output", name)
        targets.append(binary if target is None else target)
    return outputs, targets


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
        raise InvalidInput(f"{place(kind, name)}: expected parameters as an object, came {shown(parameters)}")
    return parameters


def check_spans(spans: list[tuple[int, Span]], specs: list[OutputSpec], regions: Regions) -> None:
    """InvalidInput where an output does not fit the place that the client gave it; `spans` with places among `specs`."""
    for i, target in spans:
        spec = specs[i]
        regions.check(target, f"output {shown(spec.name)}")
        if target.nbytes < spec.nbytes:
            raise InvalidInput(
                f"output {shown(spec.name)}: takes {spec.nbytes} bytes, shared_memory_byte_size is {target.nbytes}"
            )


class Layout:
    """Where the outputs of a plan go, and what of the answer is known before its data. Not changed once made.

    Binary outputs lie end to end in one buffer that goes out as it is. Where no data goes into the JSON, that is ready
    and goes into the buffer before them, so that an answer is one piece of memory.
    """

    __slots__ = (
        "_document",
        "_in_json",
        "_specs",
        "begin",
        "header",
        "json_bytes",
        "known_by",
        "late",
        "places",
        "spans",
        "tail_begin",
        "tail_bytes",
    )

    def __init__(self, asked: InferRequest, model: str, plan: Plan) -> None:
        self._specs: list[OutputSpec] = plan.specs
        self.places: list[int | None] = []  # of the outputs in the buffer; None: elsewhere
        self._in_json: list[int] = []
        self.spans: list[tuple[int, Span]] = []
        self.json_bytes = 0  # of elements that go into the JSON
        self.known_by: Any = None  # whoever was told of the request with this layout
        at = 0
        binary_any = False
        outputs: list[dict[str, Any]] = []
        for i, spec in enumerate(plan.specs):
            target = None if spec.index is None else asked.targets[spec.index]
            if target is None:
                target = asked.binary_default
            output: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}
            place = None
            if isinstance(target, Span):  # neither data nor parameters: clients take either for data that is sent
                self.spans.append((i, target))
            elif target:
                output["parameters"] = {"binary_data_size": spec.nbytes}
                binary_any, place = True, at
                at += spec.nbytes
            else:
                self._in_json.append(i)
                self.json_bytes += spec.nbytes
            self.places.append(place)
            outputs.append(output)
        self.tail_bytes = at if binary_any else None
        self._document: dict[str, Any] = {"model_name": model, "model_version": str(plan.version), "outputs": outputs}
        if asked.id is not None:
            self._document["id"] = asked.id
        self.late = not all(spec.fixed for spec in plan.specs)
        self.header = None if self._in_json or self.late else orjson.dumps(self._document)
        # where the JSON begins in the buffer: the outputs behind it lie aligned, as far as malloc aligns the buffer itself
        self.begin = -len(self.header) % _ALIGNMENT if self.header is not None else 0
        self.tail_begin = 0 if self.header is None else self.begin + len(self.header)

    def check_spans(self, regions: Regions) -> None:
        """InvalidInput where an output does not fit the place that the client gave it."""
        if self.spans:
            check_spans(self.spans, self._specs, regions)

    def allocate(self) -> Answer:
        return LateAnswer(self, self._specs) if self.late else AnswerBuffer(self, self._specs, self.places)

    def binary(self) -> list[int]:
        """Outputs that go binary behind the JSON, in order."""
        return [i for i, place in enumerate(self.places) if place is not None]

    def json(self, arrays: list[npt.NDArray[Any]], sizes: dict[int, int] | None = None) -> bytes:
        """The JSON before the binary outputs; `sizes` are the bytes of those that are not known beforehand."""
        if self.header is not None:
            return self.header
        outputs = [dict(output) for output in self._document["outputs"]]
        for i, output in enumerate(outputs):
            if not self._specs[i].fixed:
                output["shape"] = arrays[i].shape
        for i in self._in_json:
            flat = arrays[i].reshape(-1)
            outputs[i]["data"] = flat.tolist() if flat.dtype.hasobject else flat
        for i, nbytes in (sizes or {}).items():
            outputs[i]["parameters"] = {"binary_data_size": nbytes}
        return orjson.dumps({**self._document, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)


class Answer(Protocol):
    """One answer being filled: `arrays` one a spec, None where it is put there by the inference."""

    arrays: list[Any]

    def encode(self, regions: Regions) -> tuple[list[bytes | memoryview], int | None]: ...


class LateAnswer:
    """An answer with outputs whose size is known only once they are there. One thread at a time."""

    def __init__(self, layout: Layout, specs: list[OutputSpec]) -> None:
        self._layout, self._specs = layout, specs
        self.arrays: list[Any] = [np.empty(spec.shape, spec.dtype) if spec.fixed else None for spec in specs]

    def encode(self, regions: Regions) -> tuple[list[bytes | memoryview], int | None]:
        """As `AnswerBuffer.encode`."""
        layout, arrays = self._layout, self.arrays
        for i, target in layout.spans:
            write_late(target, self._specs[i], arrays[i], regions)
        pieces = {i: wire_bytes(arrays[i]) for i in layout.binary()}
        header = layout.json(arrays, {i: piece.nbytes for i, piece in pieces.items()})
        if layout.tail_bytes is None:
            return [header], None
        return [header, *(piece.data for piece in pieces.values())], len(header)


def write_late(target: Span, spec: OutputSpec, array: npt.NDArray[Any], regions: Regions) -> None:
    """Write an output to shared memory whose size may not have been known before. InvalidInput where it does not fit."""
    data = wire_bytes(array)
    if target.nbytes < data.nbytes:
        raise InvalidInput(
            f"output {shown(spec.name)}: takes {data.nbytes} bytes, shared_memory_byte_size is {target.nbytes}"
        )
    regions.write(target, data)


class AnswerBuffer:
    """Memory of one answer, filled in place. One thread at a time."""

    __slots__ = ("_late", "_layout", "_memory", "arrays")

    def __init__(self, layout: Layout, specs: list[OutputSpec], places: list[int | None]) -> None:
        """`arrays`: one a spec. One that would lie unaligned in the buffer is filled apart and copied at the end."""
        self._layout = layout
        self._late: list[tuple[int, npt.NDArray[Any]]] = []  # where in the buffer, what
        self.arrays: list[npt.NDArray[Any]] = []
        self._memory: npt.NDArray[np.uint8] | None = None
        begin = layout.tail_begin
        if layout.tail_bytes is not None:
            self._memory = np.empty(begin + layout.tail_bytes, np.uint8)
        for spec, at in zip(specs, places, strict=True):
            if at is None:
                self.arrays.append(np.empty(spec.shape, spec.dtype))
            elif at % spec.dtype.itemsize == 0:
                self.arrays.append(np.ndarray(spec.shape, spec.dtype, self._memory, begin + at))
            else:
                array = np.empty(spec.shape, spec.dtype)
                self._late.append((begin + at, array))
                self.arrays.append(array)

    def encode(self, regions: Regions) -> tuple[list[bytes | memoryview], int | None]:
        """Write what goes to shared memory, and give the answer's body in pieces.

        With it the length of its JSON, if any output goes binary behind that.
        """
        memory = self._memory
        for at, array in self._late:
            assert memory is not None
            memory[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        layout = self._layout
        for i, target in layout.spans:
            regions.write(target, self.arrays[i].reshape(-1).view(np.uint8))
        header = layout.json(self.arrays)
        if memory is None:
            return [header], None
        if layout.header is None:
            return [header, memory.data], len(header)
        answer = memory.data[layout.begin :]
        answer[: len(header)] = header
        return [answer], len(header)
