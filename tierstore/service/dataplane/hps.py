"""Look-ups in the form of NVIDIA HPS's Triton backend: the keys of all tables in one input, all rows in one output.

    KEYS      INT64   [1, n]       keys of the first table, then of the second, …
    NUMKEYS   INT32   [1, tables]  how many of them are of each table
    OUTPUT0   FP32    [numbers]    rows of the first table, then of the second, …

Tables are ordered by the first feature that reads them. The size of the output depends on the values of NUMKEYS, so it
is allocated after these are read. A model that has an input of either name is looked up in the usual way. Pure
functions; any thread. A malformed request is InvalidInput.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tierstore.engine.reads.view import View
from tierstore.errors import InvalidInput, shown
from tierstore.service.dataplane.datatypes import NUMPY_DTYPE, VECTOR_DATATYPES
from tierstore.service.dataplane.plan import Call, OutputSpec, Plan, Request, RequestedOutput, check_lookup_bytes
from tierstore.service.dataplane.tensors import Elements, listed
from tierstore.types import KeyType

KEYS, NUMBERS, ROWS = "KEYS", "NUMKEYS", "OUTPUT0"
_DATATYPES = {KEYS: "INT64", NUMBERS: "INT32"}


def is_hps(view: View, request: Request) -> bool:
    """Whether a request is from an HPS client."""
    if len(request.inputs) != 2 or {tensor.name for tensor in request.inputs} != {KEYS, NUMBERS}:
        return False
    own = view.features if view.session is None else {**view.features, **view.session.bindings.plain}
    return KEYS not in own and NUMBERS not in own


def plan_hps(view: View, request: Request) -> Plan:
    """The plan of such a request: a call for each table, and `numbers`."""
    for tensor in request.inputs:
        if tensor.datatype != _DATATYPES[tensor.name]:
            raise InvalidInput(f"input {tensor.name!r}: expected {_DATATYPES[tensor.name]}, got {tensor.datatype}")
    wanted = request.outputs[0] if request.outputs else RequestedOutput(ROWS)
    if wanted.name != ROWS or len(request.outputs) > 1:
        names = shown([output.name for output in request.outputs])
        raise InvalidInput(
            f"inputs {KEYS!r} and {NUMBERS!r} are answered by the output {ROWS!r} alone, asked for {names}"
        )
    if wanted.combiner is not None or request.combiner is not None:
        raise InvalidInput(f"output {ROWS!r}: rows as they are; for bags use the names of the features")
    datatype = wanted.datatype or "FP32"
    if datatype not in VECTOR_DATATYPES:
        raise InvalidInput(f"output {ROWS!r}: dtype {shown(datatype)} is not served; request FP32 or FP16")
    position = 0 if request.inputs[0].name == KEYS else 1
    keys, numbers = request.inputs[position], request.inputs[1 - position]
    calls: dict[str, Call] = {}
    for name, feature in view.features.items():
        table = view.table_of(name)
        if feature.key_type(table) is KeyType.STRING:
            raise InvalidInput(
                f"input {KEYS!r}: table {table.name!r} has string keys, which it cannot hold; ask by the names of the "
                f"features, as {name!r}"
            )
        calls.setdefault(table.name, Call(feature, table, keys, None, position, rows=[0]))
    if math.prod(numbers.shape) != len(calls):
        raise InvalidInput(
            f"input {NUMBERS!r}: expected a number a table, {len(calls)} for {listed(calls)}; the shape is "
            f"{shown(list(numbers.shape))}"
        )
    count = math.prod(keys.shape)
    # at most: as if all keys were of the table with the longest rows
    work_bytes = count * max(call.table.dim for call in calls.values()) * NUMPY_DTYPE[datatype].itemsize
    specs = [OutputSpec(ROWS, datatype, (-1,), 0 if request.outputs else None, fixed=False)]
    return Plan.under(view, None, list(calls.values()), specs, work_bytes, count, 1 - position)


def split_output(
    plan: Plan, elements: Sequence[Elements], max_bytes: int
) -> tuple[npt.NDArray[np.generic], Iterator[tuple[Call, npt.NDArray[np.int64], npt.NDArray[np.generic]]]]:
    """(the output, flat and not filled; for each call its keys and the part of the output for their rows, [keys, dim]).

    TooLarge for an output of more than `max_bytes`.
    """
    calls, spec = plan.calls, plan.specs[0]
    assert plan.numbers is not None
    numbers = elements[plan.numbers].astype(np.int64)
    if (numbers < 0).any() or numbers.sum() != plan.keys:
        raise InvalidInput(
            f"input {NUMBERS!r}: expected how many of the {plan.keys} keys are of each table, "
            f"{listed(c.table.name for c in calls)}; got {shown(numbers.tolist())}"
        )
    sizes = numbers * [call.table.dim for call in calls]
    check_lookup_bytes(int(sizes.sum()) * spec.dtype.itemsize, max_bytes)
    answer = np.empty(int(sizes.sum()), spec.dtype)
    keys = np.split(elements[calls[0].keys], numbers.cumsum()[:-1])
    rows = np.split(answer, sizes.cumsum()[:-1])
    return answer, ((c, k, r.reshape(-1, c.table.dim)) for c, k, r in zip(calls, keys, rows, strict=True))
