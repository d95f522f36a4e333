"""Predict requests and responses of TensorFlow Serving in JSON: rows (`instances`) or columns (`inputs`).

Pure functions; any thread. A malformed request is InvalidInput. Like TensorFlow Serving, and unlike JSON, the numbers
NaN, Infinity and -Infinity are allowed in both.

In the row form the values of one input are stacked along a first dimension. Where they are lists of different lengths,
and keys of a feature whose bags are pooled, they are flattened, and their starts become the feature's offsets.

Source: the RESTful API page of TensorFlow Serving, and the behaviour of its server.
"""

from __future__ import annotations

import binascii
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from tierstore.errors import InvalidInput, shown
from tierstore.service.dataplane.datatypes import BYTES
from tierstore.service.dataplane.plan import OutputSpec
from tierstore.service.dataplane.tensors import MAX_RANK, Elements, TensorSpec, elements_from_list, flatten
from tierstore.service.dataplane.view import TensorInfo
from tierstore.service.protocols.tfserving.request import Tensor
from tierstore.service.protocols.tfserving.signature import ServedSignatures, check_signature

_encode64 = np.frompyfunc(lambda text: {"b64": binascii.b2a_base64(text.encode(), newline=False).decode()}, 1, 1)
_decode64: Callable[[str], bytes] = partial(binascii.a2b_base64, strict_mode=True)


@dataclass(slots=True)
class PredictBody:
    """A request's JSON, its values not parsed further. `rows`: the row form.

    `picked`: requested outputs by name, or None.
    """

    signature: str
    picked: list[str] | None
    rows: bool
    values: Any


def parse_predict(body: bytes | memoryview) -> PredictBody:
    """Parse a predict request. `tensors_of` checks whether its inputs fit a model."""
    document = _loads(body)
    if not isinstance(document, dict):
        raise InvalidInput("expected the request as a JSON object")
    signature = check_signature(document.get("signature_name"))
    picked = document.get("output_filter")
    if picked is not None and not (isinstance(picked, list) and set(map(type, picked)) <= {str}):
        raise InvalidInput(f"output_filter: expected a list of output names, got {shown(picked)}")
    rows, columns = document.get("instances"), document.get("inputs")
    if (rows is None) == (columns is None):
        raise InvalidInput(
            "expected either 'instances' (a list, one value a row) or 'inputs' (a value an input), "
            + ("got neither" if rows is None else "got both")
        )
    if rows is not None and not (isinstance(rows, list) and rows):
        raise InvalidInput(f"instances: expected a list of at least one value, got {shown(rows)}")
    return PredictBody(signature, picked, rows is not None, columns if rows is None else rows)


def _loads(body: bytes | memoryview) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raw, why = bytes(body), str(error)
        if b"NaN" in raw or b"Infinity" in raw:
            try:
                return json.loads(raw, parse_float=_finite)
            except OverflowError as beyond:
                why = str(beyond)
            except (ValueError, RecursionError):
                pass  # the first parser has reported the error
        raise InvalidInput(f"the request is not valid JSON: {why}") from error


def _finite(text: str) -> float:
    """A number of JSON. OverflowError for one beyond every datatype, which differs from an infinite one."""
    value = float(text)
    if math.isinf(value):
        raise OverflowError(f"the number {text[:40]} is beyond FP64")
    return value


def tensors_of(body: PredictBody, signature: ServedSignatures) -> list[Tensor]:
    """The request's inputs, with their elements."""
    return _of_rows(body.values, signature) if body.rows else _of_columns(body.values, signature)


# --- columns


def _of_columns(values: Any, signature: ServedSignatures) -> list[Tensor]:
    if not isinstance(values, dict) or _is_base64(values):
        values = {signature.only_input: values}
    return [_even(signature.input(name), value) for name, value in values.items()]


def _even(info: TensorInfo, value: Any) -> Tensor:
    """The tensor made of evenly nested lists."""
    if type(value) is not list:
        raise InvalidInput(f"input {shown(info.name)}: expected a list, got {shown(value)}")
    flat, shape = flatten(info.name, value, MAX_RANK)
    return TensorSpec(info.name, info.datatype, shape), _elements(info, shape, flat)


# --- rows


def _of_rows(rows: list[Any], signature: ServedSignatures) -> list[Tensor]:
    columns = _columns(rows, signature)
    lengths = {name: _ragged(values) for name, values in columns.items() if _may_be_ragged(name, signature)}
    tensors: list[Tensor] = []
    for name, values in columns.items():
        info = signature.input(name)
        feature, _, part = name.partition(".")
        if part == "offsets" and feature in signature.features:
            raise InvalidInput(f"input {shown(name)}: in the row form each row's list of keys is its bag; leave it out")
        counts = lengths.get(feature)
        if counts is None or part not in ("", "weights"):
            tensors.append(_even(info, values))
        elif not part:
            tensors.append(_flat(info, values))
            offsets = np.zeros(len(counts), np.int64)
            np.cumsum(counts[:-1], out=offsets[1:])
            tensors.append((TensorSpec(f"{name}.offsets", "INT64", (len(counts),)), offsets))
        else:
            own = _ragged(values, even_too=True)
            if own is None or not np.array_equal(own, counts):
                raise InvalidInput(f"input {shown(name)}: expected one weight a key in every row")
            tensors.append(_flat(info, values))
    return tensors


