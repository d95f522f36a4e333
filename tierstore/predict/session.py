"""A dense part, ready to run: one session of ONNX Runtime and the buffers that rows are looked up into.

Any number of threads may run one session at once; each run has a `Slot` of its own, from a bounded pool. The session
lives as long as there are references to it. Nothing here survives a crash.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import InferenceError, InvalidInput, Overloaded, TierstoreError
from tierstore.kernels.codec import address_of
from tierstore.predict.binding import Bindings, Run
from tierstore.predict.limits import SessionLimits
from tierstore.predict.placement import ON_CPU, Placement
from tierstore.predict.signature import BYTES, Shape, Signature

Array = npt.NDArray[Any]
_KEPT_PLANS = 64
_KEPT_SLOTS = 1024  # whatever their bytes: a binding uses memory as well
_ALIGNMENT = 64  # bytes: a cache line, and good for vector instructions
_OURS = ("EP_FAIL", "ENGINE_ERROR", "NOT_IMPLEMENTED")
_NO_MEMORY = ("bad_alloc", "allocate memory", "bad allocation", "smaller than requested bytes")
_OTHER_SHAPE = ("shape verification failed", "pre-allocated")  # of an output that was bound to an array


class DenseCounts:
    """Counts of a model's runs, over all its versions, so that they only grow. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = self._failed = 0
        self._seconds = 0.0

    def add(self, seconds: float, *, failed: bool) -> None:
        with self._lock:
            self._runs += 1
            self._failed += failed
            self._seconds += seconds

    def as_dict(self) -> dict[str, float]:
        """`runs` (including failed ones), `failed`, and `seconds` within ONNX Runtime."""
        with self._lock:
            return {"runs": self._runs, "failed": self._failed, "seconds": self._seconds}


class Slot:
    """Memory of one run, and the binding that points to it. One thread at a time.

    `arrays` are float32 or float16 of the shapes in which the inputs of these names are bound: look rows up into them.
    `bound` are rows that lie on the session's device, by input: their address, and what keeps them there.
    """

    __slots__ = ("arrays", "binding", "bound", "key", "nbytes")

    def __init__(self, key: tuple[Any, ...], arrays: Mapping[str, Array], binding: Any) -> None:
        self.key, self.arrays, self.binding = key, arrays, binding
        self.bound: dict[str, tuple[int, Any]] = {}
        self.nbytes = sum(array.nbytes for array in arrays.values())

    def bind(self, name: str, address: int, owner: Any) -> None:
        """Let an input be read at an address of the session's device. `owner` is held until the slot is released."""
        self.bound[name] = address, owner


