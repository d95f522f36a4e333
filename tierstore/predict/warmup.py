"""Requests made up from a dense part's own signature, to run it before it serves.

The first runs of a session allocate its memory and start its threads; and outputs that do not keep to their declared
shapes are found out here (converters of classifiers declare one label whatever the batch). Free functions, for the
thread that makes a session ready.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tierstore.predict.binding import FeatureInput, Wiring
from tierstore.predict.session import Array, DenseSession
from tierstore.predict.signature import BYTES, Shape

_PROBED = 3  # rows of the run that is compared with what is declared: a size that none is fixed to by chance
_BATCHES = (1, 32)
_OTHER = 4  # of a size that is free and does not stand first

RowsOf = Callable[[FeatureInput, Shape], Array]


def warm(session: DenseSession, rows_of: RowsOf, rest: Callable[[], None]) -> None:
    """Run `session` on made-up requests of several sizes: strings are empty, numbers zero.

    `rows_of` gives rows of a feature input for bags or keys of a shape: an array [*shape, dim] of its dtype. `rest` is
    called before each run. Raises InvalidInput where the graph cannot take such a request, which says nothing about
    those of clients.
    """
    for batch in (_PROBED, *_BATCHES):
        rest()
        leads, plain = made_up(session.wiring, batch)
        run = session.plan(leads, {name: array.shape for name, array in plain.items()})
        rows = {name: rows_of(session.wiring.features[name], lead) for name, lead in leads.items()}
        if batch == _PROBED:
            session.probe(run, {**rows, **plain})
            continue
        slot = session.take(run, list(leads))
        for name, array in rows.items():
            slot.arrays[name].reshape(-1)[:] = array.reshape(-1)
        outputs = [
            np.empty(shape or (), session.wiring.outputs[name].dtype) if session.is_fixed(name, shape) else None
            for name, shape in zip(run.outputs, run.shapes, strict=True)
        ]
        session.run(run, slot, plain, outputs)
        session.give(slot)


def made_up(wiring: Wiring, batch: int) -> tuple[dict[str, Shape], dict[str, Array]]:
    """A request of `batch` rows: shapes of the features' bags or keys, and the plain inputs themselves."""
    sizes: dict[str, int] = {}
    for tensor in wiring.signature.inputs:
        for place, dim in enumerate(tensor.shape or ()):
            if isinstance(dim, str) and place == 0:
                sizes[dim] = batch

    def size(place: int, dim: int | str | None) -> int:
        if isinstance(dim, int):
            return dim
        return (sizes.get(dim, _OTHER) if dim else None) or (batch if place == 0 else _OTHER)

    leads: dict[str, Shape] = {}
    plain: dict[str, Array] = {}
    for tensor in wiring.signature.inputs:
        feature = wiring.features.get(tensor.name)
        shape = tuple(size(place, dim) for place, dim in enumerate((None,) if tensor.shape is None else tensor.shape))
        if feature is None:
            plain[tensor.name] = np.full(shape, "" if tensor.datatype == BYTES else 0, tensor.dtype)
        elif len(shape) == 3:
            leads[tensor.name] = shape[:2]
        elif len(shape) == 2 and isinstance(tensor.shape and tensor.shape[1], int) and shape[1] != feature.dim:
            leads[tensor.name] = shape[0], shape[1] // feature.dim
        else:
            leads[tensor.name] = shape[:1]
    return leads, plain
