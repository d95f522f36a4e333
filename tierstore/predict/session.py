"""A dense part, ready to run: one session of ONNX Runtime and the buffers that rows are looked up into.

Any number of threads may run one session at once; each run has a `Slot` of its own, from a bounded pool. The session
lives as long as there are references to it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import InferenceError, InvalidInput, Overloaded, TierstoreError
from tierstore.kernels.codec import address_of
from tierstore.predict.binding import ALIGNMENT, Bindings, FeatureInput, Run, Structure
from tierstore.predict.limits import SessionLimits
from tierstore.predict.provider import ON_CPU, DenseProvider
from tierstore.predict.signature import BYTES, Shape, Signature

Array = npt.NDArray[Any]
KEPT_BYTES = 64 << 20  # of row buffers, for reuse
_KEPT_PLANS = 256
_KEPT_SLOTS = 1024  # whatever their bytes
_COPIED_BYTES = 64 << 10  # of outputs, up to which they are copied
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
    """Memory of one run. One thread at a time.

    `memory` is a buffer in which each feature has its place, as `run.places` says: look the rows of those in `hidden`
    up into it. `bound` are rows that lie on the session's device, by input: their address, and what keeps them there.
    """

    __slots__ = ("_arrays", "_whole", "bound", "hidden", "memory", "run")

    def __init__(self) -> None:
        self.bound: dict[str, tuple[int, Any]] = {}
        self._resize(0)

    def _resize(self, nbytes: int) -> None:
        self._whole = np.empty(nbytes + ALIGNMENT, np.uint8)
        skip = -address_of(self._whole) % ALIGNMENT
        self.memory = self._whole[skip : skip + nbytes]
        self.run: Run | None = None
        self.hidden: Sequence[str] = ()
        self._arrays: dict[str, Array] | None = None

    def prepare(self, run: Run, hidden: Sequence[str]) -> None:
        """Have room for a run, whose features in `hidden` are looked up here."""
        if self.memory.nbytes < run.buffer_bytes:
            self._resize(run.buffer_bytes)
        if self.run is not run or self.hidden != hidden:
            self.run, self.hidden, self._arrays = run, hidden, None

    def arrays(self, features: Mapping[str, FeatureInput]) -> dict[str, Array]:
        """The places of the `hidden` features, as arrays of the shapes in which the graph reads them."""
        if self._arrays is None:
            assert self.run is not None
            self._arrays = {
                name: np.ndarray(self.run.inputs[name], feature.tensor.dtype, self.memory, at)
                for (name, feature), (_, at) in zip(features.items(), self.run.places.tolist(), strict=True)
                if name in self.hidden
            }
        return self._arrays

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes - ALIGNMENT

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
        provider: DenseProvider = ON_CPU,
    ) -> None:
        self.bindings, self.limits, self._provider = bindings, limits, provider
        self.signature: Signature = bindings.signature
        self.loose: frozenset[str] = frozenset()  # outputs whose shapes differ from those declared
        self._answered: dict[str, Shape] = {}  # their shapes in warm-up runs, with -1 for sizes that differed
        self.warmed = 0  # requests run before it serves
        self._session, self._counts, self._limit = session, counts, buffers_bytes
        self._bindable = all(tensor.datatype != BYTES for tensor in self.signature.inputs)
        self._on_device = provider is not ON_CPU
        # of the latest shapes and structures; threads that race set equal ones
        self._plans: dict[tuple[Any, ...], Run] = {}
        self._structures: dict[tuple[Any, ...], Structure] = {}
        self._lock = threading.Lock()
        # guarded by _lock
        self._free: deque[Slot] = deque()  # the last one was used last
        self._free_bytes = 0

    def plan(self, leads: Mapping[str, Shape], shapes: Mapping[str, Shape], wanted: Sequence[str] = ()) -> Run:
        """`Bindings.plan` for these outputs, by default all."""
        key = (*leads.items(), None, *shapes.items(), None, *wanted, self.loose)
        run = self._plans.get(key)
        if run is None:
            run = self._planned(leads, shapes, wanted or tuple(self.bindings.outputs), self.loose)
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            self._plans[key] = run
        return run

    def _planned(
        self, leads: Mapping[str, Shape], shapes: Mapping[str, Shape], wanted: Sequence[str], loose: frozenset[str]
    ) -> Run:
        key = (*leads, None, *map(len, leads.values()), *shapes, None, *map(len, shapes.values()), *wanted, loose)
        structure = self._structures.get(key)
        if structure is None:
            run = self.bindings.plan(leads, shapes, wanted, loose)
            if len(self._structures) >= _KEPT_PLANS:
                self._structures.clear()
            self._structures[key] = Structure(self.bindings, leads, shapes, wanted, loose)
            return run
        return structure.plan(leads, shapes) or self.bindings.plan(leads, shapes, wanted, loose)

    def sizes(self, name: str) -> Shape:
        """The shape of an output for metadata documents, with -1 for sizes that are not fixed."""
        sizes = self.bindings.outputs[name].sizes
        return self._answered.get(name, (-1,) * len(sizes) if name in self.loose else sizes)

    @property
    def answers_other_shapes(self) -> bool:
        """Whether an output was seen with a shape that is not as the graph declares it, or that it does not declare."""
        return bool(self._answered)

    def is_fixed(self, name: str, shape: Shape | None) -> bool:
        """Whether an output of a planned `shape` can be written into the caller's array."""
        return shape is not None and -1 not in shape and self.bindings.outputs[name].datatype != BYTES

    @property
    def rows_on(self) -> str | None:
        """The device (`gpu:0`) on which rows may be bound to a run; None: rows come in CPU memory."""
        return self._provider.device if self._bindable else None

    # --- buffers

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are kept for reuse, at most `KEPT_BYTES`."""
        return self._free_bytes

    def acquire(self, run: Run, hidden: Sequence[str]) -> Slot:
        """A slot with a place for each of the feature inputs `hidden`. `release` it after the run.

        Rows of other features are `inputs` of the run or, where they are on the device, `bound` to the slot.
        """
        slot = None
        if run.buffer_bytes <= self._limit:
            with self._lock:
                if self._free:
                    slot = self._free.pop()
                    self._free_bytes -= slot.nbytes
        slot = slot or Slot()
        slot.prepare(run, hidden)
        return slot

    def rows_of(self, slot: Slot, name: str) -> Array:
        """The place of a feature's rows in a slot, in the shape in which the graph reads them."""
        return slot.arrays(self.bindings.features)[name]

    def release(self, slot: Slot) -> None:
        """Keep a slot for the next run. Where there is no room, those unused for longest go."""
        slot.bound.clear()
        with self._lock:
            if slot.nbytes > self._limit:
                return
            while self._free_bytes + slot.nbytes > self._limit or len(self._free) >= _KEPT_SLOTS:
                self._free_bytes -= self._free.popleft().nbytes
            self._free.append(slot)
            self._free_bytes += slot.nbytes

    # --- runs

    def run(
        self, run: Run, slot: Slot, inputs: Mapping[str, Array], outputs: Sequence[Array | None] | None = None
    ) -> list[Array]:
        """Run the graph once. Returns an array for each of the planned outputs.

        Args:
            slot: whose arrays are filled. inputs: the other inputs, C-contiguous, of their declared dtypes and planned
                numbers of elements; object arrays of str for strings.
            outputs: one a planned output: a C-contiguous array of its shape and dtype to write into, or None where
                `is_fixed` is false. None in place of all: they are made here.

        Raises InvalidInput where the graph cannot be run on these inputs, InferenceError where
        the request is not the reason.
        """
        began_s = time.perf_counter()
        failed = True
        try:
            if self._binds(run, slot):
                if outputs is None:
                    outputs = [
                        np.empty(shape or (), self.bindings.outputs[name].dtype) if self.is_fixed(name, shape) else None
                        for name, shape in zip(run.outputs, run.shapes, strict=True)
                    ]
                answer = self._run_bound(run, slot, inputs, outputs)
            else:
                answer = self._run_free(run, slot, inputs, outputs or (None,) * len(run.outputs))
            failed = False
        except TierstoreError:
            raise
        except Exception as error:  # ONNX Runtime has a class a status, and a bound run raises RuntimeError alone
            if any(mark in str(error) for mark in _OTHER_SHAPE):
                self._probe_bound(run, slot, inputs) if slot.bound else self.probe(
                    run, {**slot.arrays(self.bindings.features), **inputs}
                )
                raise InferenceError(
                    f"an output of the dense part has another shape than it declares ({_short(str(error))}); try "
                    "again: its shape is not relied on any more"
                ) from error
            raise self._translated(error) from error
        finally:
            self._counts.add(time.perf_counter() - began_s, failed=failed)
        return answer

    def _binds(self, run: Run, slot: Slot) -> bool:
        """Whether a run is to be bound to memory: it costs 3 µs for each input and output,
        and saves the copy of outputs.
        """
        if not self._bindable:
            return False
        return bool(slot.bound) or (run.output_bytes >= 0 and (self._on_device or run.output_bytes > _COPIED_BYTES))

    def _run_bound(
        self, run: Run, slot: Slot, inputs: Mapping[str, Array], outputs: Sequence[Array | None]
    ) -> list[Array]:
        """Run with bound memory: rows are read where the look-up has put them, outputs are
        written into the caller's arrays.
        """
        bind, place = self._session.io_binding(), self._provider
        for name, array in (*slot.arrays(self.bindings.features).items(), *inputs.items()):
            bind.bind_input(name, "cpu", 0, array.dtype, run.inputs[name], address_of(array))
        for name, (address, _) in slot.bound.items():
            # The look-up has waited for its own stream: the rows are there, whichever stream reads them.
            bind.bind_input(name, place.memory, 0, self.bindings.features[name].tensor.dtype, run.inputs[name], address)
        for name, out in zip(run.outputs, outputs, strict=True):
            if out is None:
                bind.bind_output(name, "cpu")  # ONNX Runtime's own memory, once the size is known
            else:
                bind.bind_output(name, "cpu", 0, out.dtype, out.shape, address_of(out))
        if self._on_device:
            bind.synchronize_inputs()
        with self.limits.run() as options:
            self._session.run_with_iobinding(bind, options)
        if self._on_device:
            bind.synchronize_outputs()
        if not any(out is None for out in outputs):
            return [out for out in outputs if out is not None]
        results = bind.get_outputs()
        return [value.numpy().copy() if out is None else out for value, out in zip(results, outputs, strict=True)]

    def _run_free(
        self, run: Run, slot: Slot, inputs: Mapping[str, Array], outputs: Sequence[Array | None]
    ) -> list[Array]:
        """Run without bound memory: rows are read where the look-up has put them, outputs are copied."""
        feed = slot.arrays(self.bindings.features)
        if inputs:
            feed = feed | {name: array.reshape(run.inputs[name]) for name, array in inputs.items()}
        with self.limits.run() as options:
            results = self._session.run(list(run.outputs), feed, options)
        answer: list[Array] = []
        for name, planned, result, out in zip(run.outputs, run.shapes, results, outputs, strict=True):
            if out is None and not self.is_fixed(name, planned):
                answer.append(result)
                continue
            self.check_shape(name, planned, result)
            if out is None:
                out = result
            else:
                out[...] = result
            answer.append(out)
        return answer

    def run_feed(self, names: Sequence[str], feed: Mapping[str, Array]) -> list[Array]:
        """Run the graph once on all its inputs, as it reads them. Returns the outputs `names`. Raises as `run`."""
        began_s = time.perf_counter()
        failed = True
        try:
            with self.limits.run() as options:
                results: list[Array] = self._session.run(names, feed, options)
            failed = False
        except TierstoreError:
            raise
        except Exception as error:
            raise self._translated(error) from error
        finally:
            self._counts.add(time.perf_counter() - began_s, failed=failed)
        return results

    def check_shape(self, name: str, planned: Shape | None, result: Array) -> None:
        """InferenceError where an output has another shape than was planned, which is not relied on from then on."""
        if planned != result.shape:
            self.loose |= {name}
            raise InferenceError(
                f"output {name!r}: expected shape {list(planned or ())}, as the dense part declares it, got "
                f"{list(result.shape)}; try again: its shape is not relied on any more"
            )

    def probe(self, run: Run, feed: Mapping[str, Array]) -> None:
        """Run once with all inputs, and remember the outputs whose shapes differ from those declared.

        For warm-up, before the session serves. Raises as `run`.
        """
        self._compare(run, self.try_feed(run, feed))

    def try_feed(self, run: Run, feed: Mapping[str, Array]) -> list[Array]:
        """The outputs of one run with all inputs, which is not counted. For warm-up. Raises as `run`."""
        try:
            arrays = {name: array.reshape(run.inputs[name]) for name, array in feed.items()}
            with self.limits.run() as options:
                results: list[Array] = self._session.run(list(run.outputs), arrays, options)
        except TierstoreError:
            raise
        except Exception as error:
            raise self._translated(error) from error
        return results

    def _probe_bound(self, run: Run, slot: Slot, inputs: Mapping[str, Array]) -> None:
        """`probe`, with rows on the device."""
        try:
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
            if planned is None or name in self.loose:
                seen = self._answered.get(name, (-1, *result.shape[1:]))
                self._answered[name] = (
                    tuple(a if a == b else -1 for a, b in zip(seen, result.shape, strict=True))
                    if len(seen) == result.ndim
                    else (-1,) * result.ndim
                )

    def _translated(self, error: Exception) -> TierstoreError:
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError) or any(mark in text for mark in _NO_MEMORY):
            self.limits.ran_out()
            return Overloaded(f"there is no memory to run the dense part on these inputs: {_short(text)}")
        if any(mark in text for mark in _OURS):
            return InferenceError(f"ONNX Runtime failed: {_short(text)}")
        return InvalidInput(f"the dense part cannot be run on these inputs: {_short(text)}")


def _short(text: str) -> str:
    for mark in ("Status Message: ", " : "):
        text = text.rpartition(mark)[2] or text
    return text if len(text) <= 300 else text[:299] + "…"