class DenseSession:
    """One dense part. `bindings` and `signature` are constant; warm-up sets `loose` before it serves."""

    def __init__(
        self,
        session: Any,
        bindings: Bindings,
        buffers_bytes: int,
        counts: DenseCounts,
        limits: SessionLimits,
        placement: Placement = ON_CPU,
    ) -> None:
        self.bindings, self.limits, self._placement = bindings, limits, placement
        self.signature: Signature = bindings.signature
        self.loose: frozenset[str] = frozenset()  # outputs whose shapes differ from those declared
        self.warmed = 0  # requests run before it serves
        self._session, self._counts, self._limit = session, counts, buffers_bytes
        self._bindable = all(tensor.datatype != BYTES for tensor in self.signature.inputs)
        # A binding to a GPU copies CPU memory when it is bound, not when it is run: then rows must be there before.
        self._bind_late = placement is not ON_CPU
        self._plans: dict[tuple[Any, ...], Run] = {}  # of the latest shapes; threads that race set equal ones
        self._lock = threading.Lock()
        # guarded by _lock
        self._free: OrderedDict[tuple[Any, ...], list[Slot]] = OrderedDict()
        self._free_bytes = self._free_slots = 0

    def plan(self, leads: Mapping[str, Shape], shapes: Mapping[str, Shape], wanted: Sequence[str] = ()) -> Run:
        """`Bindings.plan` for these outputs, by default all."""
        key = (*leads.items(), None, *shapes.items(), None, *wanted, self.loose)
        run = self._plans.get(key)
        if run is None:
            run = self.bindings.plan(leads, shapes, wanted or tuple(self.bindings.outputs), self.loose)
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            self._plans[key] = run
        return run

    def sizes(self, name: str) -> Shape:
        """The shape of an output for metadata documents, with -1 for sizes that are not fixed."""
        sizes = self.bindings.outputs[name].sizes
        return (-1,) * len(sizes) if name in self.loose else sizes

    def is_fixed(self, name: str, shape: Shape | None) -> bool:
        """Whether an output of a planned `shape` can be written into the caller's array."""
        return shape is not None and -1 not in shape and self.bindings.outputs[name].datatype != BYTES

    @property
    def rows_on(self) -> str | None:
        """The device (`gpu:0`) on which rows may be bound to a run; None: rows come in CPU memory."""
        return self._placement.device if self._bindable else None

    # --- buffers

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are kept for reuse, at most the setting `dense_buffers`."""
        return self._free_bytes

    def acquire(self, run: Run, hidden: Sequence[str]) -> Slot:
        """A slot with an array for each of the feature inputs `hidden`. `release` it after the run.

        Rows of other features are `inputs` of the run or, where they are on the device, `bound` to the slot.
        """
        key = tuple((name, run.inputs[name]) for name in hidden)
        with self._lock:
            kept = self._free.get(key)
            if kept:
                slot = kept.pop()
                self._free_bytes -= slot.nbytes
                self._free_slots -= 1
                if not kept:
                    del self._free[key]
                return slot
        arrays = {name: _aligned(run.inputs[name], self.bindings.features[name].tensor.dtype) for name in hidden}
        binding = self._session.io_binding() if self._bindable else None
        if binding is not None and not self._bind_late:
            for name, array in arrays.items():
                binding.bind_input(name, "cpu", 0, array.dtype, array.shape, address_of(array))
        return Slot(key, arrays, binding)

    def release(self, slot: Slot) -> None:
        """Keep a slot for the next run of its shapes. Where there is no room, the slots unused for longest go."""
        if slot.binding is not None:
            slot.binding.clear_binding_outputs()
            if self._bind_late:
                slot.binding.clear_binding_inputs()  # they hold memory of the device
        slot.bound.clear()
        with self._lock:
            if slot.nbytes > self._limit:
                return
            while self._free_bytes + slot.nbytes > self._limit or self._free_slots >= _KEPT_SLOTS:
                shapes, slots = next(iter(self._free.items()))
                self._free_bytes -= slots.pop().nbytes
                self._free_slots -= 1
                if not slots:
                    del self._free[shapes]
            self._free.setdefault(slot.key, []).append(slot)
            self._free.move_to_end(slot.key)
            self._free_bytes += slot.nbytes
            self._free_slots += 1

    # --- runs

    def run(self, run: Run, slot: Slot, inputs: Mapping[str, Array], outputs: Sequence[Array | None]) -> list[Array]:
        """Run the graph once. Returns an array for each of the planned outputs.

        Args:
            slot: whose arrays are filled. inputs: the other inputs, C-contiguous, of their declared dtypes and planned
                numbers of elements; object arrays of str for strings.
            outputs: one a planned output: a C-contiguous array of its shape and dtype to write into, or None where
                `is_fixed` is false.

        Raises InvalidInput where the graph cannot be run on these inputs, InferenceError where the request is not the reason.
        """
        began_s = time.perf_counter()
        failed = True
        try:
            if slot.binding is not None and (slot.bound or all(array is not None for array in outputs)):
                answer = self._run_bound(run, slot, inputs, outputs)
            else:
                answer = self._run_free(run, slot, inputs, outputs)
            failed = False
        except TierstoreError:
            raise
        except Exception as error:  # ONNX Runtime has a class a status, and a bound run raises RuntimeError alone
            if any(mark in str(error) for mark in _OTHER_SHAPE):
                self._probe_bound(run, slot, inputs) if slot.bound else self.probe(run, {**slot.arrays, **inputs})
                raise InferenceError(
                    f"an output of the dense part has another shape than it declares ({_short(str(error))}); try again: its shape is not relied on any more"
                ) from error
            raise self._translated(error) from error
        finally:
            self._counts.add(time.perf_counter() - began_s, failed=failed)
        return answer

    def _run_bound(
        self, run: Run, slot: Slot, inputs: Mapping[str, Array], outputs: Sequence[Array | None]
    ) -> list[Array]:
        """Run with bound memory: rows are read where the look-up has put them, outputs are written into the caller's arrays."""
        bind, place = slot.binding, self._placement
        for name, array in (*slot.arrays.items(), *inputs.items()) if self._bind_late else inputs.items():
            bind.bind_input(name, "cpu", 0, array.dtype, run.inputs[name], address_of(array))
        for name, (address, _) in slot.bound.items():
            # The look-up has waited for its own stream: the rows are there, whichever stream reads them.
            bind.bind_input(
                name, place.memory, place.number, self.bindings.features[name].tensor.dtype, run.inputs[name], address
            )
        for name, out in zip(run.outputs, outputs, strict=True):
            if out is None:
                bind.bind_output(name, "cpu")  # ONNX Runtime's own memory, once the size is known
            else:
                bind.bind_output(name, "cpu", 0, out.dtype, out.shape, address_of(out))
        if self._bind_late:
            bind.synchronize_inputs()
        with self.limits.run() as options:
            self._session.run_with_iobinding(bind, options)
        if self._bind_late:
            bind.synchronize_outputs()
        if not any(out is None for out in outputs):
            return [out for out in outputs if out is not None]
        results = bind.get_outputs()
        return [value.numpy().copy() if out is None else out for value, out in zip(results, outputs, strict=True)]

    def _run_free(
        self, run: Run, slot: Slot, inputs: Mapping[str, Array], outputs: Sequence[Array | None]
    ) -> list[Array]:
        """Run without bound memory: for strings, which cannot be bound, and for outputs whose size is known after the run."""
        feed = {name: array.reshape(run.inputs[name]) for name, array in (*slot.arrays.items(), *inputs.items())}
        with self.limits.run() as options:
            results = self._session.run(list(run.outputs), feed, options)
        answer: list[Array] = []
        for name, planned, result, out in zip(run.outputs, run.shapes, results, outputs, strict=True):
            if out is None:
                answer.append(result)
                continue
            if out.shape != result.shape:
                self.loose |= {name}
                raise InferenceError(
                    f"output {name!r}: expected shape {list(planned or ())}, as the dense part declares it, got {list(result.shape)}; "
                    "try again: its shape is not relied on any more"
                )
            out[...] = result
            answer.append(out)
        return answer

    def probe(self, run: Run, feed: Mapping[str, Array]) -> None:
        """Run once with all inputs, and remember the outputs whose shapes differ from those declared.

        For warm-up, before the session serves. Raises as `run`.
        """
        try:
            arrays = {name: array.reshape(run.inputs[name]) for name, array in feed.items()}
            with self.limits.run() as options:
                results = self._session.run(list(run.outputs), arrays, options)
        except TierstoreError:
            raise
        except Exception as error:
            raise self._translated(error) from error
        self._compare(run, results)

    def _probe_bound(self, run: Run, slot: Slot, inputs: Mapping[str, Array]) -> None:
        """`probe`, with rows on the device."""
        try:
            slot.binding.clear_binding_outputs()
            results = self._run_bound(run, slot, inputs, [None] * len(run.outputs))
        except TierstoreError:
            raise
        except Exception as error:
            raise self._translated(error) from error
        self._compare(run, results)

    def _compare(self, run: Run, results: Sequence[Array]) -> None:
        for name, planned, result in zip(run.outputs, run.shapes, results, strict=True):
            if planned is not None and (
                len(planned) != result.ndim
                or any(size not in (-1, got) for size, got in zip(planned, result.shape, strict=True))
            ):
                self.loose |= {name}

    def _translated(self, error: Exception) -> TierstoreError:
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError) or any(mark in text for mark in _NO_MEMORY):
            self.limits.ran_out()
            return Overloaded(f"there is no memory to run the dense part on these inputs: {_short(text)}")
        if any(mark in text for mark in _OURS):
            return InferenceError(f"ONNX Runtime failed: {_short(text)}")
        return InvalidInput(f"the dense part cannot be run on these inputs: {_short(text)}")


def _aligned(shape: Shape, dtype: np.dtype[Any]) -> Array:
    memory = np.empty(math.prod(shape) * dtype.itemsize + _ALIGNMENT, np.uint8)
    skip = -address_of(memory) % _ALIGNMENT
    return np.ndarray(shape, dtype, memory, skip)


def _short(text: str) -> str:
    for mark in ("Status Message: ", " : "):
        text = text.rpartition(mark)[2] or text
    return text if len(text) <= 300 else text[:299] + "…"