def _columns(rows: list[Any], signature: ServedSignatures) -> dict[str, list[Any]]:
    """The values of each input, one for each row."""
    first = rows[0]
    if type(first) is not dict or _is_base64(first):
        return {signature.only_input: rows}
    if set(map(type, rows)) != {dict}:
        raise InvalidInput("instances: expected objects alone, or values alone, got both")
    if set(map(len, rows)) != {len(first)}:
        raise InvalidInput("instances: expected the same inputs in every row")
    try:
        return {name: list(map(itemgetter(name), rows)) for name in first}
    except KeyError as error:
        raise InvalidInput(f"instances: a row lacks input {shown(error.args[0])}, which the first row has") from error


def _may_be_ragged(name: str, signature: ServedSignatures) -> bool:
    feature = signature.features.get(name)
    return feature is not None and feature.combiner is not None


def _ragged(values: list[Any], *, even_too: bool = False) -> npt.NDArray[np.int64] | None:
    """Lengths of the rows' lists, if they are lists of different lengths."""
    if set(map(type, values)) != {list}:
        return None
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    return lengths if even_too or (lengths != lengths[0]).any() else None


def _flat(info: TensorInfo, values: list[list[Any]]) -> Tensor:
    flat = list(chain.from_iterable(values))
    shape = (len(flat),)
    return TensorSpec(info.name, info.datatype, shape), _elements(info, shape, flat)


# --- elements


def _elements(info: TensorInfo, shape: tuple[int, ...], flat: list[Any]) -> Elements:
    if info.datatype == BYTES and dict in set(map(type, flat)):
        return _strings(info.name, flat)
    return elements_from_list(info.name, info.datatype, shape, flat)


def _is_base64(value: Any) -> bool:
    return type(value) is dict and len(value) == 1 and type(value.get("b64")) is str


def _strings(name: str, flat: list[Any]) -> Elements:
    """Strings, some or all of them as `{"b64": …}`."""
    every = np.empty(len(flat), object)
    every[:] = flat
    coded = np.fromiter(map(isinstance, flat, repeat(dict)), bool, len(flat))
    codes = every[coded].tolist()
    if set(map(tuple, codes)) != {("b64",)} or {*map(type, every[~coded].tolist())} - {str}:
        raise InvalidInput(f'input {shown(name)}: expected strings, or {{"b64": …}} with base64 of their bytes')
    try:
        every[coded] = list(map(_decode64, map(itemgetter("b64"), codes)))
        every[~coded] = list(map(str.encode, every[~coded].tolist()))
        return pa.array(every.tolist(), pa.large_binary())
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"input {shown(name)}: a b64 value is not base64: {error}") from error


# --- answers


def encode_answer(rows: bool, specs: Sequence[OutputSpec], arrays: Sequence[npt.NDArray[Any]]) -> bytes:
    """The body of the response. InvalidInput if the row form is requested and outputs are not one value a row."""
    if rows:
        sizes = [len(array) if array.ndim else -1 for array in arrays]
        if len(set(sizes)) != 1 or sizes[0] < 0:
            named = ", ".join(f"{spec.name} {list(array.shape)}" for spec, array in zip(specs, arrays, strict=True))
            raise InvalidInput(
                f"the outputs do not have a first dimension in common, so they form no rows: {named}; ask in the "
                "column form ('inputs')"
            )
    names = [spec.name for spec in specs]
    if all(array.dtype.kind != "f" or bool(np.isfinite(array).all()) for array in arrays):
        by_row = rows and len(arrays) > 1
        columns = [_column(name, array, by_row=by_row) for name, array in zip(names, arrays, strict=True)]
        return orjson.dumps(_document(rows, names, columns), option=orjson.OPT_SERIALIZE_NUMPY)
    # rare, so the numbers may be longer than necessary
    columns = [_texts(name, array).tolist() for name, array in zip(names, arrays, strict=True)]
    return json.dumps(_document(rows, names, columns)).encode()


def _column(name: str, array: npt.NDArray[Any], *, by_row: bool) -> Any:
    """An output in a form for orjson; `by_row`: a list of its rows."""
    if array.dtype.hasobject:
        return _texts(name, array).tolist()
    if by_row:
        return list(array)
    return array if array.ndim else array[()]


def _texts(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Strings in the form for sending: in base64 if the output's name says that they are bytes."""
    coded = array.dtype.hasobject and name.endswith("_bytes")
    texts: npt.NDArray[Any] = _encode64(array) if coded else array
    return texts


def _document(rows: bool, names: list[str], columns: list[Any]) -> dict[str, Any]:
    if len(names) == 1:
        return {"predictions" if rows else "outputs": columns[0]}
    if not rows:
        return {"outputs": dict(zip(names, columns, strict=True))}
    return {"predictions": list(map(dict, map(zip, repeat(names), zip(*columns, strict=True))))}
