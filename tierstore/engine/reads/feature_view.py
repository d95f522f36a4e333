"""A feature under a view: how its keys become codes, and where their rows are. Immutable; any thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.arguments import weights_of
from tierstore.engine.data.table_view import DTYPES, TableView
from tierstore.errors import InvalidInput
from tierstore.formats.colliding import CollidingKeys
from tierstore.formats.key_hash import rows_of
from tierstore.formats.keys import as_codes
from tierstore.formats.trainer_hash import RowNumbers
from tierstore.kernels.codec import all_finite
from tierstore.kernels.pool import check_offsets
from tierstore.tiers.device.lookup import Pooling
from tierstore.types import Combiner, FeatureSpec, GpuArray, Keys, KeysLike, TrainerHash, Vectors

_CODES = {str(dtype): code for code, dtype in enumerate(DTYPES)}
_COMBINERS = {combiner.value: combiner for combiner in Combiner}


class FeatureView:
    """One feature: its `rows` are in a table; `padding` is the code of its padding key, if it has one."""

    __slots__ = ("_colliding", "_hash", "_key_type", "dim", "padding", "rows", "spec")

    def __init__(self, spec: FeatureSpec, rows: TableView, colliding: CollidingKeys | None) -> None:
        table, padding = rows.table.spec, spec.padding_key
        self.spec, self.rows, self._colliding, self.dim = spec, rows, colliding, table.dim
        self._hash = RowNumbers.of(spec.hash) if isinstance(spec.hash, TrainerHash) else spec.hash
        self._key_type = spec.key_type(table)
        self.padding = None if padding is None else int(as_codes([padding], table.key, colliding)[0])

    def codes(self, keys: KeysLike) -> Keys:
        """The codes of a request's keys, int64[n], C-contiguous. InvalidInput."""
        if self._hash is None:
            return as_codes(keys, self._key_type, self._colliding)
        if isinstance(self._hash, RowNumbers):
            return self._hash.rows(keys)
        return rows_of(as_codes(keys, self._key_type), self._hash)

    def skipped(self, codes: Keys) -> int:
        """How many codes are the padding key's, which is not looked up."""
        return 0 if self.padding is None else int(np.count_nonzero(codes == self.padding))

    def bags(
        self,
        n: int,
        offsets: npt.ArrayLike | GpuArray,
        weights: npt.ArrayLike | GpuArray | None = None,
        combiner: str | None = None,
    ) -> Pooling:
        """The pooling of `n` keys, checked but for what is on the GPU. InvalidInput."""
        how = self._combiner(combiner)
        factors = weights if weights is None or isinstance(weights, GpuArray) else _checked_weights(weights, n)
        return Pooling(offsets if isinstance(offsets, GpuArray) else check_offsets(offsets, n), factors, how)

    def _combiner(self, name: str | None) -> Combiner:
        """The combiner of that name; for None the feature's own. InvalidInput if there is none."""
        if name is None:
            if self.spec.combiner is None:
                raise InvalidInput(
                    f"feature {self.spec.name!r} has no combiner of its own; name one: combiner='sum', 'mean' or "
                    "'sqrtn'"
                )
            return self.spec.combiner
        combiner = _COMBINERS.get(name) if isinstance(name, str) else None
        if combiner is None:
            raise InvalidInput(f"combiner {name!r} is not known: use 'sum', 'mean' or 'sqrtn'")
        return combiner

    def checked_out(self, out: Vectors, n: int, code: int) -> Vectors:
        """`out`, checked for an answer of `n` rows. InvalidInput if it does not fit."""
        shape, dtype = (n, self.dim), DTYPES[code]
        if not isinstance(out, np.ndarray):
            raise InvalidInput(f"out: expected a NumPy array {dtype} of shape {shape}, got {type(out).__name__!r}")
        flags = out.flags
        if out.shape != shape or out.dtype != dtype or not flags.c_contiguous or not flags.writeable:
            raise InvalidInput(
                f"out: expected a writable C-contiguous {dtype} array of shape {shape}, got {out.dtype} of shape "
                f"{out.shape}"
            )
        return out


def answer_code(dtype: str) -> int:
    """The code of an answer's dtype, by its name. InvalidInput for other names."""
    code = _CODES.get(dtype) if isinstance(dtype, str) else None
    if code is None:
        raise InvalidInput(f"dtype {dtype!r} is not known: answers are 'float32' or 'float16'")
    return code


def _checked_weights(weights: Any, n: int) -> np.ndarray:
    """`weights` as float32[n]. InvalidInput."""
    array = weights_of(weights, n)
    if not all_finite(array):
        raise InvalidInput(f"weights: the one at {int(np.flatnonzero(~np.isfinite(array))[0])} is NaN or infinite")
    return array
