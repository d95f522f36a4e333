"""Responses to inference requests of the Open Inference Protocol over HTTP: JSON, and binary tensors behind it.

Makes the bytes of a body, independent of transports. A layout is made once for each plan, a body once for each
request; each says which threads may use it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from tierstore.service.dataplane.plan import OutputSpec, Plan
from tierstore.service.dataplane.tensors import wire_bytes
from tierstore.service.protocols.oip.json_request import InferRequest
from tierstore.service.protocols.oip.shared_memory import Regions, Span, check_outputs, write_output

VALUE = orjson.Fragment(b"\0")  # in place of a number in `texts_around`; no other part of a JSON text has this byte
_ALIGNMENT = 16  # of memory from malloc


class ResponseLayout:
    """The places of a plan's outputs, and the part of the response that is known before its data. Immutable.

    Binary outputs are end to end in one buffer, which is sent as it is. If no data go into the JSON, the JSON is
    prepared and put into the buffer in front of them, so that a response is one piece of memory.
    """

    __slots__ = (
        "_document",
        "begin",
        "header",
        "in_json",
        "late",
        "positions",
        "spans",
        "specs",
        "tail_begin",
        "tail_bytes",
    )

    def __init__(self, parsed: InferRequest, model: str, plan: Plan) -> None:
        self.specs: list[OutputSpec] = plan.specs
        self.positions: list[int | None] = []  # of the outputs in the buffer; None: elsewhere
        self.in_json: list[int] = []
        self.spans: list[tuple[int, Span]] = []
        at = 0
        binary_any = False
        outputs: list[dict[str, Any]] = []
        for i, spec in enumerate(plan.specs):
            target = None if spec.index is None else parsed.targets[spec.index]
            if target is None:
                target = parsed.binary_default
            output: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}
            position = None
            if isinstance(target, Span):  # neither data nor parameters: clients read either as data that is sent
                self.spans.append((i, target))
            elif target:
                output["parameters"] = {"binary_data_size": spec.nbytes}
                binary_any, position = True, at
                at += spec.nbytes
            else:
                self.in_json.append(i)
            self.positions.append(position)
            outputs.append(output)
        self.tail_bytes = at if binary_any else None
        self._document: dict[str, Any] = {"model_name": model, "model_version": str(plan.version), "outputs": outputs}
        if parsed.id is not None:
            self._document["id"] = parsed.id
        self.late = not all(spec.fixed for spec in plan.specs)
        self.header = None if self.in_json or self.late else orjson.dumps(self._document)
        # where the JSON begins in the buffer, so that the outputs behind it are aligned as malloc aligns the buffer
        self.begin = -len(self.header) % _ALIGNMENT if self.header is not None else 0
        self.tail_begin = 0 if self.header is None else self.begin + len(self.header)

    def check_spans(self, regions: Regions) -> None:
        """InvalidInput if an output does not fit the span that the client named."""
        if self.spans:
            check_outputs(self.spans, self.specs, regions)

    def allocate(self) -> ResponseBody:
        return LateResponse(self, self.specs) if self.late else ResponseBuffer(self, self.specs, self.positions)

    def binary(self) -> list[int]:
        """Outputs that go binary behind the JSON, in order."""
        return [i for i, position in enumerate(self.positions) if position is not None]

    def texts_around(self, shapes: list[list[Any]]) -> list[bytes]:
        """The JSON of an answer of these shapes, without an id and the closing brace, cut at its values.

        The values are each VALUE in a shape, and the bytes of each output; or its elements, if they are in the JSON. It
        is the same for all outputs.
        """
        more = {"data": VALUE} if self.in_json else {"parameters": {"binary_data_size": VALUE}}
        outputs = [
            {**output, "shape": shape, **more} for output, shape in zip(self._document["outputs"], shapes, strict=True)
        ]
        document = {**self._document, "outputs": outputs}
        document.pop("id", None)
        return orjson.dumps(document)[:-1].split(b"\0")

    def json(self, arrays: list[npt.NDArray[Any]], sizes: dict[int, int] | None = None) -> bytes:
        """The JSON in front of the binary outputs; `sizes`: the bytes of outputs that were unknown before the run."""
        if self.header is not None:
            return self.header
        outputs = [dict(output) for output in self._document["outputs"]]
        for i, output in enumerate(outputs):
            if not self.specs[i].fixed:
                output["shape"] = arrays[i].shape
        for i in self.in_json:
            flat = arrays[i].reshape(-1)
            outputs[i]["data"] = flat.tolist() if flat.dtype.hasobject else flat
        for i, nbytes in (sizes or {}).items():
            outputs[i]["parameters"] = {"binary_data_size": nbytes}
        return orjson.dumps({**self._document, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)


class ResponseBody(Protocol):
    """One response that is being filled: an array for each output, None where the inference provides it."""

    arrays: list[Any]

    def encode(self, regions: Regions) -> tuple[list[bytes | memoryview], int | None]: ...


class LateResponse:
    """A response with outputs whose size is known only after the run. One thread at a time."""

    def __init__(self, layout: ResponseLayout, specs: list[OutputSpec]) -> None:
        self._layout, self._specs = layout, specs
        self.arrays: list[Any] = [np.empty(spec.shape, spec.dtype) if spec.fixed else None for spec in specs]

    def encode(self, regions: Regions) -> tuple[list[bytes | memoryview], int | None]:
        """See `ResponseBuffer.encode`."""
        layout, arrays = self._layout, self.arrays
        for i, target in layout.spans:
            write_output(target, self._specs[i], arrays[i], regions)
        pieces = {i: wire_bytes(arrays[i]) for i in layout.binary()}
        header = layout.json(arrays, {i: piece.nbytes for i, piece in pieces.items()})
        if layout.tail_bytes is None:
            return [header], None
        return [header, *(piece.data for piece in pieces.values())], len(header)


class ResponseBuffer:
    """Memory of one response, filled in place. One thread at a time."""

    __slots__ = ("_late", "_layout", "_memory", "arrays")

    def __init__(self, layout: ResponseLayout, specs: list[OutputSpec], positions: list[int | None]) -> None:
        """`arrays`: one for each output. An output that would be unaligned in the buffer is filled apart and copied
        at the end.
        """
        self._layout = layout
        self._late: list[tuple[int, npt.NDArray[Any]]] = []  # (offset in the buffer, array)
        self.arrays: list[npt.NDArray[Any]] = []
        self._memory: npt.NDArray[np.uint8] | None = None
        begin = layout.tail_begin
        if layout.tail_bytes is not None:
            self._memory = np.empty(begin + layout.tail_bytes, np.uint8)
        for spec, at in zip(specs, positions, strict=True):
            if at is None:
                self.arrays.append(np.empty(spec.shape, spec.dtype))
            elif at % spec.dtype.itemsize == 0:
                self.arrays.append(np.ndarray(spec.shape, spec.dtype, self._memory, begin + at))
            else:
                array = np.empty(spec.shape, spec.dtype)
                self._late.append((begin + at, array))
                self.arrays.append(array)

    def encode(self, regions: Regions) -> tuple[list[bytes | memoryview], int | None]:
        """Write outputs that go to shared memory, and return the body in pieces, with the length of its JSON.

        The length is None if no output goes binary behind the JSON.
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
