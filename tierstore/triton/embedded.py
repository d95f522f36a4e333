"""A store that is open in this process: asked by arrays, and served over HTTP beside that.

One thread at a time asks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tierstore import kernels
from tierstore.access.roles import Principal, Role
from tierstore.config import load_settings
from tierstore.engine.lifecycle import directory_lock
from tierstore.engine.store import Store
from tierstore.kernels import ahead
from tierstore.service.dataplane.datatypes import BYTES, NUMPY_DTYPE
from tierstore.service.dataplane.inference import Inference
from tierstore.service.dataplane.plan import Plan, Request, RequestedOutput
from tierstore.service.dataplane.plan_cache import PlanCache
from tierstore.service.dataplane.tensors import TensorSpec
from tierstore.service.error_status import outcome_of
from tierstore.service.exchange import Exchange
from tierstore.service.limits.shedding import Caller
from tierstore.service.server import ServerThread

log = logging.getLogger(__name__)

Arrays = dict[str, npt.NDArray[Any]]
_PROTOCOL = "triton"  # the label of its requests in metrics
_CALLER = Principal("triton", Role.READER)
_DATATYPES = {dtype: name for name, dtype in NUMPY_DTYPE.items()}


class ArraysMessage:
    """A request whose tensors are arrays of this process, as a `Message` of `service/exchange.py`."""

    version = None

    def __init__(self, model: str, request: Request, elements: list[Any], nbytes: int, timeout_us: int | None) -> None:
        self.model, self.request, self.nbytes, self.timeout_us = model, request, nbytes, timeout_us
        self._elements = elements

    def parse(self) -> None:
        pass

    def opened(self, inference: Inference) -> None:
        pass

    def read(self, inference: Inference) -> tuple[list[Any], list[Any]]:
        plan = inference.plan
        left = plan.rows_alone if self.request.device else ()
        return self._elements, [
            np.empty(spec.shape, spec.dtype) if spec.fixed and place not in left else None
            for place, spec in enumerate(plan.specs)
        ]

    def encode(self, plan: Plan, arrays: list[Any]) -> Arrays:
        return {spec.name: array for spec, array in zip(plan.specs, arrays, strict=True)}


class Embedded:
    """The store, for one model. Raises Locked where another process has the directory open."""

    def __init__(self, data: Path, model: str, settings: Mapping[str, Any]) -> None:
        self._model = model
        given = load_settings(**({"port": 0} | dict(settings)), data=data, grpc_port="off")
        kernels.use_data(given.data)
        ahead.prepare(log.info)
        self._store = Store(given)
        try:
            self._server = ServerThread(self._store).start()
        except BaseException:
            self._store.close()
            raise
        directory_lock.announce(self._store.root.lock, self._server.url)
        self._requests = PlanCache()
        log.info("%s is open in this process, and served at %s", given.data, self._server.url)

    def answer(self, inputs: Arrays, outputs: Sequence[str], timeout_us: int | None, *, on_gpu: bool) -> Arrays:
        device = "gpu" if on_gpu and self._store.shared.devices.gpu.has("gpu") else None
        key = tuple((name, array.dtype, array.shape) for name, array in inputs.items()), tuple(outputs), device
        request = self._requests.find(key)
        if request is None:
            specs = [
                TensorSpec(name, _DATATYPES.get(array.dtype, BYTES), array.shape) for name, array in inputs.items()
            ]
            request = Request(specs, [RequestedOutput(name) for name in outputs], device=device)
            self._requests.keep(key, request)
        message = ArraysMessage(
            self._model,
            request,
            [_elements(array) for array in inputs.values()],
            sum(array.nbytes for array in inputs.values()),
            timeout_us,
        )
        began_ns, service = time.perf_counter_ns(), self._server.service
        outcome = "ok"
        try:
            exchange = Exchange(service, message, Caller(began_ns, principal=_CALLER))
            exchange.admit()
            return exchange.answer()
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            seconds = (time.perf_counter_ns() - began_ns) / 1e9
            service.request_times.add(_PROTOCOL, outcome, seconds)

    def check(self) -> None:
        with self._server.service.dataplane.view(self._model):
            pass

    def close(self) -> None:
        self._server.close()
        self._store.close()


def _elements(array: npt.NDArray[Any]) -> Any:
    """The elements of a tensor, flat: those of strings as an Arrow array."""
    flat = array.reshape(-1)
    return pa.array(flat, pa.large_binary()) if flat.dtype.hasobject else flat
