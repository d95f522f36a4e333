"""Look-ups and predictions in the protocol's words, over any transport: named tensors in, named arrays out.

One request reads one view, so all its outputs, rows and scores, are of one version and one moment. A request's
description (`Request`) is apart from its data, and keeps its plan (`Plan`, see `plan.py`). `DataPlane` keeps no state
of a request; any number of threads may call it. What a client sends wrong is InvalidInput, NotFound, NotReady or
TooLarge, and nothing else.

    input                 datatype                     shape
    <feature>             INT64, UINT64 or BYTES       [n] or [batch, k]
    <feature>.offsets     INT64                        [bags]   the keys are [n] then
    <feature>.weights     FP32                         that of the keys
    <the dense part's>    its own                      its own

    output                datatype                     shape
    <feature>             FP32 or FP16                 [n, dim], [batch, k, dim]; pooled: [bags | batch | n, dim]
    <feature>.found       BOOL                         that of the keys
    <the dense part's>    its own                      its own

A feature with a combiner, its own or one that the request names, is pooled: a bag is an offset, or a row of [batch, k],
or one key of [n]. Inputs of the dense part that are named like a feature are its rows, which are looked up where the
graph reads them. Default outputs are those of the dense part where one is served, else every feature of the request.
`hps.py` has the form that clients of NVIDIA HPS send.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tierstore.engine.reads.device import DeviceLookup, finish_all
from tierstore.engine.reads.gather import GatheredRows
from tierstore.engine.reads.lookup import BagLookup, Lookup
from tierstore.engine.reads.view import View
from tierstore.errors import NO_VERSION, InvalidInput, NotFound, NotReady, TierstoreError, TooLarge, shown
from tierstore.predict.session import Slot
from tierstore.service.dataplane.datatypes import BYTES, VECTOR_DATATYPES
from tierstore.service.dataplane.hps import split_output
from tierstore.service.dataplane.plan import Call, Plan, Request, check_lookup_bytes, parts_of
from tierstore.service.dataplane.planner import Planner, raw_input
from tierstore.service.dataplane.tensors import Elements
from tierstore.types import NAME, head_name, model_and_head

AnyRequest: TypeAlias = Request | memoryview | Callable[[View], Request]


class Inference:
    """One request in progress: it holds a view from `DataPlane.open` to `close`. One thread at a time.

    `lookup_ns` and `dense_ns` are the nanoseconds so far in look-ups and in the dense part; `disk_ns`, a part of
    `lookup_ns`, those of reading rows that memory lacked.
    """

    __slots__ = (
        "_dense_inputs",
        "_device",
        "_gathered",
        "_lease",
        "_left_on",
        "_lookups",
        "_max_response",
        "_slot",
        "_view",
        "arrays",
        "dense_ns",
        "disk_ns",
        "lookup_ns",
        "plan",
        "raw",
    )

    def __init__(
        self, lease: Any, request: AnyRequest, max_response: int, plan_of: Callable[[View, Request], Plan]
    ) -> None:
        self._lease, self._max_response = lease, max_response
        self._lookups: list[tuple[Call, Lookup | BagLookup | DeviceLookup]] = []
        self._device: str | None = None  # on which the dense part reads rows, if not in CPU memory
        self._slot: Slot | None = None
        self._gathered: GatheredRows | None = None  # of calls that are `gathered`
        self._dense_inputs: dict[str, npt.NDArray[Any]] = {}
        self.lookup_ns = self.dense_ns = self.disk_ns = 0
        self.arrays: list[Any] = []
        self.raw: Elements = None  # the keys of a raw body
        self._view: View = lease.__enter__()
        try:
            if isinstance(request, memoryview):
                spec, self.raw = raw_input(self._view, request)
                request = Request([spec], [])
            elif not isinstance(request, Request):
                request = request(self._view)
            self._left_on = request.device
            plan = self.plan = _planned(self._view, request, plan_of)
            if plan.numbers is None:  # with `numbers` the size depends on the data
                check_lookup_bytes(plan.work_bytes, max_response)
        except BaseException as error:
            lease.__exit__(None, None, None)
            if isinstance(error, TierstoreError):
                error.version = self._view.version
            raise

    def __enter__(self) -> Inference:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TierstoreError) and error.version is None:
            error.version = self.version
        self.close()

    @property
    def view(self) -> View:
        """The view that it reads, until `close`."""
        return self._view

    def close(self) -> None:
        """Release the view."""
        self._lease.__exit__(None, None, None)

    @property
    def version(self) -> int:
        """The version that answers."""
        return self.plan.version

    def run(self, elements: Sequence[Elements], arrays: list[Any]) -> None:
        """Look up, and run the dense part.

        `elements` are those of the request's inputs. `arrays` has one for each planned output, of its shape and dtype,
        C-contiguous; or None if the output is not `fixed` or stays on a device: those are replaced.
        """
        began_ns = time.perf_counter_ns()
        self.arrays = arrays
        if self.plan.numbers is not None:
            self._begin_split(elements)
        else:
            self._begin(elements)
        self.lookup_ns = time.perf_counter_ns() - began_ns
        self._finish()

    def _begin(self, elements: Sequence[Elements]) -> None:
        """Answer from memory as much as possible."""
        checked = [(call, *parts_of(call, elements)) for call in self.plan.calls]
        dense = self.plan.dense
        if dense is not None:
            session = self._view.session
            assert session is not None
            for tensor, position in dense.inputs:
                self._dense_inputs[tensor.name] = _own_array(tensor.name, tensor.datatype, elements[position])
            self._device = self._view.rows_on(session)
            self._slot = session.acquire(dense.run, dense.hidden if self._device is None else self._hidden())
            if dense.gathered and self._device is None:
                gathering = self._view.gathering(session.bindings, dense.gathered)
                if gathering is not None:
                    keys = [elements[call.keys] for call in self.plan.calls if call.gathered]
                    self._gathered = gathering.begin(keys, dense.run.places, self._slot.memory)
        for call, offsets, weights in checked:
            if call.gathered and self._gathered is not None:
                continue
            options: dict[str, Any] = {}
            begin: Callable[..., Lookup | BagLookup | DeviceLookup] = self._view.begin
            if call.feeds is not None or call.rows:
                if self._reads_on_device(call):
                    assert call.feeds is not None
                    assert self._device is not None
                    begin, options["dtype"] = partial(self._view.begin_on_device, self._device), call.feeds.dtype
                elif self._is_left(call):
                    assert self._left_on is not None
                    begin = partial(self._view.begin_on_device, self._left_on)
                    options["dtype"] = VECTOR_DATATYPES[self.plan.specs[call.rows[0]].datatype]
                else:
                    out, options["dtype"] = self._target(call)
                    options["out"] = out if out.shape == call.shape else out.reshape(call.shape)
                if call.pooled:
                    options["offsets"] = call.starts() if offsets is None else offsets
                    options["weights"] = weights
                    options["combiner"] = call.combiner
            elif not call.found:
                continue
            self._lookups.append((call, begin(call.feature.name, elements[call.keys], **options)))

    def _begin_split(self, elements: Sequence[Elements]) -> None:
        """`_begin` of a request of an HPS client."""
        self.arrays[0], parts = split_output(self.plan, elements, self._max_response)
        dtype = VECTOR_DATATYPES[self.plan.specs[0].datatype]
        for call, keys, rows in parts:
            out: Any = rows
            self._lookups.append((call, self._view.begin(call.feature.name, keys, dtype=dtype, out=out)))

    def _hidden(self) -> list[str]:
        """The features whose rows the dense part reads in CPU memory, while it reads others on the device."""
        return [call.feature.name for call in self.plan.calls if call.hidden and not self._reads_on_device(call)]

    def _reads_on_device(self, call: Call) -> bool:
        """Whether the dense part reads a call's rows in device memory, where the look-up puts them."""
        return self._device is not None and call.hidden and not call.rows and 0 not in call.lead

    def _is_left(self, call: Call) -> bool:
        """Whether a call's rows are an answer that stays on a device."""
        return self._left_on is not None and bool(call.rows) and call.feeds is None

    def _target(self, call: Call) -> tuple[npt.NDArray[Any], str]:
        """The place and dtype of a call's rows."""
        if call.feeds is not None and call.hidden:
            assert self._slot is not None
            assert self._view.session is not None
            return self._view.session.rows_of(self._slot, call.feature.name), call.feeds.dtype
        position = call.rows[0]
        out: npt.NDArray[Any] = self.arrays[position]
        if call.feeds is not None:
            self._dense_inputs[call.feature.name] = out  # the graph reads the same memory as the output
        return out, VECTOR_DATATYPES[self.plan.specs[position].datatype]

    def _finish(self) -> None:
        """Read the pending rows from disk, run the dense part, and complete the arrays."""
        began_ns = time.perf_counter_ns()
        reads = any(lookup.pending for _, lookup in self._lookups)
        if self._gathered is not None:
            reads = reads or self._gathered.pending
            self._gathered.finish()
        finish_all([lookup for _, lookup in self._lookups if isinstance(lookup, DeviceLookup)])
        for call, lookup in self._lookups:
            rows: Any = lookup.array if isinstance(lookup, DeviceLookup) else lookup.finish()
            if self._reads_on_device(call):
                assert self._slot is not None
                assert isinstance(lookup, DeviceLookup)
                self._slot.bind(call.feature.name, lookup.address, rows)
            elif self._is_left(call):
                self.arrays[call.rows[0]] = rows.reshape(self.plan.specs[call.rows[0]].shape)
            if call.found:
                self.arrays[call.found[0]].reshape(-1)[:] = lookup.found
            if call.hidden and call.rows:  # requested in another dtype than the graph reads
                out = self.arrays[call.rows[0]]
                with np.errstate(over="ignore"):
                    out[...] = self._target(call)[0].reshape(out.shape)
        looked_up_ns = time.perf_counter_ns()
        self.lookup_ns += looked_up_ns - began_ns
        if reads:
            self.disk_ns += looked_up_ns - began_ns
        dense, session, slot = self.plan.dense, self._view.session, self._slot
        if dense is not None:
            assert session is not None
            assert slot is not None
            outputs = session.run(
                dense.run, slot, self._dense_inputs, [self.arrays[position] for position in dense.positions]
            )
            session.release(slot)
            for position, array in zip(dense.positions, outputs, strict=True):
                self.arrays[position] = array
            self._check_size(dense.positions)
            self.dense_ns += time.perf_counter_ns() - looked_up_ns

    def _check_size(self, positions: list[int]) -> None:
        late = [self.arrays[position].nbytes for position in positions if not self.plan.specs[position].fixed]
        total = self.plan.work_bytes + sum(late)
        if late and total > self._max_response:
            raise TooLarge(
                f"the answer takes {total} bytes, {self._max_response} are allowed: split the request, or raise "
                "max_response"
            )


