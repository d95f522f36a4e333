"""Requests made from a dense part's signature, to run it before it serves.

The first runs of a session allocate its memory and start its threads. They also find outputs whose shapes differ
from those declared (converters of classifiers declare one label whatever the batch). Free functions, for the
thread that makes a session ready.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tierstore.predict.binding import Bindings, FeatureInput
from tierstore.predict.limits import SessionLimits
from tierstore.predict.session import Array, DenseSession
from tierstore.predict.signature import BYTES, Shape

_PROBED, _PROBED_AGAIN = (
    3,
    5,
)  # rows of the run that is compared with the declared shapes: a size that is hardly ever fixed
_BATCHES = (1, 32)
_MIXED, _LARGER, _MIXED_RTOL = 8, 50, 1e-3  # of the check of rows that are answered alike whoever is beside them
_OTHER = 4  # for free sizes other than the first

RowsOf = Callable[[FeatureInput, Shape], Array]


def warm(session: DenseSession, rows_of: RowsOf, pause: Callable[[], None]) -> None:
    """Run `session` on made-up requests of several sizes: strings are empty, numbers zero.

    `rows_of` gives rows of a feature input for bags or keys of a shape: an array [*shape, dim] of its dtype. `pause` is
    called before each run. Raises InvalidInput where the graph refuses such a request; it may accept those of clients.
    Raises RunLimit, Overloaded or TooLarge where it needs more time or memory than it may use.
    """
    for batch in (_PROBED, _PROBED_AGAIN, *_BATCHES):
        if batch == _PROBED_AGAIN and not session.answers_other_shapes:
            continue
        pause()
        leads, plain = made_up(session.bindings, batch, session.limits)
        run = session.plan(leads, {name: array.shape for name, array in plain.items()})
        rows = {name: rows_of(session.bindings.features[name], lead) for name, lead in leads.items()}
        if batch in (_PROBED, _PROBED_AGAIN):
            session.probe(run, {**rows, **plain})
            continue
        slot = session.acquire(run, list(leads))
        for name, array in rows.items():
            session.rows_of(slot, name).reshape(-1)[:] = array.reshape(-1)
        outputs = [
            _output(session, name, shape or ()) if session.is_fixed(name, shape) else None
            for name, shape in zip(run.outputs, run.shapes, strict=True)
        ]
        session.run(run, slot, plain, outputs)
        session.release(slot)


def mixes_rows(session: DenseSession) -> bool:
    """Whether a row's answer depends on the other rows of its batch, as far as a few runs show.

    Two batches of made-up rows, of which the first half is equal, and the others are much larger in one. Quantization
    of a whole batch at run time (`DynamicQuantizeLinear`) shows, and so do norms and means over it. False for a graph
    whose requests are not joined anyway, as its inputs and outputs name no common batch.
    """
    bindings = session.bindings
    ports = (*bindings.signature.inputs, *bindings.outputs.values())
    firsts = {tensor.shape[0] if tensor.shape else None for tensor in ports}
    if len(firsts) != 1 or not isinstance(next(iter(firsts)), str):
        return False
    leads, plain = made_up(bindings, _MIXED, session.limits)
    run = session.plan(leads, {name: array.shape for name, array in plain.items()})
    rng, half = np.random.default_rng(0), _MIXED // 2
    feed: dict[str, Array] = {}
    for tensor in bindings.signature.inputs:
        shape = run.inputs[tensor.name]
        floats = tensor.dtype.kind == "f"
        feed[tensor.name] = (
            rng.standard_normal(shape).astype(tensor.dtype) if floats else plain[tensor.name].reshape(shape)
        )
    other = {name: array.copy() for name, array in feed.items()}
    for array in other.values():
        if array.dtype.kind == "f":
            array[half:] *= _LARGER
    answers = [session.try_feed(run, each) for each in (feed, other)]
    for name, one, two in zip(run.outputs, *answers, strict=True):
        if bindings.outputs[name].dtype.kind != "f" or np.shape(one)[:1] != (_MIXED,) or np.shape(two) != np.shape(one):
            continue
        largest = np.abs(np.nan_to_num(one[:half])).max(initial=0.0)
        if not np.allclose(one[:half], two[:half], rtol=_MIXED_RTOL, atol=_MIXED_RTOL * largest, equal_nan=True):
            return True
    return False


def _output(session: DenseSession, name: str, shape: Shape) -> Array:
    dtype = session.bindings.outputs[name].dtype
    session.limits.check(f"output {name!r}", shape, dtype.itemsize)
    return np.empty(shape, dtype)


def made_up(bindings: Bindings, batch: int, limits: SessionLimits) -> tuple[dict[str, Shape], dict[str, Array]]:
    """A request of `batch` rows: shapes of the features' bags or keys, and the plain inputs themselves."""
    sizes: dict[str, int] = {}
    for tensor in bindings.signature.inputs:
        for place, dim in enumerate(tensor.shape or ()):
            if isinstance(dim, str) and place == 0:
                sizes[dim] = batch

    def size(place: int, dim: int | str | None) -> int:
        if isinstance(dim, int):
            return dim
        return (sizes.get(dim, _OTHER) if dim else None) or (batch if place == 0 else _OTHER)

    leads: dict[str, Shape] = {}
    plain: dict[str, Array] = {}
    for tensor in bindings.signature.inputs:
        feature = bindings.features.get(tensor.name)
        shape = tuple(size(place, dim) for place, dim in enumerate((None,) if tensor.shape is None else tensor.shape))
        limits.check(f"input {tensor.name!r}", shape, tensor.dtype.itemsize)
        if feature is None:
            plain[tensor.name] = np.full(shape, "" if tensor.datatype == BYTES else 0, tensor.dtype)
        elif len(shape) == 3:
            leads[tensor.name] = shape[:2]
        elif len(shape) == 2 and isinstance(tensor.shape and tensor.shape[1], int) and shape[1] != feature.dim:
            leads[tensor.name] = shape[0], shape[1] // feature.dim
        else:
            leads[tensor.name] = shape[:1]
    return leads, plain
