"""The datatypes of tensors, with their names in every served protocol, as one table. Constants; any thread."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tierstore.predict.signature import BYTES as BYTES
from tierstore.predict.signature import DTYPES
from tierstore.types import KeyType


class Datatype(NamedTuple):
    """A datatype of the protocols."""

    name: str  # in the Open Inference Protocol
    contents: str | None  # the field of its InferTensorContents with elements one by one, over gRPC
    tf_number: int  # of TensorFlow's DataType
    tf_name: str
    tf_field: str  # the field of TensorFlow's TensorProto with elements one by one

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """NumPy's dtype, little-endian; None for BYTES, whose elements have any size."""
        return None if self.name == BYTES else DTYPES[self.name]


DATATYPES = {
    datatype.name: datatype
    for datatype in (
        Datatype("BOOL", "bool_contents", 10, "DT_BOOL", "bool_val"),
        Datatype("UINT8", "uint_contents", 4, "DT_UINT8", "int_val"),
        Datatype("UINT16", "uint_contents", 17, "DT_UINT16", "int_val"),
        Datatype("UINT32", "uint_contents", 22, "DT_UINT32", "uint32_val"),
        Datatype("UINT64", "uint64_contents", 23, "DT_UINT64", "uint64_val"),
        Datatype("INT8", "int_contents", 6, "DT_INT8", "int_val"),
        Datatype("INT16", "int_contents", 5, "DT_INT16", "int_val"),
        Datatype("INT32", "int_contents", 3, "DT_INT32", "int_val"),
        Datatype("INT64", "int64_contents", 9, "DT_INT64", "int64_val"),
        Datatype("FP16", None, 19, "DT_HALF", "half_val"),
        Datatype("FP32", "fp32_contents", 1, "DT_FLOAT", "float_val"),
        Datatype("FP64", "fp64_contents", 2, "DT_DOUBLE", "double_val"),
        Datatype(BYTES, "bytes_contents", 7, "DT_STRING", "string_val"),
    )
}
BY_TF_NUMBER = {datatype.tf_number: datatype for datatype in DATATYPES.values()}
NUMPY_DTYPE = {name: dtype for name, datatype in DATATYPES.items() if (dtype := datatype.dtype) is not None}

# of keys, by the table's type, the usual one first; and of answered vectors
KEY_DATATYPES = {KeyType.INT64: ("INT64", "UINT64"), KeyType.UINT64: ("UINT64", "INT64"), KeyType.STRING: (BYTES,)}
VECTOR_DATATYPES = {"FP32": "float32", "FP16": "float16"}
