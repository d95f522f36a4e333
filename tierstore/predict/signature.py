"""The inputs and outputs of a dense part: named tensors, with the datatypes of the Open Inference Protocol.

Immutable values and pure functions; any thread may use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Dim = int | str | None  # a size, a name of a size that is equal wherever the name is, or any size
Shape = tuple[int, ...]

BYTES = "BYTES"
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    BYTES: np.dtype(object),
}
_BY_ONNX = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": BYTES,
}


def datatype_of(onnx_type: str) -> str | None:
    """The protocol's datatype for an ONNX type such as `tensor(float)`; None where it has none
    (sequences, maps, bfloat16).
    """
    return _BY_ONNX.get(onnx_type)


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output. `shape` None: of any rank."""

    name: str
    datatype: str
    shape: tuple[Dim, ...] | None

    @property
    def dtype(self) -> np.dtype[Any]:
        return DTYPES[self.datatype]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape for metadata documents: -1 for sizes that are not fixed."""
        return (-1,) if self.shape is None else tuple(dim if isinstance(dim, int) else -1 for dim in self.shape)

    def shown(self) -> str:
        """The declared shape for a message."""
        return "any shape" if self.shape is None else f"[{', '.join('?' if d is None else str(d) for d in self.shape)}]"


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs, in the order of the graph.

    `unserved`: outputs that the protocol has no datatype for, and their types.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    unserved: tuple[tuple[str, str], ...] = ()
