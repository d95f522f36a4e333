"""Inference requests and responses of the Open Inference Protocol over gRPC: descriptions of tensors, by protobuf.

Values here are immutable. Any thread. A malformed request is InvalidInput.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from google.protobuf.message import DecodeError

from tierstore.arguments import as_version
from tierstore.errors import InvalidInput, shown
from tierstore.service.dataplane.datatypes import BYTES, DATATYPES, NUMPY_DTYPE
from tierstore.service.dataplane.plan import Plan, Request, RequestedOutput
from tierstore.service.dataplane.tensors import (
    Elements,
    TensorSpec,
    check_datatype,
    check_shape,
    check_size,
    elements_from_bytes,
    wire_bytes,
)
from tierstore.service.protocols.oip import parameters as carried
from tierstore.service.protocols.oip.shared_memory import Regions, Span, check_outputs, write_output
from tierstore.service.rpc.protobuf import RAW_OUTPUT, RESPONSE_ID, Parts, length_delimited, message_class

_Request = message_class("inference.ModelInferRequest")
_Response = message_class("inference.ModelInferResponse")


@dataclass(slots=True)
class Raw:
    """Elements in the raw tensor `index`, of `nbytes` bytes of a dtype; -1 for BYTES, whose number is free."""

    index: int
    dtype: np.dtype[Any] | None
    nbytes: int


@dataclass(slots=True)
class Typed:
    """Elements in fields of the description."""

    elements: Elements


@dataclass(slots=True)
class RpcRequest:
    """A request's description, parsed.

    `sources` say where each input's elements are, `targets` where in shared memory each requested output goes (None:
    in the response); `raws` is the required number of raw tensors.
    """

    model: str
    version: int | str | None
    request: Request
    sources: list[Raw | Typed | Span]
    targets: list[Span | None]
    raws: int
    timeout_us: int | None

    @property
    def span_bytes(self) -> int:
        """Bytes of the inputs in shared memory."""
        return sum(source.nbytes for source in self.sources if isinstance(source, Span))


def parse_request(meta: bytes, *, raw: bool) -> RpcRequest:
    """Parse the description of a request; `raw`: whether raw tensors came with it."""
    try:
        received = _Request.FromString(meta)
    except DecodeError as error:
        raise InvalidInput(f"the message is not a {_Request.DESCRIPTOR.full_name}: {error}") from error
    parameters = _values(received.parameters)
    outputs: list[RequestedOutput] = []
    targets: list[Span | None] = []
    for output in received.outputs:
        requested, target = _output(output)
        outputs.append(requested)
        targets.append(target)
    inputs: list[TensorSpec] = []
    sources: list[Raw | Typed | Span] = []
    raws = 0
    for tensor in received.inputs:
        spec, source = _input(tensor, raws if raw else None)
        inputs.append(spec)
        sources.append(source)
        raws += type(source) is Raw
    return RpcRequest(
        received.model_name,
        as_version(received.model_version or None),
        Request(inputs, outputs, carried.parameter_text(parameters, "combiner", "request", "")),
        sources,
        targets,
        raws,
        carried.timeout_us(parameters),
    )


def read_elements(parsed: RpcRequest, raw: Sequence[memoryview], regions: Regions) -> list[Elements]:
    """The elements of the inputs: views of the message if possible, copies of data in shared memory."""
    if len(raw) != parsed.raws:
        raise InvalidInput(
            f"raw_input_contents: expected {parsed.raws}, one an input that is not in shared memory; got {len(raw)}"
        )
    elements: list[Elements] = []
    for spec, source in zip(parsed.request.inputs, parsed.sources, strict=True):
        if isinstance(source, Raw):
            data = raw[source.index]
            if len(data) == source.nbytes:  # otherwise it is wrong, or of BYTES
                array = np.frombuffer(data, source.dtype)
                elements.append(array if array.flags.aligned else array.copy())
                continue
        elif isinstance(source, Span):
            data = regions.read(source, f"input {shown(spec.name)}")
        else:
            elements.append(source.elements)
            continue
        elements.append(elements_from_bytes(spec.name, spec.datatype, spec.shape, data))
    return elements


def _values(parameters: Any) -> dict[str, Any]:
    """Parameters as plain values."""
    values = {}
    for key, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is not None:
            values[key] = getattr(value, kind)
    return values


def _output(output: Any) -> tuple[RequestedOutput, Span | None]:
    name = output.name
    if not name:
        raise InvalidInput("every output needs a name")
    parameters = _values(output.parameters)
    carried.refuse_classification(parameters, name)
    datatype = carried.parameter_text(parameters, "dtype", "output", name)
    combiner = carried.parameter_text(parameters, "combiner", "output", name)
    return RequestedOutput(name, datatype, combiner), carried.span(parameters, "output", name)


def _input(tensor: Any, index: int | None) -> tuple[TensorSpec, Raw | Typed | Span]:
    """An input and the place of its elements; `index` is that of its raw tensor, None without raw tensors."""
    name = tensor.name
    if not name:
        raise InvalidInput("every input needs a name")
    spec = TensorSpec(name, check_datatype(name, tensor.datatype), check_shape(name, tuple(tensor.shape)))
    region = carried.span(_values(tensor.parameters), "input", name)
    has_contents = tensor.HasField("contents") and tensor.contents.ByteSize() > 0
    if region is not None:
        if has_contents:
            raise InvalidInput(f"input {shown(name)} has both a shared memory region and contents")
        check_size(name, spec.datatype, spec.shape, region.nbytes)
        return spec, region
    if index is None:
        return spec, Typed(_typed(spec, tensor.contents))
    if has_contents:
        raise InvalidInput(
            f"input {shown(name)} has contents, and the request has raw_input_contents: send one of them"
        )
    dtype = NUMPY_DTYPE.get(spec.datatype)
    return spec, Raw(index, dtype, -1 if dtype is None else math.prod(spec.shape) * dtype.itemsize)


def _typed(spec: TensorSpec, contents: Any) -> Elements:
    name, datatype = spec.name, spec.datatype
    field = DATATYPES[datatype].contents
    if field is None:
        raise InvalidInput(f"input {shown(name)}: {datatype} is sent in raw_input_contents")
    values = getattr(contents, field)
    count = math.prod(spec.shape)
    if len(values) != count:
        raise InvalidInput(
            f"input {shown(name)}: shape {shown(list(spec.shape))} takes {shown(count)} elements; "
            f"got {len(values)} in {field}, and no raw_input_contents"
        )
    try:
        if datatype == BYTES:
            return pa.array(list(values), pa.large_binary())
        return np.array(values, NUMPY_DTYPE[datatype])
    except (OverflowError, ValueError) as error:
        raise InvalidInput(f"input {shown(name)}: a value does not fit {datatype}: {error}") from error


class ResponseLayout:
    """The response of a plan, without its id and its data. Immutable."""

    __slots__ = ("_before", "_head", "_late", "_model", "_plan", "spans")

    def __init__(self, parsed: RpcRequest, plan: Plan) -> None:
        self._plan, self._model = plan, parsed.model
        self._late = not all(spec.fixed for spec in plan.specs)
        self.spans: list[tuple[int, Span]] = []
        self._before: list[bytes | None] = []  # bytes in front of an output's data; None: it goes elsewhere
        for i, spec in enumerate(plan.specs):
            target = None if spec.index is None else parsed.targets[spec.index]
            if target is not None:
                self.spans.append((i, target))
            self._before.append(length_delimited(RAW_OUTPUT, spec.nbytes) if target is None else None)
        self._head = b"" if self._late else self._described([spec.shape for spec in plan.specs])

    def _described(self, shapes: Sequence[tuple[int, ...]]) -> bytes:
        """The fields in front of the data: the model, and outputs of these shapes."""
        answer = _Response(model_name=self._model, model_version=str(self._plan.version))
        for spec, shape in zip(self._plan.specs, shapes, strict=True):
            answer.outputs.add(name=spec.name, datatype=spec.datatype, shape=shape)
        described: bytes = answer.SerializeToString()
        return described

    def check_spans(self, regions: Regions) -> None:
        """InvalidInput if an output does not fit the span that the client named."""
        check_outputs(self.spans, self._plan.specs, regions)

    def allocate(self) -> list[Any]:
        """An array for each planned output, None for one that is not fixed."""
        return [np.empty(spec.shape, spec.dtype) if spec.fixed else None for spec in self._plan.specs]

    def encode(self, request_id: bytes, arrays: list[npt.NDArray[Any]], regions: Regions, extra: bytes = b"") -> bytes:
        """Write outputs that go to shared memory, and return the message; `extra` are further fields of it."""
        for i, target in self.spans:
            write_output(target, self._plan.specs[i], arrays[i], regions)
        head = self._described([array.shape for array in arrays]) if self._late else self._head
        pieces: list[Any] = [head, extra]
        if request_id:
            pieces += [length_delimited(RESPONSE_ID, len(request_id)), request_id]
        for spec, before, array in zip(self._plan.specs, self._before, arrays, strict=True):
            if before is None:
                pieces.append(length_delimited(RAW_OUTPUT, 0))
            elif spec.fixed:
                pieces += [before, array]
            else:
                data = wire_bytes(array)
                pieces += [length_delimited(RAW_OUTPUT, data.nbytes), data]
        return b"".join(pieces)


def split_message(received: bytes) -> Parts:
    """The parts of a request's message; its id is checked to be text."""
    parts = Parts(received)
    try:
        parts.id.decode()
    except UnicodeDecodeError:
        raise InvalidInput("id: expected text in UTF-8") from None
    return parts
