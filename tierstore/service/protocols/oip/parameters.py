"""Parameters of requests, inputs and outputs of the Open Inference Protocol, over any transport.

Pure functions of a name → value mapping, as JSON or protobuf gives it; any thread. A parameter with a wrong value is
InvalidInput; an unknown one is ignored, as the protocol says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from tierstore.errors import InvalidInput, shown
from tierstore.service.protocols.oip.shared_memory import Span

Parameters: TypeAlias = Mapping[str, Any]

_EXPECTED = {"dtype": "FP32 or FP16", "combiner": "sum, mean or sqrtn"}


def named(kind: str, name: str) -> str:
    """Names the owner of parameters in a message: an input, an output, the request."""
    return f"{kind} {shown(name)}" if name else f"the {kind}"


def flag(parameters: Parameters, key: str, kind: str, name: str) -> bool | None:
    value = parameters.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidInput(f"{named(kind, name)}: parameter {key} is {shown(value)}, expected true or false")
    return value


def parameter_text(parameters: Parameters, key: str, kind: str, name: str) -> str | None:
    value = parameters.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"{named(kind, name)}: parameter {key} is {shown(value)}, expected {_EXPECTED[key]}")
    return value


def span(parameters: Parameters, kind: str, name: str) -> Span | None:
    """The span of shared memory with a tensor; None if the tensor is in the request."""
    region = parameters.get("shared_memory_region")
    if region is None:
        return None
    if not isinstance(region, str) or not region:
        raise InvalidInput(f"{kind} {shown(name)}: shared_memory_region is {shown(region)}, expected a name")
    sizes = parameters.get("shared_memory_offset", 0), parameters.get("shared_memory_byte_size")
    for key, value in zip(("shared_memory_offset", "shared_memory_byte_size"), sizes, strict=True):
        if type(value) is not int or value < 0:
            raise InvalidInput(f"{kind} {shown(name)}: {key} is {shown(value)}, expected a number of bytes")
    offset, nbytes = sizes
    assert isinstance(nbytes, int)
    return Span(region, offset, nbytes)


def refuse_classification(parameters: Parameters, name: str) -> None:
    """InvalidInput if an output is requested as classes."""
    if parameters.get("classification"):
        raise InvalidInput(f"output {shown(name)}: the classification extension is not served")


def timeout_us(parameters: Parameters) -> int | None:
    """Microseconds from the request's arrival after which the answer is of no use; None for no limit."""
    value = parameters.get("timeout")
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise InvalidInput(f"the request: parameter timeout is {shown(value)}, expected a number of microseconds")
    return value or None