def _own_array(name: str, datatype: str, elements: Elements) -> npt.NDArray[Any]:
    """The elements of the dense part's own input, as its session reads them."""
    if datatype != BYTES:
        array: npt.NDArray[Any] = elements
        return array
    try:
        texts: npt.NDArray[Any] = elements.cast(pa.large_string()).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise InvalidInput(f"input {name!r}: the dense part's strings are UTF-8: {error}") from error
    return texts


class DataPlane:
    """Look-ups and predictions for the transports.

    `store` is the engine's; `max_response` limits the bytes of a response and of the rows behind it.
    """

    def __init__(self, store: Any, *, max_response: int) -> None:
        self._store = store
        self._max_response = max_response
        self._planner = Planner()

    def model(self, name: str) -> Any:
        """The engine's model for the name in a request, which may be a head's.

        NotFound for a name that no model, and no head of what is served, has or can have.
        """
        name, head = model_and_head(name)
        try:
            model = self._store.model(name)
        except NotFound:
            if NAME.fullmatch(name) is None:  # it may be anything, so the message is short
                raise NotFound(f"unknown model {shown(name)}") from None
            raise
        if head and (served := model.served.views) and not any(head in view.heads for view in served):
            served[0].under(head)  # its error
        return model

    def view(self, name: str, version: int | str | None = None, route: bytes | str | None = None) -> Any:
        """The result of `Model.view`, for the name in a request. Errors as `model` and `Model.view`."""
        return self.model(name).view(version, route, model_and_head(name)[1])

    def versions(self, name: str) -> list[int]:
        """The versions that serve a model or a head, ascending."""
        views, head = self.model(name).served.views, model_and_head(name)[1]
        return sorted(view.version for view in views if not head or head in view.heads)

    def names(self) -> list[str]:
        """The names that requests may use: each model's, and those of its active version's heads."""
        return [head_name(name, head) for name in self._store.models() for head in self._heads(name)]

    def _heads(self, name: str) -> list[str]:
        active = self._store.model(name).served.active
        return sorted({"", *(() if active is None else active.heads)})

    def open(
        self, model: str, version: int | str | None, request: AnyRequest, *, route: bytes | str | None = None
    ) -> Inference:
        """Begin a request: acquire its view, which `Inference.close` releases, and plan it.

        `request` may be the raw keys of a model's only feature, in the binary form, or a function that makes the
        request for the view that will answer it. `version` is a number, a label, or None: then the active version
        answers or, by its share, the canary, and the same one for equal `route`s. The `version` of an error is the one
        that had been chosen, or NO_VERSION.
        """
        found = self.model(model)
        try:
            return self._inference(model, found.view(version, route, model_and_head(model)[1]), request)
        except (NotFound, NotReady) as error:
            if error.version is None:  # no view was acquired
                error.version = NO_VERSION
            raise

    def on(self, model: str, view: View, request: AnyRequest) -> Inference:
        """`open` on a view of the model, or of a head's model, that the caller holds until it is closed."""
        return self._inference(model, nullcontext(view.under(model_and_head(model)[1])), request)

    def _inference(self, model: str, lease: Any, request: AnyRequest) -> Inference:
        return Inference(lease, request, self._max_response, partial(self._planner.plan, model))


def _planned(view: View, request: Request, plan_of: Callable[[View, Request], Plan]) -> Plan:
    """The request's plan under the view's version: a kept one, or a new one."""
    plan = request.plan
    if plan is not None and plan.fits(view):
        return plan
    other = request.other_plan
    if other is None or not other.fits(view):
        other = plan_of(view, request)
    request.plan, request.other_plan = other, plan
    return other
